"""What stands around the policy's gradient: scopes, critics, adaptive penalties, missing logprobs, metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from tests.fixed_critic import FixedCritic, fixed_value
from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, llama
from tests.trajectories import group, trajectory
from tidemill.config.algorithm import CriticConfig
from tidemill.config.learning import OptimizerConfig, TrainerConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.core.records import Group, Trajectory, pack_logprobs
from tidemill.models.attention import use_packed_attention
from tidemill.models.loading import weights_digest
from tidemill.models.reward_model import reward_head
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic
from tidemill.trainer.packing import Weighted, by_sample, pack
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.scoring import ChunkedReader, LogprobGauge
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
    for one in (model, reference):
        if one is not None:
            use_packed_attention(one)
    return PolicyTrainer(model, settings, compute=ComputeThread(), source=source, critic=critic, reference=reference)


def batch() -> list[Group]:
    """Two groups of two; rollout logprobs of about a random model's size."""
    made = []
    for position in range(2):
        completions = [[9, 10, 11], [12, 13]]
        samples = [
            trajectory(PROMPT, completion, reward, index=index, logprobs=[-5.0] * len(completion))
            for index, (completion, reward) in enumerate(zip(completions, (1.0, 0.25 * position), strict=True))
        ]
        made.append(group(position, samples))
    return made


def learn(subject: PolicyTrainer, groups: list[Group] | None = None, step: int = 1) -> dict[str, float]:
    for one in groups or batch():
        subject.take(one)
    return subject.learn(step).values


def test_advantages_of_the_batch_wait_for_all_of_it() -> None:
    streaming, waiting = trainer(spec({}, microbatch_tokens=5)), trainer(spec({"whiten": True}, microbatch_tokens=5))
    for subject in (streaming, waiting):
        subject.take(batch()[0])
    # a group of six packed tokens fills microbatches of five while it comes
    assert streaming._sums.tokens_trained > 0
    assert waiting._sums.tokens_trained == 0
    assert not waiting._minibatches[0].microbatches
    waiting.take(batch()[1])
    assert waiting.learn(1).values["tokens_trained"] == 10


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = trainer(spec({"whiten": True, "advantage": "dr_grpo"}))
    seen: list[Weighted] = []
    monkeypatch.setattr(subject, "_feed", lambda index, samples: seen.extend(samples))
    learn(subject)
    # advantages (.5, -.5) and (.375, -.375) on 3 and 2 tokens each: sums 3 * .875 - 2 * .875 = .875, mean .0875
    flat = torch.cat([torch.as_tensor(sample.advantage) for sample in seen])
    raw = torch.tensor([0.5] * 3 + [-0.5] * 2 + [0.375] * 3 + [-0.375] * 2)
    torch.testing.assert_close(flat, (raw - 0.0875) / raw.std(), rtol=1e-5, atol=1e-6)


def test_a_critic_is_needed_and_only_where_it_is() -> None:
    with pytest.raises(UserError) as caught:
        trainer(spec(PPO))
    assert 'algorithm.advantage = "gae" needs a critic' in str(caught.value)
    critic = FixedCritic()
    learn(trainer(spec({}), critic))
    assert not critic.learned and not critic.denominators


def test_the_critic_learns_with_the_policys_weights_and_denominator() -> None:
    critic = FixedCritic()
    values = learn(trainer(spec(PPO, minibatches=2, epochs=2), critic))
    # normalize = "token": every weight 1; each minibatch has one group of 5 tokens, learned from twice
    assert critic.denominators == [5, 5, 5, 5]
    assert [weight for *_, weight in critic.learned] == [1.0] * 20
    assert all(critic.with_graph)
    assert values["value_loss"] == 2.5  # the fixed critic says 1, 2, 3, 4


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_warm_up_teaches_the_critic_alone(kind: str) -> None:
    model = llama()
    critic = real_critic(kind, model)
    subject = trainer(warming_up(2), critic, model=model)
    start, head = weights_digest(model), critic.head.weight.detach().clone()
    for step in (1, 2):
        for one in batch():
            subject.take(one)
        metrics = subject.learn(step)
        assert metrics.optimizer_steps == 0
        assert "value_loss" in metrics.values and "loss" not in metrics.values
        assert weights_digest(model) == start == metrics.version.digest
        assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(critic.head.weight, head)
    for one in batch():
        subject.take(one)
    assert subject.learn(3).optimizer_steps == 1
    assert weights_digest(model) != start


def test_the_learning_rate_falls_over_the_policys_own_steps() -> None:
    settings = warming_up(2).model_copy(update={"trainer": TrainerConfig(steps=5)})
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear", min_learning_rate_ratio=0.2)
    subject = trainer(settings.model_copy(update={"optimizer": optimizer}), FixedCritic())
    rates = [learn(subject, step=step).get("learning_rate") for step in range(1, 6)]
    # two steps of the critic's, then three of the policy's: from the peak, half way to, and at a fifth of it
    assert rates == [None, None, *(pytest.approx(rate) for rate in (1e-3, 6e-4, 2e-4))]


def real_critic(kind: str, model: PreTrainedModel) -> ModelCritic | TrunkCritic:
    config = CriticConfig.model_validate({"kind": kind, "learning_rate": 1e-2})
    if kind == "shared":
        return TrunkCritic(model, reward_head(HIDDEN), config, value_coefficient=0.5)
    own = llama(3)
    use_packed_attention(own)
    return ModelCritic(own, reward_head(HIDDEN), config, source=Path())


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_ppo_with_a_real_critic(kind: str) -> None:
    """The same batch again and again: the critic comes to know its returns."""
    model = llama()
    subject = trainer(spec(PPO), real_critic(kind, model), model=model)
    values = [learn(subject, step=step) for step in range(1, 31)]
    assert values[-1]["value_loss"] < 0.3 * values[0]["value_loss"]
    assert {"explained_variance", "value_grad_norm", "returns_mean"} <= values[-1].keys()


def test_a_shared_trunk_feels_the_value_loss() -> None:
    digests = []
    for coefficient in (0.01, 10.0):
        model = llama()
        head = reward_head(HIDDEN)
        torch.nn.init.constant_(head.weight, 0.05)
        critic = TrunkCritic(model, head, CriticConfig(kind="shared"), value_coefficient=coefficient)
        learn(trainer(spec(PPO), critic, model=model))
        digests.append(weights_digest(model))
    assert digests[0] != digests[1]


def test_an_update_that_went_too_far_still_teaches_the_critic() -> None:
    critic = FixedCritic()
    subject = trainer(spec({**PPO, "kl_stop": 1e-9}, minibatches=2, epochs=3), critic)
    values = learn(subject)
    # the first minibatch's step moves the policy; the second is measured, dropped, and four never begin
    assert values["minibatches_dropped"] == 5
    assert len(critic.denominators) == 2
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_a_critic_elsewhere_is_asked_early_and_waited_for_last() -> None:
    critic = FixedCritic(elsewhere=True)
    subject = trainer(spec(PPO, minibatches=2), critic)
    for number, one in enumerate(batch(), start=1):
        subject.take(one)
        assert critic.story == ["values"] * number
    values = subject.learn(1).values
    assert critic.story[2:] == ["values!", "values!", "learn", "step", "learn", "step", "step!", "step!"]
    assert values["time_critic_wait_s"] >= 0
    here = FixedCritic()
    plain = trainer(spec(PPO, minibatches=2), here)
    assert "time_critic_wait_s" not in learn(plain)
    assert weights_digest(subject.model) == weights_digest(plain.model)
    assert critic.learned == here.learned


def test_samples_are_learned_from_while_a_critic_elsewhere_values_the_next_group() -> None:
    critic = FixedCritic(elsewhere=True)
    subject = trainer(spec({**PPO, "whiten": False}, microbatch_tokens=5), critic)
    first, second = batch()
    subject.take(first)
    asked = list(critic.story)
    assert asked == ["values"] * 2  # two runs of at most five tokens
    subject.take(second)
    assert critic.story[2:7] == ["values", "values", "values!", "values!", "learn"]
    subject.learn(1)
    assert len(critic.learned) == 10


def test_a_cut_sample_asks_a_critic_elsewhere_for_its_last_state_too() -> None:
    samples = [trajectory(PROMPT, [9, 10], 1.0, index=index, logprobs=[-5.0] * 2) for index in range(2)]
    cut = [group(0, [msgspec.structs.replace(sample, finish="length") for sample in samples])]
    settings = spec({**PPO, "bootstrap_truncated": True}, prompts=1)
    both = [FixedCritic(), FixedCritic(elsewhere=True)]
    for critic in both:
        learn(trainer(settings, critic), cut)
    assert both[0].learned == both[1].learned
    # the return of the last token is its reward and the value after it: 1 + sin(0.7 · 10) + 0.1 · 4
    assert both[1].learned[-1][0] == pytest.approx(1.0 + fixed_value(10, 4), rel=1e-6)


def test_one_sample_a_prompt_will_do_without_siblings() -> None:
    single = [group(position, one.trajectories[:1]) for position, one in enumerate(batch())]
    subject = trainer(spec(PPO, group_size=1), FixedCritic())
    assert learn(subject, single)["groups_skipped_invalid"] == 0
    assert learn(trainer(spec({})), single)["groups_skipped_invalid"] == 2


@pytest.mark.parametrize("algorithm", [{}, PPO])
def test_empty_completions_teach_nothing(algorithm: dict[str, Any]) -> None:
    empty = [group(0, [trajectory(PROMPT, [], float(index), index=index) for index in range(2)])]
    values = learn(trainer(spec(algorithm, prompts=1), FixedCritic()), empty)
    assert values["tokens_trained"] == 0


def test_a_bonus_is_learned_from_groups_without_signal() -> None:
    flat = [group(0, [trajectory(PROMPT, [9, 10], 1.0, index=index, logprobs=[-5.0] * 2) for index in range(2)])]
    assert "loss" not in learn(trainer(spec({}, prompts=1)), flat)
    with_bonus = learn(trainer(spec({"entropy_bonus": 0.01}, prompts=1)), flat)
    assert with_bonus["groups_without_signal"] == 1
    assert with_bonus["loss"] == pytest.approx(-0.01 * with_bonus["entropy"], rel=1e-4)


def test_a_bonus_raises_the_entropy() -> None:
    subject = trainer(spec({"entropy_bonus": 1.0}))
    values = [learn(subject, step=step)["entropy"] for step in range(1, 6)]
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
def test_missing_rollout_logprobs_are_told_where_they_are_needed(algorithm: dict[str, Any], names: str) -> None:
    subject = trainer(spec(algorithm), reference=llama(1) if "kl_beta" in algorithm else None)
    with pytest.raises(UserError) as caught:
        learn(subject, without_logprobs())
    assert f"and {names} needs them" in str(caught.value)
    assert 'algorithm.correction.kind = "none"' in str(caught.value)


@pytest.mark.parametrize("algorithm", [{}, {"correction": {"kind": "none"}}])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_are_the_models_fault_and_not_missing(
    algorithm: dict[str, Any], value: float
) -> None:
    settings = spec(algorithm)
    first, other = batch()
    whole, short = first.trajectories
    broken = msgspec.structs.replace(short, rollout_logprobs=pack_logprobs([-5.0, value]))
    with pytest.raises(UserError, match=r"not finite \(1 of 2 samples of prompt ") as caught:
        learn(trainer(settings), [group(0, [whole, broken]), other])
    assert caught.value.where == settings.model.source
    assert "algorithm" not in caught.value.hint


def test_without_rollout_logprobs_there_are_no_ratios() -> None:
    values = learn(trainer(spec({"correction": {"kind": "none"}})), without_logprobs())
    assert values["tokens_trained"] == 10
    assert not {"ratio_mean", "mismatch_kl", "effective_sample_size"} & values.keys()


def without_logprobs() -> list[Group]:
    return [
        group(one.position, [msgspec.structs.replace(t, rollout_logprobs=b"") for t in one.trajectories])
        for one in batch()
    ]


def test_both_estimates_of_the_divergence_from_the_reference_are_told() -> None:
    microbatch = pack(
        [Weighted(trajectory=trajectory(PROMPT, [9, 10, 11], 1.0), advantage=0.0, token_weight=1.0)],
        torch.device("cpu"),
    )
    logprobs = torch.log(torch.tensor([0.5, 0.5, 0.125]))
    microbatch.proximal_logprobs, microbatch.ref_logprobs = logprobs, torch.log(torch.tensor([0.25, 0.25, 0.5]))
    outcome = policy_outcome(RunSpec().algorithm, microbatch, logprobs, torch.zeros(3), kl_beta=0.1)
    sums = UpdateSums(kl_beta=0.1)
    sums.learned(microbatch, outcome, logprobs, torch.zeros(3))
    values = sums.values()
    # log(policy / reference) is ln 2, ln 2, -2 ln 2; k3 is 2 (1/2 + ln 2 - 1) and 4 - 2 ln 2 - 1: together 2
    assert values["kl_ref_k1"] == pytest.approx(0.0, abs=1e-6)
    assert values["kl_ref"] == pytest.approx(2 / 3)


def test_the_kl_coefficient_follows_its_target(tmp_path: Path) -> None:
    """Far above the target: β grows by its most, 2 % a batch; it is part of the state."""
    settings = spec({"kl_beta": 0.1, "kl_target": 1e-4})
    source = save_folder(llama(), tmp_path / "source")
    subject = trainer(settings, reference=llama(1), source=source)
    assert learn(subject)["kl_beta"] == 0.1
    assert learn(subject, step=2)["kl_beta"] == pytest.approx(0.102)
    (tmp_path / "state").mkdir()
    subject.write_state(tmp_path / "state")
    again = trainer(settings, reference=llama(1), source=source)
    again.read_state(tmp_path / "state")
    assert again.kl_beta == pytest.approx(0.1 * 1.02**2)


def test_a_fixed_coefficient_stays() -> None:
    subject = trainer(spec({"kl_beta": 0.1}), reference=llama(1))
    learn(subject)
    assert subject.kl_beta == 0.1


def test_the_critic_is_part_of_the_state(tmp_path: Path) -> None:
    source = save_folder(llama(), tmp_path / "source")
    subject = trainer(spec(PPO), FixedCritic(), source=source)
    assert subject.state_bytes() == trainer(spec({}), source=source).state_bytes() + 100
    learn(subject)
    (tmp_path / "state").mkdir()
    subject.write_state(tmp_path / "state")
    critic = FixedCritic()
    again = trainer(spec(PPO), critic, source=source)
    again.read_state(tmp_path / "state")
    assert critic.restored
    assert (again.critic_steps, again.version) == (1, subject.version)


def test_tokens_go_back_to_their_samples() -> None:
    samples = [t for one in batch() for t in one.trajectories]
    weighted = [Weighted(trajectory=t, advantage=0.0, token_weight=1.0) for t in samples]
    microbatch = pack(weighted, torch.device("cpu"))
    parts = [part.tolist() for part in by_sample(microbatch.targets, microbatch.samples)]
    assert parts == [[9, 10, 11], [12, 13]] * 2


def read_by(reference: PreTrainedModel, groups: list[Group]) -> list[Group]:
    """With reference logprobs, as a reader in chunks of 2 gives them."""
    use_packed_attention(reference)
    gauge = LogprobGauge(reference, temperature=1.0, logits_budget_bytes=1 << 20)
    reader = ChunkedReader(reference, gauge, chunk_tokens=2, cache_tokens=100)

    def with_logprobs(t: Trajectory) -> Trajectory:
        while (read := reader.read_on(t.sample_id, t.token_ids, t.prompt_length)) is None:
            pass
        return msgspec.structs.replace(t, ref_logprobs=read.numbers)

    return [
        msgspec.structs.replace(one, trajectories=tuple(with_logprobs(t) for t in one.trajectories)) for one in groups
    ]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_what_the_reference_said_elsewhere_is_as_good_as_measured_here(kl_in: str) -> None:
    settings = spec({"kl_beta": 0.5, "kl_in": kl_in, "correction": {"kind": "none"}})
    groups = read_by(llama(1), batch())
    measuring, told = trainer(settings, reference=llama(1)), trainer(settings)
    expected, found = learn(measuring), learn(told, groups)
    assert found["kl_ref"] == pytest.approx(expected["kl_ref"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    # Whatever is told is believed, also by a trainer that has a reference: here another one.
    assert learn(trainer(settings, reference=llama(2)), groups)["kl_ref"] == found["kl_ref"]
    half = [msgspec.structs.replace(groups[0], trajectories=(groups[0].trajectories[0], batch()[0].trajectories[1]))]
    mixed = learn(trainer(settings, reference=llama(1)), [*half, groups[1]])
    assert mixed["kl_ref"] == pytest.approx(expected["kl_ref"], rel=1e-4)
    with pytest.raises(TidemillError, match="came without reference logprobs"):
        learn(trainer(settings), [*half, groups[1]])
