"""The worked examples every implementation must reproduce."""

from __future__ import annotations

import pytest
import torch

from tidemill.algos.losses import ppo_clip
from tidemill.algos.returns import gae


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


def test_gae_of_a_terminal_episode() -> None:
    # δ_3 = 1 - .8 = .2; δ_2 = .99 * .8 - .7 = .092, A_2 = .092 + .9405 * .2 = .2801; δ_1 = .99 * .7 - .6 = .093,
    # A_1 = .093 + .9405 * .2801 = .3564; δ_0 = .99 * .6 - .5 = .094, A_0 = .094 + .9405 * .3564 = .4292
    ends = torch.tensor([False, False, False, True])
    advantages = gae(
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
        torch.tensor([0.5, 0.6, 0.7, 0.8]),
        torch.tensor([0.6, 0.7, 0.8, 123.0]),  # what follows a terminal state does not count
        terminated_T=ends,
        truncated_T=torch.zeros_like(ends),
        gamma=0.99,
        lam=0.95,
    )
    assert advantages.tolist() == pytest.approx([0.4292, 0.3564, 0.2801, 0.2], abs=5e-5)


def test_gae_with_bootstrap() -> None:
    # δ_2 = 1 + .99 * .8 - .7 = 1.092; δ_1 = .99 * .7 - .6 = .093, A_1 = .093 + .9405 * 1.092 = 1.1200;
    # δ_0 = 1 + .99 * .6 - .5 = 1.094, A_0 = 1.094 + .9405 * 1.1200 = 2.1474
    cut = torch.tensor([False, False, True])
    advantages = gae(
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([0.5, 0.6, 0.7]),
        torch.tensor([0.6, 0.7, 0.8]),
        terminated_T=torch.zeros_like(cut),
        truncated_T=cut,
        gamma=0.99,
        lam=0.95,
    )
    assert advantages.tolist() == pytest.approx([2.1474, 1.1200, 1.0920], abs=5e-5)
