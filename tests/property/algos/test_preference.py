from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.algos.preference import bradley_terry, dpo, ipo

pair = st.tuples(*[st.floats(-9, 0)] * 4)
pairs = st.lists(pair, min_size=1, max_size=8)
COMMON = settings(max_examples=60)
Rows = list[tuple[float, float, float, float]]


def columns(rows: Rows) -> list[Tensor]:
    return list(torch.tensor(rows, dtype=torch.float64).unbind(1))


@COMMON
@given(pairs, st.floats(-2, 2))
def test_only_differences_count(rows: Rows, shift: float) -> None:
    plain, moved = columns(rows), [column + shift for column in columns(rows)]
    torch.testing.assert_close(dpo(*moved, beta=0.1), dpo(*plain, beta=0.1))
    torch.testing.assert_close(ipo(*moved, beta=0.1), ipo(*plain, beta=0.1))
    torch.testing.assert_close(bradley_terry(*moved[:2]), bradley_terry(*plain[:2]))


@COMMON
@given(pairs, st.floats(0.01, 1), st.floats(0, 0.5))
def test_swapping_the_pair_and_the_smoothing_is_the_same(rows: Rows, beta: float, smoothing: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = columns(rows)
    torch.testing.assert_close(
        dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=smoothing),
        dpo(rejected, chosen, ref_rejected, ref_chosen, beta=beta, label_smoothing=1 - smoothing),
    )


@COMMON
@given(pairs)
def test_a_policy_like_its_reference_is_undecided(rows: Rows) -> None:
    chosen, rejected, *_ = columns(rows)
    torch.testing.assert_close(dpo(chosen, rejected, chosen, rejected, beta=0.1), torch.full_like(chosen, 2.0).log())
    torch.testing.assert_close(ipo(chosen, rejected, chosen, rejected, beta=0.5), torch.ones_like(chosen))
