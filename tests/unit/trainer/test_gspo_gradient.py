"""The gradient of GSPO on flattened, shuffled tokens against the sum over tokens, sample by sample."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.algos.losses import Samples
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.trainer.update import policy_outcome

VOCABULARY, LENGTHS, CLIP = 11, (7, 1, 12, 5, 9, 3), 0.1
TOKENS = sum(LENGTHS)
CASES: dict[str, dict[str, Any]] = {
    "sequence correction": {"correction": {"kind": "sequence_tis"}},
    "token correction": {"correction": {"kind": "tis", "high": 1.2}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.8, "high": 1.2}},
    "gae": {"advantage": "gae", "correction": {"kind": "none"}},
    "gae, token correction": {"advantage": "gae", "correction": {"kind": "clip_range", "low": 0.8, "high": 1.2}},
}


class Batch:
    """Samples of a bigram model: states, tokens, logprobs of three policies, advantages."""

    def __init__(self, deviation: float, *, per_token: bool) -> None:
        draw = torch.Generator().manual_seed(5)
        self.model = torch.randn(VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64)
        self.states, self.chosen = torch.randint(VOCABULARY, (2, TOKENS), generator=draw)
        moved, stale = deviation * torch.randn(2, TOKENS, generator=draw, dtype=torch.float64)
        self.proximal = self.logprobs(self.model) - moved
        self.rollout = self.proximal - stale
        self.sample = torch.repeat_interleave(torch.tensor(LENGTHS))
        per_sample = torch.tensor([1.3, -0.4, -1.1, 0.6, 0.9, -0.7], dtype=torch.float64)[self.sample]
        self.advantages = torch.randn(TOKENS, generator=draw, dtype=torch.float64) if per_token else per_sample

    def logprobs(self, model: Tensor) -> Tensor:
        return model[self.states].log_softmax(-1)[torch.arange(TOKENS), self.chosen]


def packed_gradient(algorithm: AlgorithmConfig, batch: Batch) -> tuple[Tensor, Any]:
    """Gradient of the trainer's loss over all tokens, in another order."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(6))
    model = batch.model.clone().requires_grad_()
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    microbatch: Any = SimpleNamespace(
        proximal_logprobs=batch.proximal[order],
        rollout_logprobs=batch.rollout[order],
        ref_logprobs=None,
        advantages=batch.advantages[order],
        samples=Samples(batch.sample[order], len(LENGTHS)),
        weights=1.0 / lengths[batch.sample[order]] / len(LENGTHS),
    )
    outcome = policy_outcome(algorithm, microbatch, batch.logprobs(model)[order], torch.zeros(TOKENS), kl_beta=0.0)
    outcome.loss.backward()
    assert model.grad is not None
    return model.grad, outcome


def plain_weights(algorithm: AlgorithmConfig, log_ratios: list[float]) -> list[float]:
    config, ratios = algorithm.correction, [math.exp(each) for each in log_ratios]
    low, high = config.low or 0.0, config.high or math.inf
    if config.kind == "none":
        return [1.0] * len(ratios)
    if config.kind == "sequence_tis":
        return [min(math.prod(ratios), high)] * len(ratios)
    if config.kind == "icepop":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    return [min(max(ratio, low), high) for ratio in ratios]


def plain_gradient(algorithm: AlgorithmConfig, batch: Batch) -> tuple[Tensor, list[float]]:
    """(-1/S Σ_i 1/|y_i| Σ_t w_it s_i A_it ∇ log π_it over unclipped tokens, all w_it)."""
    model, every_weight, start = batch.model.clone().requires_grad_(), [], 0
    for length in LENGTHS:
        tokens = range(start, start + length)
        start += length
        now = [batch.model[batch.states[t]].log_softmax(-1)[batch.chosen[t]].item() for t in tokens]
        proximal, rollout = batch.proximal[list(tokens)].tolist(), batch.rollout[list(tokens)].tolist()
        ratio = math.exp(sum(now) / length - sum(proximal) / length)
        weights = plain_weights(algorithm, [p - r for p, r in zip(proximal, rollout, strict=True)])
        every_weight += weights
        for t, weight in zip(tokens, weights, strict=True):
            advantage = batch.advantages[t].item()
            if (advantage > 0 and ratio > 1 + CLIP) or (advantage < 0 and ratio < 1 - CLIP):
                continue
            logprob = model[batch.states[t]].log_softmax(-1)[batch.chosen[t]]
            (-weight * ratio * advantage / length / len(LENGTHS) * logprob).backward()
    assert model.grad is not None
    return model.grad, every_weight


@pytest.mark.parametrize("deviation", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("case", CASES)
def test_each_token_has_its_own_weight(case: str, deviation: float) -> None:
    algorithm = AlgorithmConfig.model_validate({"loss": "gspo", "clip_low": CLIP, "clip_high": CLIP, **CASES[case]})
    batch = Batch(deviation, per_token=algorithm.advantage == "gae")
    (ours, outcome), (expected, weights) = packed_gradient(algorithm, batch), plain_gradient(algorithm, batch)
    assert float((ours - expected).norm() / expected.norm()) <= 1e-6
    if "icepop" in case and deviation > 0.1:
        assert 0.1 < sum(weight == 0 for weight in weights) / TOKENS < 0.9
    if deviation > 0.1:
        assert 0 < outcome.token.clipped_T.double().mean() < 1


def test_a_masked_token_has_no_gradient() -> None:
    # r = (1, 3, 1): icepop masks the second token; s = 1, A = 2: the others have -w s A / 3 = -2/3
    algorithm = AlgorithmConfig.model_validate(
        {"loss": "gspo", "correction": {"kind": "icepop", "low": 0.5, "high": 2}}
    )
    now = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    microbatch: Any = SimpleNamespace(
        proximal_logprobs=now.detach(),
        rollout_logprobs=now.detach() - torch.tensor([0.0, math.log(3.0), 0.0], dtype=torch.float64),
        ref_logprobs=None,
        advantages=torch.full((3,), 2.0, dtype=torch.float64),
        samples=Samples(torch.zeros(3, dtype=torch.long), 1),
        weights=torch.full((3,), 1 / 3, dtype=torch.float64),
    )
    policy_outcome(algorithm, microbatch, now, torch.zeros(3), kl_beta=0.0).loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-2 / 3, 0.0, -2 / 3])
