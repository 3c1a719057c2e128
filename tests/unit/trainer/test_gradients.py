"""Packed and micro-batched gradients of every preset, loss, correction and term against plain gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.fixed_critic import FixedCritic
from tests.model_shapes import VOCABULARY, forward_of, llama, qwen3
from tests.plain_policy import generated_logprobs, plain_policy
from tests.trajectories import Part, agent_trajectory, group, trajectory
from tidemill.algos.advantages import ADVANTAGES
from tidemill.algos.corrections import CORRECTIONS
from tidemill.algos.credit import CREDITS
from tidemill.algos.losses import LOSSES, Normalize
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS
from tidemill.config.schema import RunSpec
from tidemill.core.records import Group, Trajectory, pack_logprobs, unpack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.packing import FloatArray
from tidemill.trainer.policy import PolicyTrainer

MAX_NEW_TOKENS = 12
# The ratios of the batch below are far from 1; the limits of the presets would clip nearly all tokens.
WIDE: dict[str, dict[str, float]] = {"gspo": {"clip_low": 0.03, "clip_high": 0.03}, "cispo": {"clip_high": 1.2}}
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, corrected": {"name": name, "correction": {"high": 1.2}} for name in PRESETS},
    **{f"{name}, clipped": {"name": name, "proximal": "rollout", **WIDE.get(name, {})} for name in PRESETS},
    **{kind: {"correction": {"kind": kind}} for kind in CORRECTION_LIMITS if kind != "geometric"},
    "clip_range, narrow": {"correction": {"kind": "clip_range", "low": 0.8, "high": 1.2}},
    "icepop, narrow": {"correction": {"kind": "icepop", "low": 0.8, "high": 1.2}},
    "geometric, wide": {"correction": {"kind": "geometric", "low": 0.9, "high": 1.1}},
    "mu_step, narrow": {"correction": {"kind": "mu_step", "high": 1.1}},
    "gspo, token correction": {"name": "gspo", "correction": {"kind": "tis", "high": 1.2}},
    "gspo, icepop": {"name": "gspo", "correction": {"kind": "icepop", "low": 0.8, "high": 1.2}},
    "gspo, gae": {"name": "gspo", "advantage": "gae", "proximal": "rollout", **WIDE["gspo"]},
    "dual clip": {"proximal": "rollout", "dual_clip": 1.3},
    "entropy bonus": {"entropy_bonus": 0.3},
    "entropy bonus by token": {"name": "dapo", "entropy_bonus": 0.3},
    "KL in the loss": {"kl_beta": 0.3},
    "KL weighted by the ratio": {"kl_beta": 0.3, "kl_ratio": True, "proximal": "rollout"},
    "KL in the reward": {"kl_beta": 0.3, "kl_in": "reward"},
    "KL in each token's reward": {"name": "ppo", "kl_beta": 0.3, "gamma": 0.9},
    "whitened": {"whiten": True},
    "not whitened": {"name": "ppo", "whiten": False},
    "bootstrap": {"name": "ppo", "bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8},
    "overlong": {"name": "dapo", "overlong_buffer_tokens": 8},
    "by token": {"normalize": "token"},
    "by a constant": {"normalize": "constant"},
}


AGENT_CASES: dict[str, dict[str, Any]] = {
    "outcome": {},
    "outcome, gspo": {"name": "gspo", "correction": {"kind": "tis", "high": 1.2}},
    "turn returns": {"credit": "turn_returns"},
    "turn returns, mean only": {"name": "dr_grpo", "credit": "turn_returns", "turn_gamma": 0.8},
    "turn returns, KL in the reward": {"credit": "turn_returns", "kl_beta": 0.3, "kl_in": "reward"},
    "gigpo": {"credit": "gigpo", "step_weight": 0.5, "overlong_buffer_tokens": 8},
    "gigpo, deviation": {"credit": "gigpo", "advantage": "grpo", "normalize": "token"},
    "gigpo, whitened": {"credit": "gigpo", "whiten": True, "normalize": "constant"},
    "KL in the loss": {"kl_beta": 0.3},
    "discounted": {"name": "reinforce_pp", "gamma": 0.9, "kl_beta": 0.1},
    "bootstrap": {"name": "ppo", "bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8},
}


def spec(algorithm: dict[str, Any], **batch: Any) -> RunSpec:
    environment = {"name": "guess"} if "credit" in algorithm else {}
    return RunSpec.model_validate(
        {
            "env": environment,
            "algorithm": algorithm,
            "batch": {"prompts": 3, "group_size": 4, **batch},
            "optimizer": {"max_grad_norm": 1e9},
            "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        }
    )


@cache
def groups() -> tuple[Group, ...]:
    """Completions of 1 to 12 tokens with common prefixes, noisy rollout logprobs, up to two later publishes, lags 0 to
    2, some truncated."""
    rng = np.random.default_rng(0)
    header, model = rng.integers(2, VOCABULARY, 5).tolist(), llama()
    made = []
    for position in range(3):
        prompt = header + rng.integers(2, VOCABULARY, 4).tolist()
        start = rng.integers(2, VOCABULARY, 2).tolist()
        samples = []
        for index, reward in enumerate(rng.normal(size=4).tolist()):
            completion = [*start, *rng.integers(2, VOCABULARY, rng.integers(1, 11)).tolist()]
            completion = completion[:1] if (position, index) == (0, 0) else completion
            plain = trajectory(prompt, completion, reward, index=index)
            samples.append(_as_generated(plain, _logprobs(model, plain), rng, cut=index == 2, lag=index % 3))
        made.append(group(position, samples))
    return tuple(made)


def _logprobs(model: PreTrainedModel, t: Trajectory) -> FloatArray:
    ids = unpack_tokens(t.token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, t.prompt_length - 1 : -1]
    logprobs: FloatArray = logits.log_softmax(-1).numpy()
    return logprobs[np.arange(t.completion_length), ids[t.prompt_length :]]


def _as_generated(t: Trajectory, logprobs: FloatArray, rng: np.random.Generator, *, cut: bool, lag: int) -> Trajectory:
    def noisy() -> bytes:
        return pack_logprobs((logprobs + 0.25 * rng.normal(size=len(logprobs))).tolist())

    versions = [
        msgspec.structs.replace(run, version=msgspec.structs.replace(run.version, number=3 - lag)) for run in t.versions
    ]
    return msgspec.structs.replace(
        t,
        rollout_logprobs=noisy(),
        publish_logprobs=tuple(noisy() for _ in range(lag)),
        versions=tuple(versions),
        finish="length" if cut else "stop",
    )


def linear(prompt: list[int], words: Callable[[int], list[int]]) -> list[Part]:
    """Three turns in one context, and an observation that nothing follows."""
    return [(role, words(3)) for _ in range(3) for role in ("action", "observation")]


def stripped(prompt: list[int], words: Callable[[int], list[int]]) -> list[Part]:
    """Four turns, and before each a context without the first two tokens of the earlier turns, which were thinking."""
    parts: list[Part] = []
    context = list(prompt)
    for number in range(4):
        if number:
            parts.append(("context", list(context)))
        action, answer = words(4), words(2)
        parts += [("action", action), ("observation", answer)]
        context += [*action[2:], *answer]
    return parts


def branches(prompt: list[int], words: Callable[[int], list[int]]) -> list[Part]:
    """Two contexts that share nothing with the prompt, the second with two turns, and one without a turn."""
    turns: list[Part] = [("action", words(2)), ("context", words(5)), ("action", words(3))]
    return [*turns, ("context", words(4)), ("action", words(1)), ("observation", words(2)), ("action", words(3)),
            ("context", words(3))]  # fmt: skip


def repeated(prompt: list[int], words: Callable[[int], list[int]]) -> list[Part]:
    """The same context three times, twice with the same turn, and once as a continuation of the first turn."""
    action, other, last = words(3), words(3), words(2)
    return [("action", action), ("context", prompt), ("action", action), ("context", prompt), ("action", other),
            ("context", [*prompt, *action]), ("action", last)]  # fmt: skip


STRUCTURES = {"linear": linear, "stripped": stripped, "branches": branches, "repeated": repeated}


@cache
def agent_groups(*names: str, build: Callable[[], PreTrainedModel] = llama) -> tuple[Group, ...]:
    """Groups of four agents with these structures in turn, few different states, and rewards after turns and at the
    end; every fourth has another reward for the whole and is truncated."""
    rng, model = np.random.default_rng(1), build()

    def words(count: int) -> list[int]:
        return [int(each) for each in rng.integers(2, VOCABULARY, count)]

    made = []
    for position in range(3):
        prompt, samples = words(6), []
        for index in range(4):
            parts = STRUCTURES[names[index % len(names)]](prompt, words)
            turns = sum(role == "action" for role, _ in parts)
            plain = agent_trajectory(
                prompt,
                parts,
                rng.normal(size=turns).tolist(),
                total=1.5 if index == 3 else None,
                states=[f"state {each}" for each in rng.integers(0, 3, turns)],
                index=index,
            )
            logprobs = np.array(generated_logprobs(model, plain))
            samples.append(_as_generated(plain, logprobs, rng, cut=index == 3, lag=index % 3))
        made.append(group(position, samples))
    return tuple(made)


def nearby() -> PreTrainedModel:
    """A reference model close to the policy."""
    model, draw = llama(), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=draw))
    return model


class Captured:
    """Stands in for the optimizer step: keeps the normalised gradients and changes nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.steps: list[dict[str, torch.Tensor]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, *, scale: float, **_: object) -> float:
        named = self.model.named_parameters()
        self.steps.append({name: p.grad * scale for name, p in named if p.grad is not None})
        optimizer.zero_grad(set_to_none=True)
        return 1.0


def trainer(
    settings: RunSpec, monkeypatch: pytest.MonkeyPatch, *, build: Callable[[], PreTrainedModel] = llama
) -> tuple[PolicyTrainer, FixedCritic, Captured]:
    model, critic = build(), FixedCritic()
    reference = nearby() if settings.algorithm.kl_beta else None
    use_packed_attention(model)
    captured = Captured(model)
    monkeypatch.setattr("tidemill.trainer.policy.clip_and_step", captured)
    subject = PolicyTrainer(
        TreeForward(model),
        settings,
        compute=ComputeThread(),
        source=Path(),
        reference=forward_of(reference),
        critic=critic,
    )
    subject.version = msgspec.structs.replace(subject.version, number=3)
    return subject, critic, captured


def assert_equal_gradients(ours: dict[str, torch.Tensor], plain: PreTrainedModel) -> None:
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-4  # the gradient is not trivially zero
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("microbatch_tokens", [4096, 40])
@pytest.mark.parametrize("case", CASES)
def test_packed_gradients_equal_plain_ones(case: str, microbatch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, batch = spec(CASES[case], microbatch_tokens=microbatch_tokens), groups()
    subject, critic, captured = trainer(settings, monkeypatch)
    for one in batch:
        subject.add_group(one)
    metrics = subject.finish_batch(4)
    plain = llama()
    loss, samples = plain_policy(plain, settings, batch, nearby() if settings.algorithm.kl_beta else None)
    loss.backward()
    (ours,) = captured.steps
    assert_equal_gradients(ours, plain)
    assert metrics.values["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    returns = sorted(each for sample in samples for each in sample.returns)
    assert sorted(each for each, _, _ in critic.learned) == pytest.approx(returns, rel=1e-4, abs=1e-5)


def assert_agents_are_trained_as_without_packing(
    settings: RunSpec,
    batch: tuple[Group, ...],
    monkeypatch: pytest.MonkeyPatch,
    *,
    build: Callable[[], PreTrainedModel],
) -> None:
    subject, critic, captured = trainer(settings, monkeypatch, build=build)
    for one in batch:
        subject.add_group(one)
    metrics = subject.finish_batch(4)
    plain = build()
    loss, samples = plain_policy(plain, settings, batch, nearby() if settings.algorithm.kl_beta else None)
    loss.backward()
    (ours,) = captured.steps
    assert_equal_gradients(ours, plain)
    assert metrics.values["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert metrics.values["tokens_trained"] == sum(sample.length for sample in samples)
    returns = sorted(each for sample in samples for each in sample.returns)
    assert sorted(each for each, _, _ in critic.learned) == pytest.approx(returns, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("microbatch_tokens", [4096, 40])
@pytest.mark.parametrize("case", AGENT_CASES)
def test_gradients_of_agents_equal_those_of_separate_turns(
    case: str, microbatch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = spec(AGENT_CASES[case], microbatch_tokens=microbatch_tokens)
    assert_agents_are_trained_as_without_packing(settings, agent_groups(*STRUCTURES), monkeypatch, build=llama)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_each_structure(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = spec({"credit": "turn_returns"})
    assert_agents_are_trained_as_without_packing(settings, agent_groups(structure), monkeypatch, build=llama)


def test_gradients_of_stripped_contexts_in_qwen3(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, batch = spec({"credit": "gigpo"}), agent_groups("stripped", build=qwen3)
    assert_agents_are_trained_as_without_packing(settings, batch, monkeypatch, build=qwen3)


def test_the_agent_cases_cover_every_kind_of_credit() -> None:
    kinds = {spec(case).algorithm.credit for case in AGENT_CASES.values()}
    assert kinds == {"outcome", *CREDITS}


def test_the_cases_cover_every_registry_entry() -> None:
    settings = [spec(case).algorithm for case in CASES.values()]
    assert {each.loss for each in settings} == LOSSES.keys()
    assert {each.advantage for each in settings} == ADVANTAGES.keys()
    assert {each.correction.kind for each in settings} == CORRECTIONS.keys()
    assert {each.normalize for each in settings} == set(get_args(Normalize))


def test_the_cases_reach_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of each limit occur: some tokens are clipped, truncated or masked, and some are not."""

    def figures(case: str) -> dict[str, float]:
        subject, *_ = trainer(spec(CASES[case]), monkeypatch)
        for one in groups():
            subject.add_group(one)
        return subject.finish_batch(4).values

    for case in ("grpo, clipped", "gspo, clipped", "gspo, gae", "cispo, clipped", "dual clip"):
        assert 0.05 < figures(case)["clip_fraction"] < 0.95, case
    for case in ("grpo, corrected", "sequence_tis", "clip_range, narrow", "mu_step, narrow"):
        assert 0.01 < figures(case)["correction_truncated"] < 0.99, case
    for case in ("icepop, narrow", "gspo, icepop", "geometric, wide"):
        assert 0.05 < figures(case)["correction_masked"] < 0.95, case


def test_interpolated_proximal_logprobs_of_the_second_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second minibatch the proximal logprobs are rollout + lag / (lag + 1) (now - rollout)."""
    settings = spec({"proximal": "interpolated", "correction": {"high": 1.1}}, prompts=2, minibatches=2)
    batch = groups()[:2]
    subject, _, captured = trainer(settings, monkeypatch)
    for one in batch:
        subject.add_group(one)
    subject.finish_batch(4)
    for minibatch, ours in zip(batch, captured.steps, strict=True):
        plain = llama()
        first = minibatch is batch[0]
        loss, samples = plain_policy(plain, settings, [minibatch], None)
        if not first:
            loss = torch.zeros(())
            for sample in samples:
                lag = 3 - sample.trajectory.versions[0].version.number
                rollout, now = torch.tensor(sample.rollout), sample.logprobs.detach()
                proximal = rollout + lag / (lag + 1) * (now - rollout)
                ratio, weight = (sample.logprobs - proximal).exp(), (proximal - rollout).exp().clamp(max=1.1)
                advantage = torch.tensor(sample.advantages)
                clipped = ratio.clamp(0.8, 1.2) * advantage
                loss = loss - (weight * torch.minimum(ratio * advantage, clipped)).mean() / len(samples)
        loss.backward()
        assert_equal_gradients(ours, plain)


def test_lags_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = groups()
    subject, *_ = trainer(spec({}), monkeypatch)
    for one in batch:
        subject.add_group(one)
    values = subject.finish_batch(4).values
    tokens = [0, 0, 0]
    for one in batch:
        for t in one.trajectories:
            tokens[t.sample_id.index % 3] += t.completion_length
    total = sum(tokens)
    assert [values[f"lag/{lag}"] for lag in range(3)] == pytest.approx([count / total for count in tokens])
    assert values["policy_lag_max"] == 2
    assert values["policy_lag_mean"] == pytest.approx((tokens[1] + 2 * tokens[2]) / total)
