from __future__ import annotations

import pytest
import torch

from tidemill.algos.value import value_loss


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [
        # start 1, return 3, clip 0.5: inside the range (1.2 - 3)², gradient 2 (1.2 - 3)
        (1.2, 3.24, -3.6, False),
        # beyond it in the right direction: held at 1.5, (1.5 - 3)² > (2 - 3)², no gradient
        (2.0, 2.25, 0.0, True),
        # beyond it in the wrong direction: the plain loss is the larger one
        (0.0, 9.0, -6.0, False),
    ],
)
def test_clipped(value: float, loss: float, gradient: float, clipped: bool) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    result = value_loss(values, torch.tensor([3.0]), torch.tensor([1.0]), clip=0.5)
    assert result.loss_T.item() == pytest.approx(loss)
    assert result.clipped_T.tolist() == [clipped]
    result.loss_T.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)


def test_plain() -> None:
    values = torch.tensor([2.0], requires_grad=True)
    returns, start = torch.tensor([3.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    result = value_loss(values, returns, start)
    assert (result.loss_T.item(), result.clipped_T.tolist()) == (1.0, [False])
    result.loss_T.sum().backward()
    assert (returns.grad, start.grad) == (None, None)
