from __future__ import annotations

import pytest
import torch

from tidemill.algos.returns import value_loss


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [
        # start 1, return 3, clip 0.5: inside the range (1.2 - 3)², gradient 2 (1.2 - 3)
        (1.2, 3.24, -3.6, False),
        # outside, towards the return: clipped to 1.5, (1.5 - 3)² > (2 - 3)², no gradient
        (2.0, 2.25, 0.0, True),
        # outside, away from the return: the plain loss is larger
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


def test_float32_values_within_the_range_are_never_clipped() -> None:
    """For many values V_start + clamp(V - V_start) is a different float than V."""
    draw = torch.Generator().manual_seed(4)
    values, start, returns = 0.3 * torch.randn(3, 200_000, generator=draw)
    inside = (values - start).abs() <= 0.2
    values, start, returns = (each[inside] for each in (values, start, returns))
    assert bool((start + (values - start) != values).any())
    clipped, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    result = value_loss(clipped, returns, start, clip=0.2)
    result.loss_T.sum().backward()
    value_loss(plain, returns, start).loss_T.sum().backward()
    assert result.clipped_T.sum().item() == 0
    assert clipped.grad is not None
    assert plain.grad is not None
    assert torch.equal(clipped.grad, plain.grad)


def test_float32_values_outside_the_range_are_clipped() -> None:
    # start 3, clip 0.25: 3.5 is clipped to 3.25, (3.25 - 5)² = 3.0625; 2.5 to 2.75, (2.75 - 1)² = 3.0625
    values = torch.tensor([3.5, 2.5], requires_grad=True)
    result = value_loss(values, torch.tensor([5.0, 1.0]), torch.tensor([3.0, 3.0]), clip=0.25)
    result.loss_T.sum().backward()
    assert result.loss_T.tolist() == [3.0625, 3.0625]
    assert result.clipped_T.tolist() == [True, True]
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0]
