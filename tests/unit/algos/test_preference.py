from __future__ import annotations

import pytest
import torch

from tidemill.algos.preference import PREFERENCE_LOSSES, bradley_terry, cross_entropy, dpo, ipo


def pair(values: tuple[float, float, float, float]) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in values]


def test_dpo() -> None:
    # h = (-2 + 3) - (-5 + 4) = 2; βh = 0.2: -log σ(0.2) = log(1 + e^-0.2) = 0.5981389
    chosen, rejected, ref_chosen, ref_rejected = pair((-2.0, -5.0, -3.0, -4.0))
    loss = dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)
    assert loss.item() == pytest.approx(0.5981389)
    loss.sum().backward()
    # gradient -β σ(-0.2) = -0.1 * 0.4501660, and the opposite for the rejected one; none for the reference
    assert chosen.grad is not None and rejected.grad is not None
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.0450166, 0.0450166))
    assert (ref_chosen.grad, ref_rejected.grad) == (None, None)


def test_label_smoothing_mixes_with_the_swapped_pair() -> None:
    # 0.9 * 0.5981389 + 0.1 * log(1 + e^0.2) = 0.5383250 + 0.1 * 0.7981389
    assert dpo(*pair((-2.0, -5.0, -3.0, -4.0)), beta=0.1, label_smoothing=0.1).item() == pytest.approx(0.6181389)


def test_ipo() -> None:
    # h = 2, 1 / (2 * 0.1) = 5: 9
    assert ipo(*pair((-2.0, -5.0, -3.0, -4.0)), beta=0.1).item() == pytest.approx(9.0)


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([2.0]), torch.tensor([1.0])
    # log(1 + e^-1) = 0.3132617; with margin 1: log 2 = 0.6931472; centring 0.01 * 3² = 0.09
    assert bradley_terry(chosen, rejected).item() == pytest.approx(0.3132617)
    assert bradley_terry(chosen, rejected, margins_P=torch.tensor([1.0])).item() == pytest.approx(0.6931472)
    assert bradley_terry(chosen, rejected, centring=0.01).item() == pytest.approx(0.4032617)


def test_cross_entropy() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss = cross_entropy(logprobs)
    assert loss.tolist() == [0.5, 2.0]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0]


def test_registry() -> None:
    assert {name: row.reduce for name, row in PREFERENCE_LOSSES.items()} == {"dpo": "sum", "ipo": "mean"}
    for row in PREFERENCE_LOSSES.values():
        # policy equal to reference: h = 0, so that -log σ(0) = log 2 and (0 - 1 / 0.2)² = 25
        assert row.function(*pair((-1.0, -2.0, -1.0, -2.0)), **row.settings).item() in (pytest.approx(0.6931472), 25.0)
