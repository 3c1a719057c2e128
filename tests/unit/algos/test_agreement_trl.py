"""Agreement with TRL: losses on given numbers, and advantages of a trainer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.output_layers import logprobs_of
from tests.trl_losses import (
    LENGTHS,
    MAX_NEW_TOKENS,
    drawn,
    trl_policy_loss,
    trl_preference_loss,
    trl_reward_loss,
)
from tidemill.algos.advantages import dr_grpo, grpo, rloo
from tidemill.algos.corrections import CORRECTIONS
from tidemill.algos.kl import k3, kl_reward
from tidemill.algos.losses import LOSSES, Normalize, Samples, denominator, token_weights
from tidemill.algos.preference import PREFERENCE_LOSSES, bradley_terry, dpo
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.model import CharModelConfig
from tidemill.trainer.update import policy_outcome

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and its dependencies

BETA, CLIP_LOW, CLIP_HIGH = 0.04, 0.2, 0.28
TRL_LOSS_TYPE: dict[Normalize, str] = {"sample": "grpo", "token": "dapo", "constant": "dr_grpo"}
SAMPLES = Samples(torch.repeat_interleave(torch.tensor(LENGTHS)), len(LENGTHS))


def our_loss(
    name: str,
    normalize: Normalize,
    *,
    beta: float = 0.0,
    kl_ratio: bool = False,
    correction: Tensor | None = None,
    **limits: Any,
) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and clipped tokens of the flattened functions, with one sample per microbatch."""
    trainer, proximal, ref, advantages, mask = drawn()
    logprobs_T = trainer[mask].requires_grad_()
    row = LOSSES[name]
    if row.by_sample:
        limits["samples"] = SAMPLES
    loss = row.function(logprobs_T, proximal[mask], SAMPLES.spread(advantages), **limits)
    weights = torch.ones_like(logprobs_T) if correction is None else correction
    penalty = k3(logprobs_T, ref[mask])
    if kl_ratio:
        penalty = penalty * (logprobs_T - proximal[mask]).exp()
    per_token = loss.loss_T * weights.detach() + beta * penalty
    weights_S = torch.tensor(token_weights(LENGTHS, normalize), dtype=torch.float64)
    weights_T = weights_S.repeat_interleave(torch.tensor(LENGTHS))
    for part, weight in zip(per_token.split(LENGTHS), weights_T.split(LENGTHS), strict=True):
        (part * weight).sum().backward(retain_graph=True)
    scale = 1.0 / denominator(LENGTHS, normalize, constant=MAX_NEW_TOKENS)
    assert logprobs_T.grad is not None
    value = float((per_token * weights_T).sum().detach()) * scale
    return value, logprobs_T.grad * scale, loss.clipped_T


def assert_agree(ours: tuple[float, Tensor, Tensor], theirs: tuple[float, Tensor, dict[str, Any]]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-12)
    assert 0.1 < ours[2].double().mean().item() < 0.9  # both cases occur


@pytest.mark.parametrize("normalize", ["sample", "token", "constant"])
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_gradient_and_clip_fraction(normalize: Normalize, beta: float, dual_clip: float | None) -> None:
    # TRL's `delta`, an upper limit of the ratio itself, is the dual clip: where A < 0, min(ρ, δ) A = max(ρA, δA).
    theirs = trl_policy_loss(
        loss_type=TRL_LOSS_TYPE[normalize], beta=beta, delta=dual_clip, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
    ours = our_loss("ppo_clip", normalize, beta=beta, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=dual_clip)
    assert_agree(ours, theirs)
    if dual_clip is None:  # TRL does not count tokens limited by delta
        assert ours[2].double().mean().item() == pytest.approx(theirs[2]["clip_ratio/region_mean"][0])


def test_gspo() -> None:
    # wide limits, because the drawn ratios are far from 1
    theirs = trl_policy_loss(loss_type="grpo", level="sequence", clip_low=0.1, clip_high=0.15)
    ours = our_loss("gspo", "sample", clip_low=0.1, clip_high=0.15)
    assert_agree(ours, theirs)
    by_sample = SAMPLES.mean(ours[2].double()).mean().item()
    assert by_sample == pytest.approx(theirs[2]["clip_ratio/region_mean"][0])


def test_gspo_with_a_sequence_correction() -> None:
    draw = torch.Generator().manual_seed(5)
    *_, mask = drawn()
    log_ratio = 0.3 * torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask
    ratio = log_ratio.sum(-1, keepdim=True).exp().clamp(max=1.2)
    theirs = trl_policy_loss(loss_type="grpo", level="sequence", clip_low=0.1, clip_high=0.15, correction=ratio)
    corrected = CORRECTIONS["sequence_tis"].function(log_ratio[mask], SAMPLES, high=1.2)
    ours = our_loss("gspo", "sample", correction=corrected.weights_T, clip_low=0.1, clip_high=0.15)
    assert_agree(ours, theirs)


def test_cispo() -> None:
    theirs = trl_policy_loss(loss_type="cispo", clip_high=1.5)
    assert_agree(our_loss("cispo", "token", clip_high=1.5), theirs)


def test_kl_with_the_importance_ratio() -> None:
    theirs = trl_policy_loss(loss_type="dapo", beta=BETA, kl_ratio=True, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    ours = our_loss(
        "ppo_clip", "token", beta=BETA, kl_ratio=True, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=None
    )
    assert_agree(ours, theirs)


@pytest.mark.parametrize(
    # TRL's token_truncate, token_mask and sequence_truncate, as its trainer computes them from the log ratio
    ("kind", "limits"),
    [
        ("tis", {"high": 1.2}),
        ("icepop", {"low": 0.8, "high": 1.2}),
        ("clip_range", {"low": 0.8, "high": 1.2}),
        ("sequence_tis", {"high": 1.2}),
    ],
)
def test_corrections(kind: str, limits: dict[str, float]) -> None:
    *_, mask = drawn()
    draw = torch.Generator().manual_seed(5)
    log_ratio = 0.3 * torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask
    if kind == "sequence_tis":
        ratio = log_ratio.sum(-1, keepdim=True).exp().clamp(max=1.2)
    elif kind == "icepop":
        plain = log_ratio.exp()
        ratio = plain.masked_fill((plain < 0.8) | (plain > 1.2), 0.0)
    else:
        ratio = log_ratio.exp().clamp(min=limits.get("low"), max=1.2)
    theirs = trl_policy_loss(loss_type="dapo", clip_low=CLIP_LOW, clip_high=CLIP_HIGH, correction=ratio)
    corrected = CORRECTIONS[kind].function(log_ratio[mask], SAMPLES, **limits)
    ours = our_loss(
        "ppo_clip",
        "token",
        correction=corrected.weights_T,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        dual_clip=None,
    )
    assert_agree(ours, theirs)
    assert bool((corrected.truncated_T | corrected.masked_T).any())


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and reference logprobs [6, 5] of three chosen and three rejected completions, and their mask."""
    draw = torch.Generator().manual_seed(7)
    logprobs, ref = (-3 * torch.rand(6, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    return logprobs, ref, torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 5])[:, None]


@pytest.mark.parametrize(("name", "trl_name"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_preference_losses(name: str, trl_name: str) -> None:
    logprobs, ref, mask = pairs()
    theirs = trl_preference_loss(trl_name, 0.1, logprobs, ref, mask)
    row = PREFERENCE_LOSSES[name]
    given = logprobs.clone().requires_grad_()
    lengths = mask.sum(1) if row.reduce == "mean" else torch.ones(6)
    now, fixed = ((values * mask).sum(1) / lengths for values in (given, ref))
    loss = row.function(*now.chunk(2), *fixed.chunk(2), beta=0.1).mean()
    loss.backward()
    assert loss.item() == pytest.approx(theirs[0], rel=1e-9)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, theirs[1], rtol=1e-9, atol=1e-12)


def test_label_smoothing_mixes_both_labels() -> None:
    logprobs, ref, mask = pairs()
    swapped = [torch.cat(values.chunk(2)[::-1]) for values in (logprobs, ref, mask)]
    right = trl_preference_loss("sigmoid", 0.1, logprobs, ref, mask)[0]
    wrong = trl_preference_loss("sigmoid", 0.1, *swapped)[0]
    sums, ref_sums = ((values * mask).sum(1).chunk(2) for values in (logprobs, ref))
    ours = dpo(*sums, *ref_sums, beta=0.1, label_smoothing=0.2).mean().item()
    assert ours == pytest.approx(0.8 * right + 0.2 * wrong, rel=1e-9)


@pytest.mark.parametrize("with_margins", [False, True])
@pytest.mark.parametrize("centring", [0.0, 0.01])
def test_reward_model(with_margins: bool, centring: float) -> None:
    scores = torch.tensor([1.5, -0.3, 0.2, 0.4, 0.9, -2.0], dtype=torch.float64)
    margins = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64) if with_margins else None
    theirs = trl_reward_loss(scores, margins, centring or None)
    given = scores.clone().requires_grad_()
    loss = bradley_terry(*given.chunk(2), margins_P=margins, centring=centring).mean()
    loss.backward()
    assert loss.item() == pytest.approx(theirs[0], rel=1e-9)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, theirs[1], rtol=1e-9, atol=1e-12)


# A group of mixed rewards, one of equal ones (as floats whose mean is another float), one with a failed reward.
REWARDS = [[0.0, 1.0, 0.25, 1.0], [0.1, 0.1, 0.1, 0.1], [2.0, math.nan, -1.0, 0.5]]


def trainer_step(folder: Path, algorithm: str, **config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the TRL trainer on these rewards: advantages [12], logprobs [N, 12, T] (of the policy, and of a
    different reference if there is one), and their mask [12, T]."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from tidemill.models.builtin import build_char_model

    seen: dict[str, Tensor] = {}
    logprobs: list[Tensor] = []
    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if algorithm == "grpo" else (RLOOTrainer, RLOOConfig)

    class Recording(trainer_class):  # type: ignore[misc, valid-type, unused-ignore]
        def _generate_and_score_completions(self, inputs: Any) -> Any:  # before they are shuffled
            logprobs.clear()
            scored = super()._generate_and_score_completions(inputs)
            measured = torch.stack(logprobs) if logprobs else torch.zeros(0)
            seen.update(advantages=scored["advantages"], mask=scored["completion_mask"], logprobs=measured)
            return scored

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            logprobs.append(found[0].detach().clone())
            return found

    def given(completions: list[str], **_: Any) -> list[float | None]:
        flat = [value for group in REWARDS for value in group]
        assert len(completions) == len(flat)
        return [None if math.isnan(value) else value for value in flat]

    build_char_model(CharModelConfig(hidden_size=16, layers=1, heads=2, context=32), folder)
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=given,
        train_dataset=Dataset.from_list([{"prompt": text} for text in ("1+1=", "2+2=", "3+4=")]),
        args=config_class(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=12,
            num_generations=4,
            max_completion_length=2,
            max_steps=1,
            shuffle_dataset=False,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **config,
        ),
    )
    if trainer.ref_model is not None:
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.mul_(1.5)
    trainer.train()
    return seen["advantages"], seen["logprobs"], seen["mask"]


@pytest.mark.parametrize(
    ("ours_of", "algorithm", "config"),
    [(grpo, "grpo", {}), (dr_grpo, "grpo", {"scale_rewards": "none"}), (rloo, "rloo", {})],
)
def test_advantages_of_a_whole_trainer_step(
    tmp_path: Path, ours_of: Callable[[Tensor, Tensor], Tensor], algorithm: str, config: dict[str, Any]
) -> None:
    theirs, *_ = trainer_step(tmp_path, algorithm, beta=0.0, **config)
    ours = torch.cat([ours_of(torch.tensor(group), ~torch.tensor(group).isnan()) for group in REWARDS])
    # For equal rewards TRL has rounding errors (up to 1e-8 / 1e-4); here they are exactly 0.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(ours[:4], theirs[:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[8:], theirs[8:], rtol=1e-5, atol=1e-6)


def test_kl_in_the_reward(tmp_path: Path) -> None:
    theirs, (now, ref), mask = trainer_step(tmp_path, "rloo", beta=0.3)
    penalties = (kl_reward(now, ref) * mask).sum(1)
    assert penalties.abs().min() > 1e-3
    rewards = torch.tensor(REWARDS) - 0.3 * penalties.view(3, 4)
    ours = torch.cat([rloo(group, ~group.isnan()) for group in rewards])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_entropy_bonus() -> None:
    """TRL always averages the bonus over tokens; ours is normalised like the loss, here also by tokens."""
    trainer, proximal, _, advantages, mask = drawn()
    draw = torch.Generator().manual_seed(11)
    entropy = (3 * torch.rand(mask.shape, generator=draw, dtype=torch.float64)).requires_grad_()
    theirs = trl_policy_loss(loss_type="dapo", clip_low=CLIP_LOW, clip_high=CLIP_HIGH, entropy=entropy, bonus=0.02)
    algorithm = AlgorithmConfig.model_validate(
        {"name": "dapo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "entropy_bonus": 0.02, "proximal": "rollout"}
    )
    logprobs_T, entropy_T = trainer[mask].requires_grad_(), entropy.detach()[mask].requires_grad_()
    microbatch: Any = SimpleNamespace(
        proximal_logprobs=proximal[mask],
        rollout_logprobs=proximal[mask],
        ref_logprobs=None,
        advantages=SAMPLES.spread(advantages),
        samples=SAMPLES,
        weights=torch.ones_like(logprobs_T) / sum(LENGTHS),
    )
    outcome = policy_outcome(algorithm, microbatch, logprobs_T, entropy_T, kl_beta=0.0)
    outcome.loss.backward()
    assert logprobs_T.grad is not None
    assert entropy_T.grad is not None
    assert entropy.grad is not None
    assert_agree((outcome.loss.item(), logprobs_T.grad, outcome.token.clipped_T), theirs)
    torch.testing.assert_close(entropy_T.grad, entropy.grad[mask], rtol=1e-9, atol=1e-12)


def test_entropy_of_logits() -> None:
    from trl.trainer.utils import entropy_from_logits

    logits = 4 * torch.randn(6, 40, generator=torch.Generator().manual_seed(12))
    rows, targets = torch.tensor([0, 2, 2, 5]), torch.zeros(4, dtype=torch.long)
    _, ours = logprobs_of(logits, torch.eye(40), rows=rows, targets=targets)
    torch.testing.assert_close(ours, entropy_from_logits(logits)[rows], rtol=1e-5, atol=1e-6)
