from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.algos.preference import cross_entropy

rows = st.lists(
    st.tuples(st.lists(st.floats(-6, 6), min_size=5, max_size=5), st.integers(0, 4)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(rows, st.floats(-3, 3), st.randoms(use_true_random=False))
def test_cross_entropy_agrees_with_torch(drawn: list[tuple[list[float], int]], shift: float, random: object) -> None:
    logits = torch.tensor([row for row, _ in drawn], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([target for _, target in drawn])

    def ours(given: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return cross_entropy(given.log_softmax(-1).gather(-1, of[:, None]).squeeze(-1))

    loss = ours(logits, targets)
    assert bool((loss >= 0).all())
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(-1) - torch.nn.functional.one_hot(targets, 5))
    torch.testing.assert_close(ours(logits + shift, targets), loss)
    order = list(range(len(drawn)))
    random.shuffle(order)  # type: ignore[attr-defined]
    torch.testing.assert_close(ours(logits[order], targets[order]), loss[order])
