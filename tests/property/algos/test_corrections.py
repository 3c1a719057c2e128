from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algos.corrections import CORRECTIONS, Corrected
from tidemill.algos.samples import Samples
from tidemill.config.algorithm import CORRECTION_LIMITS

tokens = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=20)
KINDS = [kind for kind in CORRECTIONS if kind != "mu_step"]
COMMON = settings(max_examples=40)


def corrected(kind: str, rows: list[tuple[float, int]]) -> Corrected:
    log_ratio = torch.tensor([log for log, _ in rows], dtype=torch.float64)
    limits: dict[str, Any] = CORRECTION_LIMITS[kind]._asdict()  # type: ignore[index]
    given = {name: value for name, value in limits.items() if value is not None}
    return CORRECTIONS[kind].function(log_ratio, Samples(torch.tensor([sample for _, sample in rows]), 4), **given)


@pytest.mark.parametrize("kind", KINDS)
@COMMON
@given(rows=tokens)
def test_weights_are_bounded_and_flags_say_why(kind: str, rows: list[tuple[float, int]]) -> None:
    result = corrected(kind, rows)
    high = CORRECTION_LIMITS[kind].high  # type: ignore[index]
    assert bool((result.weights_T >= 0).all())
    if high is not None:
        assert bool((result.weights_T <= max(high, 1.0)).all())
    assert bool((result.weights_T[result.masked_T] == 0).all())
    assert not bool((result.truncated_T & result.masked_T).any())


@pytest.mark.parametrize("kind", KINDS)
@COMMON
@given(samples=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_on_policy_every_token_weighs_one(kind: str, samples: list[int]) -> None:
    result = corrected(kind, [(0.0, sample) for sample in samples])
    assert result.weights_T.tolist() == [1.0] * len(samples)
    assert not bool((result.truncated_T | result.masked_T).any())


@pytest.mark.parametrize("kind", KINDS)
@COMMON
@given(rows=tokens, random=st.randoms(use_true_random=False))
def test_permutation(kind: str, rows: list[tuple[float, int]], random: Any) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    one, other = corrected(kind, rows), corrected(kind, [rows[i] for i in order])
    torch.testing.assert_close(other.weights_T, one.weights_T[order])
