"""`tidemill eval` and `tidemill generate` in one process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.controller.evaluation import Evaluation, correct, rewards_of, right_or_wrong
from tidemill.core.protocols import Scorer
from tidemill.core.records import (
    GenerateRequest,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    SamplingParams,
    Trajectory,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.catalog import asked_for_by
from tidemill.models.loading import weights_digest
from tidemill.runtime.batch_generation import batch_generator
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.runtime.readers import check_reward_models, model_scores
from tidemill.telemetry.statistics import (
    bootstrap_mean,
    distinct_n,
    length_figures,
    mean_pass_at_k,
    paired,
    reward_interval,
    share_interval,
)

NGRAMS = (1, 2)
"""Diversity is told of single tokens and of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """Everything one model answered, in the order of the prompts."""

    model: str
    prompts: tuple[Prompt, ...]
    greedy: Evaluation
    drawn: tuple[Group, ...] = ()  # none where no samples were asked for
    scores: Mapping[str, tuple[Reward, ...]]  # of the greedy completions, by the name of an additional scorer

    @property
    def right(self) -> list[bool] | None:
        """Whether each greedy completion is; None where rewards are graded."""
        return right_or_wrong(self.greedy.samples)

    @property
    def drawn_samples(self) -> list[Trajectory]:
        return [sample for group in self.drawn for sample in group.trajectories]

    @property
    def counts_right(self) -> list[tuple[int, int]] | None:
        """(samples, right ones) of each prompt's drawn ones; None where rewards are graded."""
        if right_or_wrong(self.drawn_samples) is None:
            return None
        return [(len(group.trajectories), sum(map(correct, group.trajectories))) for group in self.drawn]

    @property
    def drawn_rewards(self) -> list[float | None]:
        """Mean over each prompt's drawn samples with a valid reward; None without any."""
        rewards = [rewards_of(group.trajectories) for group in self.drawn]
        return [fmean(each) if each else None for each in rewards]


def figures(measured: ModelEvaluation, *, ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one model, its greedy completions among them; intervals are of 95 %.

    Args:
        ks: of pass@k, where samples were drawn.
    """
    result, samples = measured.greedy.result, measured.greedy.samples
    found: dict[str, Any] = {}
    if rewards := rewards_of(samples):
        found |= {"reward_mean": result.reward_mean, "reward_mean_interval": list(reward_interval(rewards)[1:])}
    if right := measured.right:
        found |= {
            "greedy_accuracy": result.greedy_accuracy,
            "greedy_accuracy_interval": list(share_interval([float(each) for each in right])[1:]),
        }
    found |= {
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
        "duration_s": result.duration_s,
        "model": measured.model,
        "weights_digest": result.version.digest,
        "completion_tokens": length_figures([sample.completion_length for sample in samples]),
        **_distinct(samples),
    }
    if measured.scores:
        found["scores"] = {name: _sample_score(rewards) for name, rewards in measured.scores.items()}
    if measured.drawn:
        found["drawn"] = _drawn(measured, ks)
    found["samples"] = [
        {"prompt": prompt.text, "completion": sample.text, "answer": prompt.answer, **judgement}
        for prompt, sample, judgement in zip(measured.prompts, samples, _judgements(measured), strict=True)
    ]
    return found


def comparison(other: ModelEvaluation, this: ModelEvaluation) -> dict[str, Any]:
    """`this` against `other` on the same prompts: means, their difference, and what chance would make of it."""
    pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "reward_mean": _both_known(_rewards(other.greedy.samples), _rewards(this.greedy.samples))
    }
    if (before := other.right) and (after := this.right):
        pairs["greedy_accuracy"] = (before, after)
    pairs["completion_tokens"] = (_lengths(other), _lengths(this))
    if this.drawn:
        pairs["drawn_reward_mean"] = _both_known(other.drawn_rewards, this.drawn_rewards)
    if (earlier := other.counts_right) and (later := this.counts_right):
        pairs["drawn_accuracy"] = ([c / n for n, c in earlier], [c / n for n, c in later])
    for name, rewards in this.scores.items():
        pairs[name] = _both_known([_value(each) for each in other.scores[name]], [_value(each) for each in rewards])
    return {
        "model": other.model,
        "weights_digest": other.greedy.result.version.digest,
        "figures": {name: _paired(*values) for name, values in pairs.items() if values[0]},
        "samples": [
            {"prompt": prompt.text, "completion": sample.text, **judgement}
            for prompt, sample, judgement in zip(other.prompts, other.greedy.samples, _judgements(other), strict=True)
        ],
    }


def _drawn(measured: ModelEvaluation, ks: Sequence[int]) -> dict[str, Any]:
    samples, counts = measured.drawn_samples, measured.counts_right
    rewards = [each for each in measured.drawn_rewards if each is not None]
    within = [_distinct(group.trajectories) for group in measured.drawn]
    return {
        "samples_per_prompt": len(measured.drawn[0].trajectories),
        **({"reward_mean": reward_interval(rewards)._asdict()} if rewards else {}),
        "pass_at": {str(k): mean_pass_at_k(counts, k)._asdict() for k in ks} if counts else {},
        "invalid": len(samples) - len(rewards_of(samples)),
        "truncated_fraction": fmean(sample.truncated for sample in samples),
        "completion_tokens": length_figures([sample.completion_length for sample in samples]),
        **_distinct(samples),
        **{f"{name}_in_prompt": _mean([each[name] for each in within]) for name in within[0]},
    }


def _distinct(samples: Sequence[Trajectory]) -> dict[str, float]:
    completions = [unpack_tokens(sample.completion_ids) for sample in samples]
    return {f"distinct_{n}": distinct_n(completions, n) for n in NGRAMS}


def _sample_score(rewards: Sequence[Reward]) -> dict[str, float]:
    values = [reward.value for reward in rewards if reward.valid]
    return {**bootstrap_mean(values)._asdict(), "invalid": len(rewards) - len(values)}


def _value(reward: Reward | None) -> float | None:
    return reward.value if reward is not None and reward.valid else None


def _rewards(samples: Sequence[Trajectory]) -> list[float | None]:
    return [_value(sample.reward) for sample in samples]


def _judgements(measured: ModelEvaluation) -> list[dict[str, Any]]:
    """Of each greedy completion; `correct` is None where rewards are graded, `reward` without a valid one."""
    rewards = _rewards(measured.greedy.samples)
    right: Sequence[bool | None] = measured.right or [None] * len(rewards)
    return [{"reward": reward, "correct": correct} for reward, correct in zip(rewards, right, strict=True)]


def _both_known(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[list[float], list[float]]:
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in both], [b for _, b in both]


def _paired(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    found = paired(before, after)
    return {
        "n": found.n,
        "other": found.before,
        "this": found.after,
        "difference": found.difference._asdict(),
        "higher": found.better,
        "lower": found.worse,
        "p_value": found.p_value,
    }


def _lengths(measured: ModelEvaluation) -> list[float]:
    return [float(sample.completion_length) for sample in measured.greedy.samples]


def _mean(values: Sequence[float]) -> float:
    """Over what is a number; NaN where nothing is."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan


DRAWN = "eval:held_out:drawn"
"""Names the random numbers of the samples for pass@k."""

Progress = Callable[[str], None]
Scorers = Mapping[str, Scorer]
"""Judges beside the task's own, by the name their score is told under."""


def evaluate(
    spec: RunSpec,
    *,
    model_folder: Path | None = None,
    compare: Path | str | None = None,
    scorers: Scorers | None = None,
    progress: Progress = lambda _: None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Mean reward of a model's greedy completions of the task's held-out prompts and, where answers are right or wrong,
    accuracy and (if samples are asked for) pass@k; lengths, diversity, and every greedy completion.

    Args:
        model_folder: a model or checkpoint instead of the configured one.
        compare: another model (a folder, or a source as in the configuration) to be asked the same and compared with.
        scorers: whoever else judges the greedy completions; closed by whoever made them.
        answers: where answered prompts are kept meanwhile; the same call goes on from there after a stop.

    Raises:
        UserError: a fault of the input.
    """
    this = measure(spec, model=model_folder, scorers=scorers or {}, progress=progress, answers=answers)
    found = figures(this, ks=spec.eval.ks)
    if compare is not None:
        progress(f"now {compare}, on the same prompts")
        with asked_for_by("eval.compare_with"):
            other = measure(spec, model=compare, scorers=scorers or {}, progress=progress, answers=answers)
        found["compared_with"] = comparison(other, this)
    return found


def measure(
    spec: RunSpec, *, model: Path | str | None, scorers: Scorers, progress: Progress, answers: Path | None = None
) -> ModelEvaluation:
    """Ask one model everything: the configured one, that of a folder, or another source."""
    if isinstance(model, str):
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"source": model, "revision": None})})
    folder = model if isinstance(model, Path) else None
    check_reward_models(spec, progress=progress, policy_folder=folder)
    bundle = load_model_bundle(spec, progress=progress, folder=folder)
    return asyncio.run(_measure(bundle, str(folder or bundle.spec.model.source), scorers, progress, answers))


async def _measure(
    bundle: ModelBundle, name: str, scorers: Scorers, progress: Progress, answers: Path | None
) -> ModelEvaluation:
    spec, task = bundle.spec, bundle.task()
    prompts = list(task.source.held_out())[: spec.eval.prompts]
    drawn = list[Group]()
    async with batch_generator(bundle, task, progress, kept_in=answers) as model:
        greedy = await model.greedily(prompts)
        if wanted := spec.eval.samples_per_prompt:
            drawn = await model.draw(prompts, samples_per_prompt=wanted, purpose=DRAWN)
        scores = {name: await _score(scorer, prompts, greedy.samples) for name, scorer in scorers.items()}
    scores |= model_scores(greedy.samples)
    return ModelEvaluation(model=name, prompts=tuple(prompts), greedy=greedy, drawn=tuple(drawn), scores=scores)


async def _score(scorer: Scorer, prompts: list[Prompt], samples: tuple[Trajectory, ...]) -> tuple[Reward, ...]:
    # All at once: one that computes in batches then sees them together.
    asked = (scorer.score(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True))
    return tuple(await asyncio.gather(*asked))


POLL_S = 0.2


def generate(
    spec: RunSpec,
    *,
    model_folder: Path | None = None,
    prompts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One completion per prompt, drawn as `spec.sampling` says from random numbers named by `spec.run.seed`.

    Args:
        model_folder: a model or checkpoint instead of the configured one.

    Raises:
        UserError: a fault of the input, a prompt longer than the context among them.
    """
    bundle = load_model_bundle(spec, progress=progress, folder=model_folder)
    encoded = [_encode(bundle, prompt) for prompt in prompts]
    sampling = SamplingParams(
        max_new_tokens=spec.sampling.max_new_tokens,
        temperature=spec.sampling.temperature,
        top_k=spec.sampling.top_k,
        top_p=spec.sampling.top_p,
        stop_token_ids=bundle.codec.stop_token_ids,
        stop_strings=spec.sampling.stop,
    )
    version = PolicyVersion(number=0, digest=weights_digest(bundle.model))
    engine = bundle.engine(version, prompt_tokens=max(map(len, encoded)))
    requests = [
        GenerateRequest(
            sample_id=SampleId(run_seed=spec.run.seed, purpose="generate", prompt_id=text, epoch=0, index=index),
            lease_id="local",
            attempt=0,
            prompt_ids=pack_tokens(token_ids),
            sampling=sampling,
        )
        for index, (text, token_ids) in enumerate(zip(prompts, encoded, strict=True))
    ]
    engine.submit(requests)
    tokens: dict[SampleId, list[int]] = {request.sample_id: [] for request in requests}
    logprobs: dict[SampleId, list[float]] = {request.sample_id: [] for request in requests}
    finish: dict[SampleId, str] = {}
    while len(finish) < len(requests):  # ends: every sample stops at max_new_tokens
        for delta in engine.poll(POLL_S):
            tokens[delta.sample_id] += unpack_tokens(delta.token_ids)
            logprobs[delta.sample_id] += unpack_logprobs(delta.logprobs)
            if delta.finish is not None:
                finish[delta.sample_id] = delta.finish
        progress(f"{sum(map(len, tokens.values()))} tokens, {len(finish)} of {len(requests)} completions finished")
    return [
        {
            "prompt": text,
            "completion": bundle.codec.decode(tokens[request.sample_id]),
            "finish": finish[request.sample_id],
            "tokens": len(tokens[request.sample_id]),
            "logprob": sum(logprobs[request.sample_id]),
        }
        for text, request in zip(prompts, requests, strict=True)
    ]


def _encode(bundle: ModelBundle, prompt: str) -> list[int]:
    if bundle.spec.model.chat_template:
        return bundle.codec.encode_chat([Message(role="user", content=prompt)])[1]
    return bundle.codec.encode(prompt)
