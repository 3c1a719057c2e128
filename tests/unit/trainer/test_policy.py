"""The packed, micro-batched update against a plain update, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.model_shapes import MODEL_SHAPES, VOCABULARY, forward_of, llama
from tests.trajectories import group, trajectory
from tidemill.config.schema import RunSpec
from tidemill.core.records import Group, SampleUpdate, unpack_logprobs, unpack_tokens
from tidemill.extensions.registry import resolve
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.runtime.compute import ComputeThread
from tidemill.trainer.packing import WeightedSample
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.update import sample_update

LEARNING_RATE = 1e-2


def spec(**sections: dict[str, Any]) -> RunSpec:
    base: dict[str, dict[str, Any]] = {
        "batch": {"prompts": 3, "group_size": 4, "microbatch_tokens": 4096},
        "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": 1e9},
        "sampling": {"max_new_tokens": 12},
        "algorithm": {"correction": {"kind": "none"}},  # the rollout logprobs here are arbitrary
    }
    return RunSpec.model_validate(
        {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    )


def trainer(model: PreTrainedModel, settings: RunSpec, reference: PreTrainedModel | None = None) -> PolicyTrainer:
    use_packed_attention(model)
    return PolicyTrainer(
        TreeForward(model),
        settings,
        compute=ComputeThread(),
        source=Path(),
        reference=forward_of(reference),
    )


def groups(seed: int = 0, *, count: int = 3, size: int = 4) -> list[Group]:
    """Prompts with a common header; completions of 1 to 12 tokens with common prefixes."""
    rng = np.random.default_rng(seed)
    header = rng.integers(2, VOCABULARY, 5).tolist()
    made = []
    for position in range(count):
        prompt = header + rng.integers(2, VOCABULARY, 4).tolist()
        start = rng.integers(2, VOCABULARY, 2).tolist()
        samples = [
            trajectory(
                prompt, [*start, *rng.integers(2, VOCABULARY, rng.integers(1, 11)).tolist()], reward, index=index
            )
            for index, reward in enumerate(rng.normal(size=size).tolist())
        ]
        made.append(group(position, samples))
    return made


def plain_logprobs(model: PreTrainedModel, tokens: list[int], prompt: int, temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, prompt - 1 : -1]
    logprobs: torch.Tensor = (logits / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(tokens) - prompt), torch.tensor(tokens[prompt:])]


def plain_gradients(
    model: PreTrainedModel,
    batch: Sequence[Group],
    *,
    normalize: str = "sample",
    temperature: float = 1.0,
    reference: PreTrainedModel | None = None,
    beta: float = 0.0,
) -> dict[str, torch.Tensor]:
    """The first step of GRPO: the ratio is 1, so the gradient of -ratio * A is -A * grad(logprob)."""
    losses, lengths = [], []
    for one in batch:
        rewards = torch.tensor([t.reward.value for t in one.trajectories if t.reward])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for sample, advantage in zip(one.trajectories, advantages, strict=True):
            tokens = unpack_tokens(sample.token_ids)
            logprobs = plain_logprobs(model, tokens, sample.prompt_length, temperature)
            loss = -(logprobs - logprobs.detach()).exp() * advantage
            if reference is not None:
                with torch.no_grad():
                    ref = plain_logprobs(reference, tokens, sample.prompt_length, temperature)
                loss = loss + beta * (torch.exp(ref - logprobs) - (ref - logprobs) - 1)
            losses.append(loss)
            lengths.append(len(loss))
    if normalize == "sample":
        total = torch.stack([loss.mean() for loss in losses]).mean()
    else:
        total = torch.cat(losses).sum() / sum(lengths)
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def accumulated(subject: PolicyTrainer, batch: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Normalised gradients just before the optimizer step."""
    for one in batch:
        subject.add_group(one)
    (minibatch,) = subject._minibatches
    if rest := minibatch.flush():
        subject._add_microbatch(minibatch, rest, backward=True)
    scale = 1.0 / minibatch.denominator
    return {name: p.grad * scale for name, p in subject.model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("microbatch_tokens", [4096, 40, 13])
def test_packed_gradients_equal_plain_ones(shape: str, microbatch_tokens: int) -> None:
    """One microbatch for all groups, one per group, and one per sample."""
    batch = groups()
    plain = plain_gradients(MODEL_SHAPES[shape](), batch)
    subject = trainer(MODEL_SHAPES[shape](), spec(batch={"microbatch_tokens": microbatch_tokens}))
    assert_equal_gradients(accumulated(subject, batch), plain)
    assert len(subject._minibatches[0].microbatches) == {4096: 1, 40: 3, 13: 12}[microbatch_tokens]


def test_vocabulary_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = groups()
    plain = plain_gradients(llama(), batch, temperature=0.7)
    monkeypatch.setattr("tidemill.config.learning.MEGABYTE", 7 * VOCABULARY * 4)  # seven rows of logits per chunk
    settings = spec(sampling={"temperature": 0.7}, trainer={"logits_budget_mb": 1})
    assert_equal_gradients(accumulated(trainer(llama(), settings), batch), plain)


def test_token_mean_and_kl_penalty() -> None:
    batch = groups()
    plain = plain_gradients(llama(), batch, normalize="token", reference=llama(1), beta=0.3)
    settings = spec(algorithm={"normalize": "token", "kl_beta": 0.3})
    assert_equal_gradients(accumulated(trainer(llama(), settings, llama(1)), batch), plain)


def test_activation_checkpointing_changes_nothing() -> None:
    batch = groups()
    model = llama()
    model.gradient_checkpointing_enable()
    model.train()
    assert_equal_gradients(accumulated(trainer(model, spec()), batch), plain_gradients(llama(), batch))


def test_shared_tokens_are_counted() -> None:
    prompt = [5, 6, 7, 8]
    samples = [trajectory(prompt, [9, 10, 11], 1.0), trajectory(prompt, [9, 12, 13], 0.0, index=1)]
    subject = trainer(llama(), spec(batch={"prompts": 1, "group_size": 2}))
    subject.add_group(group(0, samples))
    metrics = subject.finish_batch(1)
    # inputs 5 6 7 8 9 10 and 5 6 7 8 9 12 share five nodes; the last token of each predicts nothing
    assert metrics.values["tokens_packed"] == 7
    assert metrics.values["tokens_unpacked"] == 12
    assert metrics.values["tokens_trained"] == 6


def test_a_group_without_signal_is_skipped_but_counts_in_the_mean() -> None:
    batch = groups(count=2)
    flat = group(2, [trajectory([3, 4, 5], [6, 7], 1.0, index=i) for i in range(4)])
    plain = plain_gradients(llama(), [*batch, flat])
    subject = trainer(llama(), spec())
    assert_equal_gradients(accumulated(subject, [*batch, flat]), plain)
    assert subject._sums.groups_without_signal == 1
    assert subject._sums.tokens_trained == sum(t.completion_length for one in batch for t in one.trajectories)


def test_invalid_samples_do_not_affect_statistics_loss_and_mean() -> None:
    (whole,) = groups(count=1)
    broken = trajectory([3, 4], [5], float("nan"), index=9, valid=False)
    masked = trajectory([3, 4], [5], 100.0, index=10, weight=0.0)
    plain = plain_gradients(llama(), [whole])
    subject = trainer(llama(), spec())
    assert_equal_gradients(accumulated(subject, [group(0, [*whole.trajectories, broken, masked])]), plain)
    subject.add_group(group(1, [whole.trajectories[0], broken]))
    assert subject._sums.groups_skipped_invalid == 1


def test_an_advantage_of_the_user_gets_the_step_and_which_samples_are_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = []\n"
        "def noted(rewards, valid, step):\n"
        "    calls.append((rewards.tolist(), valid.tolist(), step))\n"
        "    return rewards * valid\n"
    )
    subject = trainer(llama(), spec(algorithm={"advantage": f"{tmp_path / 'mine.py'}:noted"}))
    samples = [trajectory([3, 4], [5], 1.0, index=0), trajectory([3, 4], [6], 2.0, index=1)]
    broken = trajectory([3, 4], [5], 0.0, index=2, valid=False)
    for step in (1, 2):
        subject.add_group(group(step, [*samples, broken]))
        subject.finish_batch(step)
    calls = resolve(f"{tmp_path / 'mine.py'}:noted", "advantage", where="").function.__globals__["calls"]
    assert calls == [([1.0, 2.0, 0.0], [True, True, False], step) for step in (1, 2)]


def details_of(settings: RunSpec, batch: Sequence[Group]) -> tuple[list[SampleUpdate], str]:
    """The updates of one step, and the digest of the weights after it."""
    subject = trainer(llama(), settings)
    for one in batch:
        subject.add_group(one)
    metrics = subject.finish_batch(1)
    return list(metrics.updates), metrics.version.digest


def test_an_update_reports_advantages_and_the_tokens_of_chosen_samples() -> None:
    without_signal = group(0, [trajectory([3, 4], [5], 1.0, index=index) for index in range(4)])
    batch = [without_signal, *groups(count=2)]
    updates, digest = details_of(spec(telemetry={"token_details": 5}), batch)
    assert [update.sample_id for update in updates] == [t.sample_id for one in batch for t in one.trajectories]
    assert [update.signal for update in updates] == [False] * 4 + [True] * 8
    assert [update.advantage for update in updates[:4]] == [0.0] * 4
    rewards = torch.tensor([t.reward.value for t in batch[1].trajectories if t.reward])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [update.advantage for update in updates[4:8]] == pytest.approx(expected.tolist(), rel=1e-4)
    detailed = [update for update in updates if update.entropies]
    assert len(detailed) == 5 and len({update.sample_id.prompt_id for update in detailed}) == 2
    samples = {t.sample_id: t for one in batch for t in one.trajectories}
    for update in detailed:
        sample = samples[update.sample_id]
        tokens = unpack_tokens(sample.token_ids)
        logprobs = plain_logprobs(llama(), tokens, sample.prompt_length, 1.0)
        assert unpack_logprobs(update.trainer_logprobs) == pytest.approx(logprobs.tolist(), abs=1e-4)
        logits = llama()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, sample.prompt_length - 1 : -1]
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        assert unpack_logprobs(update.entropies) == pytest.approx(entropies.tolist(), abs=1e-4)
    off, digest_off = details_of(spec(telemetry={"token_details": 0}), batch)
    assert digest_off == digest and not any(update.entropies for update in off)


@pytest.mark.parametrize(
    ("sections", "detailed"),
    [
        ({"telemetry": {"token_details": 100}}, 12),
        ({"telemetry": {"token_details": 8, "samples_per_step": 2}}, 2),
        ({"batch": {"minibatches": 3, "epochs": 2}}, 8),  # of the first epoch, each minibatch after the steps before
        ({"algorithm": {"advantage": "reinforce_pp", "whiten": True}}, 8),
    ],
)
def test_details_are_bounded_and_change_no_bit(sections: dict[str, Any], detailed: int) -> None:
    updates, digest = details_of(spec(**sections), groups())
    assert len(updates) == 12 and sum(bool(update.entropies) for update in updates) == detailed
    off = {**sections, "telemetry": {"token_details": 0}}
    assert details_of(spec(**off), groups())[1] == digest


def test_advantages_that_differ_between_tokens_are_reported_by_token() -> None:
    settings = spec(algorithm={"advantage": "reinforce_pp", "whiten": False})
    (update, *_), _ = details_of(settings, groups())
    assert update.token_advantages == b"", "without a penalty all tokens have the same"
    tokens = [1.0, 2.0, 4.5]
    sample = WeightedSample(trajectory=groups()[0].trajectories[0], advantage=np.array(tokens), token_weight=1.0)
    by_token = sample_update(sample, signal=True)
    assert (by_token.advantage, unpack_logprobs(by_token.token_advantages)) == (2.5, tokens)


def test_a_batch_without_signal_publishes_the_same_weights() -> None:
    subject = trainer(llama(), spec())
    before = subject.version.digest
    subject.add_group(group(0, [trajectory([3, 4], [5], 1.0, index=i) for i in range(4)]))
    metrics = subject.finish_batch(1)
    assert (metrics.optimizer_steps, subject.version.number, subject.version.digest) == (0, 1, before)
    # Means over zero tokens or steps are omitted, not 0.
    assert not {"entropy", "loss", "grad_norm", "learning_rate", "ratio_mean"} & metrics.values.keys()
    assert metrics.values["groups_without_signal"] == 1


def test_minibatches_and_epochs_use_ratios_to_the_start_of_the_update() -> None:
    """Four optimizer steps against AdamW of torch with plain clipping."""
    batch = groups(count=2)
    settings = spec(
        batch={"prompts": 2, "minibatches": 2, "epochs": 2}, optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.5}
    )
    subject = trainer(llama(), settings)
    for one in batch:
        subject.add_group(one)
    metrics = subject.finish_batch(1)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    samples = [[(unpack_tokens(t.token_ids), t) for t in one.trajectories] for one in batch]
    with torch.no_grad():
        proximal = [[plain_logprobs(model, ids, t.prompt_length, 1.0) for ids, t in part] for part in samples]
    clipped = total = 0
    for _ in range(2):
        for part, starts in zip(samples, proximal, strict=True):
            rewards = torch.tensor([t.reward.value for _, t in part if t.reward])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            losses = []
            for (ids, t), start, a in zip(part, starts, advantages, strict=True):
                ratio = (plain_logprobs(model, ids, t.prompt_length, 1.0) - start).exp()
                objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                clipped += int((ratio.clamp(0.8, 1.2) * a < ratio * a).sum())
                total += len(ratio)
                losses.append(-objective.mean())
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert metrics.optimizer_steps == 4
    assert metrics.values["clip_fraction"] == pytest.approx(clipped / total)
    assert clipped > 0
    for (name, ours), plain in zip(subject.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=2e-5, msg=name)


def test_the_update_stops_when_the_policy_moved_too_far() -> None:
    settings = spec(
        batch={"prompts": 2, "minibatches": 2, "epochs": 3},
        algorithm={"kl_stop": 1e-4},
        optimizer={"learning_rate": 5e-3},
    )
    subject = trainer(llama(), settings)
    for one in groups(count=2):
        subject.add_group(one)
    metrics = subject.finish_batch(1)
    assert metrics.optimizer_steps == 1
    assert metrics.values["minibatches_dropped"] == 5
    assert all(p.grad is None for p in subject.model.parameters())


def test_the_same_batch_gives_the_same_bits() -> None:
    digests = []
    for _ in range(2):
        subject = trainer(llama(), spec(batch={"microbatch_tokens": 40}))
        for one in groups():
            subject.add_group(one)
        digests.append(subject.finish_batch(1).version.digest)
    assert digests[0] == digests[1]
