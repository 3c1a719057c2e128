"""The policy trainer around the gradient: scopes, critics, adaptive KL, missing logprobs, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.fixed_critic import FixedCritic, fixed_value
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, forward_of, llama
from tests.trajectories import group, trajectory
from tidemill.config.algorithm import CriticConfig
from tidemill.config.learning import OptimizerConfig, ScheduleConfig, TrainerConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.records import (
    Group,
    PolicyVersion,
    Reward,
    SourceRun,
    Trajectory,
    VersionRun,
    pack_logprobs,
)
from tidemill.models.attention import use_packed_attention
from tidemill.models.reward_model import reward_head
from tidemill.models.tree_forward import TreeForward
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic
from tidemill.trainer.packing import WeightedSample, pack, split_by_sample
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.scoring import ChunkedScorer, LogprobScorer
from tidemill.trainer.update import UpdateSums, policy_outcome

PROMPT = [5, 6, 7]
PPO = {"name": "ppo", "kl_beta": 0.0}


def spec(algorithm: dict[str, Any], **batch: Any) -> RunSpec:
    sections = {
        "algorithm": algorithm,
        "batch": {"prompts": 2, "group_size": 2, **batch},
        "optimizer": {"learning_rate": 1e-3},
        "sampling": {"max_new_tokens": 8},
    }
    return RunSpec.model_validate(sections)


def warming_up(steps: int) -> RunSpec:
    return spec(PPO).model_copy(update={"critic": CriticConfig(warmup_steps=steps)})


def trainer(
    settings: RunSpec,
    critic: Critic | None = None,
    *,
    model: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    source: Path = Path(),
) -> PolicyTrainer:
    model = model or llama()
    use_packed_attention(model)
    return PolicyTrainer(
        TreeForward(model),
        settings,
        compute=ComputeThread(),
        source=source,
        critic=critic,
        reference=forward_of(reference),
    )


def batch() -> list[Group]:
    """Two groups of two samples, with rollout logprobs of a plausible size for a random model."""
    made = []
    for position in range(2):
        completions = [[9, 10, 11], [12, 13]]
        samples = [
            trajectory(PROMPT, completion, reward, index=index, logprobs=[-5.0] * len(completion))
            for index, (completion, reward) in enumerate(zip(completions, (1.0, 0.25 * position), strict=True))
        ]
        made.append(group(position, samples))
    return made


def train_batch(subject: PolicyTrainer, groups: list[Group] | None = None, step: int = 1) -> dict[str, float]:
    for one in groups or batch():
        subject.add_group(one)
    return subject.finish_batch(step).values


def test_batch_advantages_wait_for_the_whole_batch() -> None:
    streaming, waiting = trainer(spec({}, microbatch_tokens=5)), trainer(spec({"whiten": True}, microbatch_tokens=5))
    for subject in (streaming, waiting):
        subject.add_group(batch()[0])
    # a group has six packed tokens, which fill microbatches of five
    assert streaming._sums.tokens_trained > 0
    assert waiting._sums.tokens_trained == 0
    assert not waiting._minibatches[0].microbatches
    waiting.add_group(batch()[1])
    assert waiting.finish_batch(1).values["tokens_trained"] == 10


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = trainer(spec({"whiten": True, "advantage": "dr_grpo"}))
    seen: list[WeightedSample] = []
    monkeypatch.setattr(subject, "_add_samples", lambda index, samples: seen.extend(samples))
    train_batch(subject)
    # advantages (.5, -.5) and (.375, -.375) on 3 and 2 tokens each: sums 3 * .875 - 2 * .875 = .875, mean .0875
    flat = torch.cat([torch.as_tensor(sample.advantage) for sample in seen])
    raw = torch.tensor([0.5] * 3 + [-0.5] * 2 + [0.375] * 3 + [-0.375] * 2)
    torch.testing.assert_close(flat, (raw - 0.0875) / raw.std(), rtol=1e-5, atol=1e-6)


def test_a_critic_is_required_by_gae_and_unused_otherwise() -> None:
    with pytest.raises(UserError) as caught:
        trainer(spec(PPO))
    assert caught.value.where == "algorithm.advantage"
    critic = FixedCritic()
    train_batch(trainer(spec({}), critic))
    assert not critic.learned and not critic.denominators


def test_the_critic_has_the_token_weights_and_denominator_of_the_policy() -> None:
    critic = FixedCritic()
    values = train_batch(trainer(spec(PPO, minibatches=2, epochs=2), critic))
    # normalize = "token": every weight 1; each minibatch has one group of 5 tokens and two epochs
    assert critic.denominators == [5, 5, 5, 5]
    assert [weight for *_, weight in critic.learned] == [1.0] * 20
    assert all(critic.with_graph)
    assert values["value_loss"] == 2.5  # the fixed critic reports 1, 2, 3, 4


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_warm_up_trains_only_the_critic(kind: str) -> None:
    model = llama()
    critic = real_critic(kind, model)
    subject = trainer(warming_up(2), critic, model=model)
    start, head = weights_digest(model), critic.head.weight.detach().clone()
    for step in (1, 2):
        for one in batch():
            subject.add_group(one)
        metrics = subject.finish_batch(step)
        assert metrics.optimizer_steps == 0
        assert "value_loss" in metrics.values and "loss" not in metrics.values
        assert weights_digest(model) == start == metrics.version.digest
        assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(critic.head.weight, head)
    for one in batch():
        subject.add_group(one)
    assert subject.finish_batch(3).optimizer_steps == 1
    assert weights_digest(model) != start


def test_the_schedule_counts_only_policy_steps() -> None:
    settings = warming_up(2).model_copy(update={"trainer": TrainerConfig(steps=5)})
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear", min_learning_rate_ratio=0.2)
    subject = trainer(settings.model_copy(update={"optimizer": optimizer}), FixedCritic())
    rates = [train_batch(subject, step=step).get("learning_rate") for step in range(1, 6)]
    # two critic steps, then three policy steps: the peak, half way, and a fifth of the peak
    assert rates == [None, None, *(pytest.approx(rate) for rate in (1e-3, 6e-4, 2e-4))]


def on_a_line(steps: int, *, algorithm: dict[str, Any] | None = None, length: int = 0, **batch_sizes: Any) -> RunSpec:
    """The rates of a run of 8 optimizer steps are 0.8, 0.7, ... 0.1 thousandths."""
    optimizer = OptimizerConfig(
        learning_rate=8e-4, schedule="linear", min_learning_rate_ratio=0.125, schedule_steps=length
    )
    settings = spec(algorithm or {}, **batch_sizes)
    return settings.model_copy(update={"trainer": TrainerConfig(steps=steps), "optimizer": optimizer})


def thousandths(values: dict[str, float]) -> float | None:
    """The learning rate of the batch's last optimizer step; None without one."""
    return 1e3 * values["learning_rate"] if "learning_rate" in values else None


def equal_rewards(one: Group) -> Group:
    return group(one.position, [msgspec.structs.replace(t, reward=Reward(value=1.0)) for t in one.trajectories])


SIGNAL, NONE = "signal", "none"


@pytest.mark.parametrize(
    ("batches", "sizes", "expected"),
    [
        # of the last optimizer step of each batch
        ([SIGNAL] * 4, {}, [0.8, 0.7, 0.6, 0.5]),
        ([SIGNAL, NONE, NONE, SIGNAL], {}, [0.8, None, None, 0.5]),
        ([SIGNAL, NONE, SIGNAL], {"minibatches": 2}, [0.7, None, 0.3]),
        ([NONE, SIGNAL], {"epochs": 4}, [None, 0.1]),
    ],
)
def test_batches_without_signal_advance_the_schedule(
    batches: list[str], sizes: dict[str, Any], expected: list[float | None]
) -> None:
    steps = 8 // (sizes.get("minibatches", 1) * sizes.get("epochs", 1))
    subject = trainer(on_a_line(steps, **sizes))
    groups = {SIGNAL: batch(), NONE: [equal_rewards(one) for one in batch()]}
    rates = [thousandths(train_batch(subject, groups[kind], step)) for step, kind in enumerate(batches, 1)]
    assert rates == [None if rate is None else pytest.approx(rate) for rate in expected]


def test_minibatches_that_are_left_out_advance_the_schedule() -> None:
    """Without signal in the first group, the first step of the batch is left out; the second has its own rate."""
    subject = trainer(on_a_line(4, minibatches=2))
    first, second = batch()
    assert thousandths(train_batch(subject, [equal_rewards(first), second])) == pytest.approx(0.7)
    stopped = trainer(on_a_line(2, algorithm={"kl_stop": 1e-12}, minibatches=2, epochs=2))
    # of four steps the first is taken
    assert [thousandths(train_batch(stopped, step=step)) for step in (1, 2)] == pytest.approx([0.8, 0.4])


@pytest.mark.parametrize(
    ("steps", "length", "expected"),
    [
        (8, 0, [0.5, 0.4]),
        (16, 0, [0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]),  # stays at the minimum
        (4, 0, [0.5]),
        (16, 4, [0.1, 0.1]),  # another length on request
    ],
)
def test_a_restored_trainer_keeps_the_schedule_of_the_first_start(
    steps: int, length: int, expected: list[float], tmp_path: Path
) -> None:
    source = save_folder(llama(), tmp_path / "source")
    subject = trainer(on_a_line(8), source=source)
    for step in (1, 2, 3):
        train_batch(subject, step=step)
    (tmp_path / "state").mkdir()
    subject.write_state(tmp_path / "state")
    again = trainer(on_a_line(steps, length=length), source=source)
    again.read_state(tmp_path / "state")
    rates = [thousandths(train_batch(again, step=step)) for step in range(4, 4 + len(expected))]
    assert rates == pytest.approx(expected)


def real_critic(kind: str, model: PreTrainedModel) -> ModelCritic | TrunkCritic:
    config = CriticConfig.model_validate({"kind": kind, "learning_rate": 1e-2})
    if kind == "shared":
        return TrunkCritic(TreeForward(model), reward_head(HIDDEN), config, value_coefficient=0.5)
    own = llama(3)
    use_packed_attention(own)
    return ModelCritic(TreeForward(own), reward_head(HIDDEN), config, source=Path())


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_ppo_with_a_real_critic(kind: str) -> None:
    """With the same batch in every step, the critic learns its returns."""
    model = llama()
    subject = trainer(spec(PPO), real_critic(kind, model), model=model)
    values = [train_batch(subject, step=step) for step in range(1, 31)]
    assert values[-1]["value_loss"] < 0.3 * values[0]["value_loss"]
    assert {"explained_variance", "value_grad_norm", "returns_mean"} <= values[-1].keys()


def test_the_value_loss_changes_a_shared_trunk() -> None:
    digests = []
    for coefficient in (0.01, 10.0):
        model = llama()
        head = reward_head(HIDDEN)
        torch.nn.init.constant_(head.weight, 0.05)
        critic = TrunkCritic(TreeForward(model), head, CriticConfig(kind="shared"), value_coefficient=coefficient)
        train_batch(trainer(spec(PPO), critic, model=model))
        digests.append(weights_digest(model))
    assert digests[0] != digests[1]


def test_an_update_stopped_by_kl_stop_still_trains_the_critic() -> None:
    critic = FixedCritic()
    subject = trainer(spec({**PPO, "kl_stop": 1e-9}, minibatches=2, epochs=3), critic)
    values = train_batch(subject)
    # the first minibatch takes a step; the second exceeds kl_stop and is dropped, with the four after it
    assert values["minibatches_dropped"] == 5
    assert len(critic.denominators) == 2
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_a_remote_critic_is_called_early_and_waited_for_late() -> None:
    critic = FixedCritic(remote=True)
    subject = trainer(spec(PPO, minibatches=2), critic)
    for number, one in enumerate(batch(), start=1):
        subject.add_group(one)
        assert critic.calls == ["values"] * number
    values = subject.finish_batch(1).values
    assert critic.calls[2:] == ["values!", "values!", "learn", "step", "learn", "step", "step!", "step!"]
    assert values["time_critic_wait_s"] >= 0
    local = FixedCritic()
    plain = trainer(spec(PPO, minibatches=2), local)
    assert "time_critic_wait_s" not in train_batch(plain)
    assert weights_digest(subject.model) == weights_digest(plain.model)
    assert critic.learned == local.learned


def test_a_group_is_trained_on_while_a_remote_critic_computes_values_of_the_next() -> None:
    critic = FixedCritic(remote=True)
    subject = trainer(spec({**PPO, "whiten": False}, microbatch_tokens=5), critic)
    first, second = batch()
    subject.add_group(first)
    assert critic.calls == ["values"] * 2  # two microbatches of at most five tokens
    subject.add_group(second)
    assert critic.calls[2:7] == ["values", "values", "values!", "values!", "learn"]
    subject.finish_batch(1)
    assert len(critic.learned) == 10


def test_a_truncated_sample_uses_the_value_of_its_final_state_with_a_remote_critic() -> None:
    samples = [trajectory(PROMPT, [9, 10], 1.0, index=index, logprobs=[-5.0] * 2) for index in range(2)]
    truncated = [group(0, [msgspec.structs.replace(sample, finish="length") for sample in samples])]
    settings = spec({**PPO, "bootstrap_truncated": True}, prompts=1)
    both = [FixedCritic(), FixedCritic(remote=True)]
    for critic in both:
        train_batch(trainer(settings, critic), truncated)
    assert both[0].learned == both[1].learned
    # the return of the last token is its reward and the value after it: 1 + sin(0.7 · 10) + 0.1 · 4
    assert both[1].learned[-1][0] == pytest.approx(1.0 + fixed_value(10, 4), rel=1e-6)


def test_a_group_of_one_sample_is_valid_if_siblings_are_not_compared() -> None:
    single = [group(position, one.trajectories[:1]) for position, one in enumerate(batch())]
    subject = trainer(spec(PPO, group_size=1), FixedCritic())
    assert train_batch(subject, single)["groups_skipped_invalid"] == 0
    assert train_batch(trainer(spec({})), single)["groups_skipped_invalid"] == 2


@pytest.mark.parametrize("algorithm", [{}, PPO])
def test_empty_completions_have_no_trained_tokens(algorithm: dict[str, Any]) -> None:
    empty = [group(0, [trajectory(PROMPT, [], float(index), index=index) for index in range(2)])]
    values = train_batch(trainer(spec(algorithm, prompts=1), FixedCritic()), empty)
    assert values["tokens_trained"] == 0


def test_an_entropy_bonus_uses_groups_without_signal() -> None:
    flat = [group(0, [trajectory(PROMPT, [9, 10], 1.0, index=index, logprobs=[-5.0] * 2) for index in range(2)])]
    assert "loss" not in train_batch(trainer(spec({}, prompts=1)), flat)
    with_bonus = train_batch(trainer(spec({"entropy_bonus": 0.01}, prompts=1)), flat)
    assert with_bonus["groups_without_signal"] == 1
    assert with_bonus["loss"] == pytest.approx(-0.01 * with_bonus["entropy"], rel=1e-4)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    subject = trainer(spec({"entropy_bonus": 1.0}))
    values = [train_batch(subject, step=step)["entropy"] for step in range(1, 6)]
    assert values[-1] > values[0] + 0.05


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ({}, 'algorithm.correction.kind = "tis"'),
        ({"correction": {"kind": "mu_step"}}, 'algorithm.correction.kind = "mu_step"'),
        ({"correction": {"kind": "none"}, "proximal": "rollout"}, 'algorithm.proximal = "rollout"'),
        ({"correction": {"kind": "none"}, "kl_beta": 0.1, "kl_in": "reward"}, 'algorithm.kl_in = "reward"'),
    ],
)
def test_missing_rollout_logprobs_are_refused_if_needed(algorithm: dict[str, Any], names: str) -> None:
    subject = trainer(spec(algorithm), reference=llama(1) if "kl_beta" in algorithm else None)
    with pytest.raises(UserError) as caught:
        train_batch(subject, without_logprobs())
    assert names in caught.value.what
    assert 'algorithm.correction.kind = "none"' in caught.value.hint


@pytest.mark.parametrize("algorithm", [{}, {"correction": {"kind": "none"}}])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_rollout_logprobs_that_are_not_finite_are_reported_as_a_model_error(
    algorithm: dict[str, Any], value: float
) -> None:
    settings = spec(algorithm)
    first, other = batch()
    whole, short = first.trajectories
    broken = msgspec.structs.replace(short, rollout_logprobs=pack_logprobs([-5.0, value]))
    with pytest.raises(UserError, match=r"not finite \(1 of 2 samples of prompt ") as caught:
        train_batch(trainer(settings), [group(0, [whole, broken]), other])
    assert caught.value.where == settings.model.source
    assert "algorithm" not in caught.value.hint


def from_sources(name: str, sources: Sequence[str]) -> list[Group]:
    """The batch with tokens of `sources` in turn, one token each, whose logprobs are off by 0.5 on `name`."""
    changed = []
    for one in batch():
        trajectories = []
        for each in one.trajectories:
            length = each.completion_length
            runs = [SourceRun(source=sources[at % len(sources)], start=at, end=at + 1) for at in range(length)]
            off = [0.5 * (run.source == name) for run in runs]
            shifted = np.frombuffer(each.rollout_logprobs, np.float32) - np.array(off, np.float32)
            trajectories.append(msgspec.structs.replace(each, sources=tuple(runs), rollout_logprobs=shifted.tobytes()))
        changed.append(group(one.position, trajectories))
    return changed


def test_mismatch_is_reported_for_each_engine_and_worker() -> None:
    sources = ("vllm/spot-0", "vllm/spot-1", "embedded/local")
    equal, off = (train_batch(trainer(spec({})), from_sources(name, sources)) for name in ("", "vllm/spot-1"))
    for name in ("embedded", "embedded/local", "vllm/spot-0"):
        assert off[f"mismatch_kl/{name}"] == equal[f"mismatch_kl/{name}"]
    tokens = {name: off[f"mismatch_tokens/{name}"] for name in ("vllm", *sources)}
    assert tokens["vllm"] == tokens["vllm/spot-0"] + tokens["vllm/spot-1"]
    total = sum(off[f"mismatch_kl/{name}"] * tokens[name] for name in sources)
    assert total / sum(tokens[name] for name in sources) == pytest.approx(off["mismatch_kl"])
    assert off["mismatch_kl/vllm/spot-1"] != pytest.approx(equal["mismatch_kl/vllm/spot-1"])


def test_one_worker_has_no_mismatch_of_its_own() -> None:
    values = train_batch(trainer(spec({})), from_sources("", ["embedded/local"]))
    assert "mismatch_kl" in values
    assert not [name for name in values if name.startswith(("mismatch_kl/", "mismatch_tokens/"))]


def test_the_mismatch_of_tokens_from_kept_caches_is_reported_apart() -> None:
    """Four samples of 3, 2, 3 and 2 tokens, of version 0 and after the first token of version 1, on two workers. The
    trainer's logprobs are 0.1 above the engine's, and 0.5 above those of the six tokens from kept caches."""
    old, new = (PolicyVersion(number=number, digest="") for number in (0, 1))
    samples = []
    for index, each in enumerate(each for one in batch() for each in one.trajectories):
        length = each.completion_length
        changed = msgspec.structs.replace(
            each,
            versions=(VersionRun(version=old, start=0, end=1), VersionRun(version=new, start=1, end=length)),
            sources=(SourceRun(source=f"vllm/spot-{index % 2}", start=0, end=length),),
        )
        samples.append(WeightedSample(trajectory=changed, advantage=1.0, token_weight=0.1))

    def values(*, keep_cache: bool) -> dict[str, float]:
        microbatch = pack(samples, torch.device("cpu"), version=1, keep_cache=keep_cache)
        kept_T = microbatch.lags == 0
        sums = UpdateSums()
        sums.add_rollout(microbatch, microbatch.rollout_logprobs + torch.where(kept_T, 0.5, 0.1))
        return sums.values()

    kept_kl, fresh_kl = math.expm1(0.5) - 0.5, math.expm1(0.1) - 0.1  # r - 1 - log r
    found, plain = values(keep_cache=True), values(keep_cache=False)
    assert found["mismatch_kl_kept_cache"] == pytest.approx(kept_kl, rel=1e-5)
    assert found["kept_cache_fraction"] == 6 / 10
    assert found["mismatch_kl"] == plain["mismatch_kl"] == pytest.approx(0.6 * kept_kl + 0.4 * fresh_kl, rel=1e-5)
    # Workers are compared by their other tokens.
    for worker in ("vllm/spot-0", "vllm/spot-1"):
        assert found[f"mismatch_kl/{worker}"] == pytest.approx(fresh_kl, rel=1e-4)
        assert found[f"mismatch_tokens/{worker}"] == 2
    assert plain["mismatch_tokens/vllm/spot-0"] == 6
    assert not {"mismatch_kl_kept_cache", "kept_cache_fraction"} & plain.keys()


def test_a_trainer_reports_kept_caches_only_if_engines_keep_them() -> None:
    runs = tuple(VersionRun(version=PolicyVersion(number=at, digest=""), start=at, end=at + 1) for at in range(2))
    groups = [
        group(one.position, [msgspec.structs.replace(each, versions=runs) for each in one.trajectories])
        for one in batch()
    ]
    for keep_cache in (False, True):
        schedule = ScheduleConfig(max_policy_lag=1, keep_cache=keep_cache)
        values = train_batch(trainer(spec({}).model_copy(update={"schedule": schedule})), groups)
        assert ("mismatch_kl_kept_cache" in values) is keep_cache


def test_without_rollout_logprobs_there_are_no_ratio_metrics() -> None:
    values = train_batch(trainer(spec({"correction": {"kind": "none"}})), without_logprobs())
    assert values["tokens_trained"] == 10
    assert not {"ratio_mean", "mismatch_kl", "effective_sample_size"} & values.keys()


def without_logprobs() -> list[Group]:
    return [
        group(one.position, [msgspec.structs.replace(t, rollout_logprobs=b"") for t in one.trajectories])
        for one in batch()
    ]


def test_both_kl_estimates_to_the_reference_are_reported() -> None:
    microbatch = pack(
        [WeightedSample(trajectory=trajectory(PROMPT, [9, 10, 11], 1.0), advantage=0.0, token_weight=1.0)],
        torch.device("cpu"),
    )
    logprobs = torch.log(torch.tensor([0.5, 0.5, 0.125]))
    microbatch.proximal_logprobs, microbatch.ref_logprobs = logprobs, torch.log(torch.tensor([0.25, 0.25, 0.5]))
    outcome = policy_outcome(RunSpec().algorithm, microbatch, logprobs, torch.zeros(3), kl_beta=0.1)
    sums = UpdateSums(kl_beta=0.1)
    sums.add_backward(microbatch, outcome, logprobs, torch.zeros(3))
    values = sums.values()
    # log(policy / reference) is ln 2, ln 2, -2 ln 2; k3 is 2 (1/2 + ln 2 - 1) and 4 - 2 ln 2 - 1: together 2
    assert values["kl_ref_k1"] == pytest.approx(0.0, abs=1e-6)
    assert values["kl_ref"] == pytest.approx(2 / 3)


def test_the_kl_coefficient_follows_its_target(tmp_path: Path) -> None:
    """Far above the target β grows by the maximum of 2 % per batch; it is part of the state."""
    settings = spec({"kl_beta": 0.1, "kl_target": 1e-4})
    source = save_folder(llama(), tmp_path / "source")
    subject = trainer(settings, reference=llama(1), source=source)
    assert train_batch(subject)["kl_beta"] == 0.1
    assert train_batch(subject, step=2)["kl_beta"] == pytest.approx(0.102)
    (tmp_path / "state").mkdir()
    subject.write_state(tmp_path / "state")
    again = trainer(settings, reference=llama(1), source=source)
    again.read_state(tmp_path / "state")
    assert again.kl_beta == pytest.approx(0.1 * 1.02**2)


def test_without_a_target_the_kl_coefficient_is_constant() -> None:
    subject = trainer(spec({"kl_beta": 0.1}), reference=llama(1))
    train_batch(subject)
    assert subject.kl_beta == 0.1


def test_the_critic_is_part_of_the_state(tmp_path: Path) -> None:
    source = save_folder(llama(), tmp_path / "source")
    subject = trainer(spec(PPO), FixedCritic(), source=source)
    assert subject.state_bytes() == trainer(spec({}), source=source).state_bytes() + 100
    train_batch(subject)
    (tmp_path / "state").mkdir()
    subject.write_state(tmp_path / "state")
    critic = FixedCritic()
    again = trainer(spec(PPO), critic, source=source)
    again.read_state(tmp_path / "state")
    assert critic.restored
    assert (again.critic_steps, again.version) == (1, subject.version)


def test_split_by_sample_restores_the_tokens_of_samples() -> None:
    samples = [t for one in batch() for t in one.trajectories]
    weighted = [WeightedSample(trajectory=t, advantage=0.0, token_weight=1.0) for t in samples]
    microbatch = pack(weighted, torch.device("cpu"))
    parts = [part.tolist() for part in split_by_sample(microbatch.targets, microbatch.samples)]
    assert parts == [[9, 10, 11], [12, 13]] * 2


def read_by(reference: PreTrainedModel, groups: list[Group]) -> list[Group]:
    """With reference logprobs from a scorer with chunks of 2."""
    use_packed_attention(reference)
    scorer = LogprobScorer(reference, temperature=1.0, logits_budget_bytes=1 << 20)
    scorer_in_chunks = ChunkedScorer(reference, scorer, chunk_tokens=2, cache_tokens=100)

    def with_logprobs(t: Trajectory) -> Trajectory:
        while (scores := scorer_in_chunks.score_finished(t.sample_id, t.token_ids, t.prompt_length)) is None:
            pass
        return msgspec.structs.replace(t, ref_logprobs=scores.values)

    return [
        msgspec.structs.replace(one, trajectories=tuple(with_logprobs(t) for t in one.trajectories)) for one in groups
    ]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_reference_logprobs_of_samples_replace_computing_them(kl_in: str) -> None:
    settings = spec({"kl_beta": 0.5, "kl_in": kl_in, "correction": {"kind": "none"}})
    groups = read_by(llama(1), batch())
    computing, reading = trainer(settings, reference=llama(1)), trainer(settings)
    expected, found = train_batch(computing), train_batch(reading, groups)
    assert found["kl_ref"] == pytest.approx(expected["kl_ref"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    # Logprobs of samples are used even if the trainer has a (here different) reference.
    assert train_batch(trainer(settings, reference=llama(2)), groups)["kl_ref"] == found["kl_ref"]
    half = [msgspec.structs.replace(groups[0], trajectories=(groups[0].trajectories[0], batch()[0].trajectories[1]))]
    mixed = train_batch(trainer(settings, reference=llama(1)), [*half, groups[1]])
    assert mixed["kl_ref"] == pytest.approx(expected["kl_ref"], rel=1e-4)
    with pytest.raises(TidemillError, match="has no reference logprobs"):
        train_batch(trainer(settings), [*half, groups[1]])
