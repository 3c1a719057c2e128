"""The worked examples every implementation must reproduce."""

from __future__ import annotations

import pytest
import torch

from tidemill.algos.losses import ppo_clip


def test_ppo_objective() -> None:
    # ratio e^0.5 = 1.6487; min(1.6487 * 0.8, 1.2 * 0.8) = min(1.319, 0.96) = 0.96
    result = ppo_clip(torch.tensor([-1.5]), torch.tensor([-2.0]), torch.tensor([0.8]), clip_low=0.2, clip_high=0.2)
    assert result.ratio_T.item() == pytest.approx(1.6487, abs=5e-5)
    assert result.loss_T.item() == pytest.approx(-0.96)


def test_clip_fraction() -> None:
    # ratio 1.5 with A 1: held at 1.2; 0.5 with A -1: held at 0.8; the two ratios of 1 are inside: 2 of 4
    ratios = torch.tensor([1.5, 1.0, 0.5, 1.0])
    result = ppo_clip(ratios.log(), torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    assert result.clipped_T.float().mean().item() == 0.5


def test_a_ratio_pulled_back_is_not_clipped() -> None:
    result = ppo_clip(torch.tensor([1.5]).log(), torch.zeros(1), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert result.clipped_T.tolist() == [False]
    assert result.loss_T.item() == pytest.approx(1.5)  # -(1.5 * -1)
