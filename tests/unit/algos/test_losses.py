from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tidemill.algos.losses import LOSSES, Samples, TokenLoss, cispo, denominator, gspo, ppo_clip, token_weights
from tidemill.config.algorithm import LOSS_NAMES, AlgorithmConfig


def clip(ratios: list[float], advantages: list[float], *, dual_clip: float | None = None) -> tuple[Tensor, TokenLoss]:
    """Losses of tokens with proximal logprob -2 and trainer logprob -2 + log(ratio)."""
    trainer = (torch.tensor(ratios, dtype=torch.float64).log() - 2.0).requires_grad_()
    proximal = torch.full_like(trainer, -2.0).detach()
    loss = ppo_clip(
        trainer,
        proximal,
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    loss.loss_T.sum().backward()
    assert trainer.grad is not None
    return trainer.grad, loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # inside the range: loss -ρA, gradient -ρA
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # outside, moving away: clipped to the bound (1.3 * 2, 0.8 * -2), no gradient
        (1.5, 2.0, -2.6, 0.0, True),
        (0.5, -2.0, 1.6, 0.0, True),
        # outside, moving back: not clipped, -ρA
        (1.5, -2.0, 3.0, 3.0, False),
        (0.5, 2.0, -1.0, -1.0, False),
        # no advantage: no loss, not clipped
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    grad, result = clip([ratio], [advantage])
    assert result.loss_T.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)
    assert result.clipped_T.tolist() == [clipped]
    assert result.ratio_T.item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # A < 0 and ρ beyond c = 3: the objective cA = -6 instead of ρA = -10
        (5.0, -2.0, 6.0, 0.0, True),
        # below c nothing changes
        (2.0, -2.0, 4.0, 4.0, False),
        # the floor does not apply to A > 0: upper bound 1.3, no lower bound
        (5.0, 2.0, -2.6, 0.0, True),
        (0.1, 2.0, -0.2, -0.2, False),
        # the lower bound still clips
        (0.5, -2.0, 1.6, 0.0, True),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    grad, result = clip([ratio], [advantage], dual_clip=3.0)
    assert result.loss_T.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)
    assert result.clipped_T.tolist() == [clipped]


def test_only_the_loss_carries_a_gradient() -> None:
    trainer = torch.tensor([-1.0], requires_grad=True)
    proximal = torch.tensor([-1.1], requires_grad=True)
    advantages = torch.tensor([1.0], requires_grad=True)
    result = ppo_clip(trainer, proximal, advantages, clip_low=0.2, clip_high=0.2)
    assert not result.ratio_T.requires_grad
    assert not result.clipped_T.requires_grad
    result.loss_T.sum().backward()
    assert trainer.grad is not None
    assert proximal.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_huge_ratio_gives_no_nan(advantage: float, log_ratio: float) -> None:
    # exp(200) overflows float32; the zero gradient of a clipped token must not become 0 * inf
    trainer = torch.tensor([log_ratio], requires_grad=True)
    result = ppo_clip(trainer, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    result.loss_T.sum().backward()
    assert trainer.grad is not None
    assert math.isfinite(trainer.grad.item())
    assert math.isfinite(result.loss_T.item())


def test_no_tokens() -> None:
    empty = torch.zeros(0)
    assert ppo_clip(empty, empty, empty, clip_low=0.2, clip_high=0.2).loss_T.shape == (0,)


def test_token_weights_by_sample() -> None:
    # samples of 2 and 4 tokens: 1/2 and 1/4 each; an invalid one (no tokens) has weight 0 and is not counted
    assert token_weights([2, 4, 0], "sample") == [0.5, 0.25, 0.0]
    assert denominator([2, 4, 0], "sample") == 2


def test_token_weights_by_token() -> None:
    assert token_weights([2, 4, 0], "token") == [1.0, 1.0, 0.0]
    assert denominator([2, 4, 0], "token") == 6


def test_token_weights_by_a_constant() -> None:
    # the sum over tokens, divided by two samples × 8
    assert token_weights([2, 4, 0], "constant") == [1.0, 1.0, 0.0]
    assert denominator([2, 4, 0], "constant", constant=8) == 16


def test_weighted_sum_over_denominator_is_the_mean_for_any_microbatches() -> None:
    # losses (1, 3 | 2, 2, 2, 6): means of samples 2 and 3, their mean 2.5; mean of tokens 16 / 6
    losses = [[1.0, 3.0], [2.0, 2.0, 2.0, 6.0]]
    for normalize, expected in (("sample", 2.5), ("token", 16 / 6)):
        total, count = 0.0, 0
        for sample in losses:  # one microbatch each
            (weight,) = token_weights([len(sample)], normalize)  # type: ignore[arg-type]
            total += weight * sum(sample)
            count += denominator([len(sample)], normalize)  # type: ignore[arg-type]
        assert total / count == pytest.approx(expected)


def test_config_names_match_the_registry() -> None:
    assert tuple(LOSSES) == LOSS_NAMES


def test_every_setting_of_a_loss_is_a_key() -> None:
    for loss in LOSSES.values():
        assert set(loss.settings) <= set(AlgorithmConfig.model_fields)
        assert loss.formula and loss.source


def sequences(ratios: list[list[float]], advantages: list[float]) -> tuple[Tensor, TokenLoss]:
    """(gradient, loss) of GSPO for samples with these token ratios: mean over tokens, sum over samples."""
    samples = Samples(torch.tensor([s for s, row in enumerate(ratios) for _ in row]), len(ratios))
    trainer = torch.tensor([r for row in ratios for r in row], dtype=torch.float64).log().requires_grad_()
    given = samples.spread(torch.tensor(advantages, dtype=torch.float64))
    loss = gspo(trainer, torch.zeros_like(trainer), given, samples=samples, clip_low=0.2, clip_high=0.3)
    samples.mean(loss.loss_T).sum().backward()
    assert trainer.grad is not None
    return trainer.grad, loss


def test_gspo_takes_the_geometric_mean_of_a_sequence() -> None:
    # s = (0.5 * 2 * 1.331)^(1/3) = 1.1, inside [0.8, 1.3]: loss -1.1 * 2; token gradient -sA / 3 = -0.7333333
    grad, loss = sequences([[0.5, 2.0, 1.331]], [2.0])
    assert loss.loss_T.tolist() == pytest.approx([-2.2] * 3)
    assert loss.ratio_T.tolist() == pytest.approx([1.1] * 3)
    assert grad.tolist() == pytest.approx([-0.7333333] * 3)
    assert not loss.clipped_T.any()


def test_gspo_clips_whole_sequences() -> None:
    # s = 2, A = 1: clipped to 1.3, no gradient; s = 2, A = -1: not clipped, 2; s = 0.5, A = -1: clipped to 0.8
    grad, loss = sequences([[4.0, 1.0], [2.0], [0.25, 1.0]], [1.0, -1.0, -1.0])
    assert loss.loss_T.tolist() == pytest.approx([-1.3, -1.3, 2.0, 0.8, 0.8])
    assert loss.clipped_T.tolist() == [True, True, False, True, True]
    assert grad.tolist() == pytest.approx([0.0, 0.0, 2.0, 0.0, 0.0])


def test_cispo_truncates_the_ratio_and_keeps_the_gradient() -> None:
    # proximal -2, ratios (2, 10, 0.1), clip 5: weights (2, 5, 0.1); loss -w A log π with log π = log r - 2
    # 2 * 1.5 * 1.3068528 = 3.9205585; -5 * 0.3025851 (log π = 0.3025851); 0.1 * -1 * 4.3025851 = -0.4302585
    trainer = (torch.tensor([2.0, 10.0, 0.1], dtype=torch.float64).log() - 2.0).requires_grad_()
    loss = cispo(trainer, torch.full_like(trainer, -2.0), torch.tensor([1.5, 1.0, -1.0]), clip_high=5.0)
    assert loss.loss_T.tolist() == pytest.approx([3.9205585, -1.5129255, -0.4302585])
    assert loss.clipped_T.tolist() == [False, True, False]
    loss.loss_T.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == pytest.approx([-3.0, -5.0, 0.1])  # -w A
