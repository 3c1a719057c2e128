from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.algos.preference import bradley_terry, dpo, ipo, margin

pair = st.tuples(*[st.floats(-9, 0)] * 4)
pairs = st.lists(pair, min_size=1, max_size=8)
COMMON = settings(max_examples=60)
Rows = list[tuple[float, float, float, float]]


def columns(rows: Rows) -> list[Tensor]:
    return list(torch.tensor(rows, dtype=torch.float64).unbind(1))


@COMMON
@given(pairs, st.floats(-2, 2))
def test_losses_depend_only_on_differences(rows: Rows, shift: float) -> None:
    plain, moved = columns(rows), [column + shift for column in columns(rows)]
    torch.testing.assert_close(dpo(*moved, beta=0.1), dpo(*plain, beta=0.1))
    torch.testing.assert_close(ipo(*moved, beta=0.1), ipo(*plain, beta=0.1))
    torch.testing.assert_close(bradley_terry(*moved[:2]), bradley_terry(*plain[:2]))


@COMMON
@given(pairs, st.floats(0.01, 1), st.floats(0, 0.5))
def test_swapping_the_pair_equals_swapping_the_smoothing(rows: Rows, beta: float, smoothing: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = columns(rows)
    torch.testing.assert_close(
        dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=smoothing),
        dpo(rejected, chosen, ref_rejected, ref_chosen, beta=beta, label_smoothing=1 - smoothing),
    )


@COMMON
@given(pairs)
def test_a_policy_equal_to_its_reference_has_margin_zero(rows: Rows) -> None:
    chosen, rejected, *_ = columns(rows)
    torch.testing.assert_close(dpo(chosen, rejected, chosen, rejected, beta=0.1), torch.full_like(chosen, 2.0).log())
    torch.testing.assert_close(ipo(chosen, rejected, chosen, rejected, beta=0.5), torch.ones_like(chosen))


@COMMON
@given(pairs)
def test_the_margin_is_antisymmetric(rows: Rows) -> None:
    chosen, rejected, ref_chosen, ref_rejected = columns(rows)
    h = margin(chosen, rejected, ref_chosen, ref_rejected)
    torch.testing.assert_close(margin(rejected, chosen, ref_rejected, ref_chosen), -h)
    torch.testing.assert_close(margin(ref_chosen, ref_rejected, chosen, rejected), -h)


@COMMON
@given(pairs, st.floats(0.05, 1))
def test_ipo_is_zero_at_its_target_and_symmetric(rows: Rows, beta: float) -> None:
    chosen, rejected, ref_chosen, ref_rejected = columns(rows)
    away = 1 / (2 * beta) - margin(chosen, rejected, ref_chosen, ref_rejected)
    for step, share in ((away, 0.0), (2 * away, 1.0), (0.5 * away, 0.25)):
        loss = ipo(chosen + step, rejected, ref_chosen, ref_rejected, beta=beta)
        torch.testing.assert_close(loss, share * away.square(), atol=1e-9, rtol=1e-6)


@COMMON
@given(pairs)
def test_swapping_a_pair_changes_the_loss_by_the_score_difference(rows: Rows) -> None:
    chosen, rejected, margins, _ = columns(rows)
    # -log σ(-d) + log σ(d) = d
    torch.testing.assert_close(bradley_terry(rejected, chosen) - bradley_terry(chosen, rejected), chosen - rejected)
    # a margin reduces the difference; centring does not depend on it and is smallest at a mean of 0
    torch.testing.assert_close(
        bradley_terry(chosen, rejected, margins_P=margins), bradley_terry(chosen - margins, rejected)
    )
    pull = bradley_terry(chosen, rejected, centring=0.1) - bradley_terry(chosen, rejected)
    torch.testing.assert_close(pull, 0.1 * (chosen + rejected).square())
