"""Evaluate a model on the task's held-out prompts, compare two models, and generate completions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.entries import Evaluated
from tidemill.controller.evaluation import (
    correctness,
    counts_correct,
    drawn_purpose,
    prompt_rewards,
    rewards_of,
)
from tidemill.controller.in_flight import sampling_params
from tidemill.core.errors import UserError
from tidemill.core.protocols import Scorer
from tidemill.core.records import (
    GenerateRequest,
    Message,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    Trajectory,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.data.given_prompts import questions
from tidemill.data.prompts import RawPrompt, after_system, encode_question, in_chat
from tidemill.jobs.batch_generation import batch_generator
from tidemill.models.catalog import errors_at_key
from tidemill.models.codec import TextCodec
from tidemill.models.model_source import ModelSource, exact_models, locate
from tidemill.models.prompt_format import prompt_format
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.frozen_scorers import check_reward_models, model_scores
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.scoring.row_report import REMARKS, report_rows
from tidemill.telemetry.events import DATA, event_text
from tidemill.telemetry.metrics import HELD_OUT_NAME
from tidemill.telemetry.sample_files import message_lines, turn_lines
from tidemill.telemetry.statistics import (
    distinct_n,
    length_figures,
    mean_pass_at_k,
    paired,
    reward_interval,
    share_interval,
)

NGRAMS = (1, 2)
"""Diversity is reported for single tokens and for pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """The completions of one model, in the order of the prompts."""

    model: str
    prompts: tuple[Prompt, ...]
    greedy: Evaluated
    drawn: tuple[tuple[Trajectory, ...], ...] = ()  # by prompt; empty if only greedy completions were generated
    scores: Mapping[str, tuple[Reward, ...]]  # of greedy completions, by name of the additional scorer

    @property
    def right(self) -> list[bool] | None:
        """Whether each greedy completion is correct; None if rewards are graded."""
        return correctness(self.greedy.samples)

    @property
    def counts_right(self) -> list[tuple[int, int]] | None:
        """(samples, correct samples) drawn per prompt; None if rewards are graded."""
        return counts_correct(self.drawn)


def figures(measured: ModelEvaluation, *, ks: Sequence[int]) -> dict[str, Any]:
    """Metrics and greedy completions of one model as JSON, with 95 % intervals.

    Args:
        ks: values of k for pass@k, if samples were drawn.
    """
    result, samples = measured.greedy.result, measured.greedy.samples
    found: dict[str, Any] = {}
    if rewards := rewards_of(samples):
        found |= {"reward_mean": result.reward_mean, "reward_mean_interval": reward_interval(rewards).ends}
    if right := measured.right:
        found |= {
            "greedy_accuracy": result.greedy_accuracy,
            "greedy_accuracy_interval": share_interval([float(each) for each in right]).ends,
        }
    found |= {
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
        "duration_s": result.duration_s,
        "model": measured.model,
        "weights_digest": result.version.digest,
        "completion_tokens": length_figures([sample.trained_length for sample in samples]),
        **_distinct(samples),
    }
    if measured.scores:
        found["scores"] = {}
        for name, scores in measured.scores.items():
            valid = [reward.value for reward in scores if reward.valid]
            found["scores"][name] = {**reward_interval(valid).figure, "invalid": len(scores) - len(valid)}
    if measured.drawn:
        found["drawn"] = _drawn(measured, ks)
    found["samples"] = [
        {
            "prompt": prompt.text,
            **message_lines(prompt),
            "completion": sample.text,
            "answer": prompt.answer,
            **scored,
            **_turns(sample),
        }
        for prompt, sample, scored in zip(measured.prompts, samples, _rewards_and_correctness(measured), strict=True)
    ]
    return found


def comparison(other: ModelEvaluation, this: ModelEvaluation) -> dict[str, Any]:
    """Compare two models on the same prompts: means, paired difference and its p-value."""
    pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "reward_mean": _valid_pairs(_rewards(other.greedy.samples), _rewards(this.greedy.samples))
    }
    if (before := other.right) and (after := this.right):
        pairs["greedy_accuracy"] = (before, after)
    lengths = [[float(sample.trained_length) for sample in model.greedy.samples] for model in (other, this)]
    pairs["completion_tokens"] = (lengths[0], lengths[1])
    if this.drawn:
        pairs["drawn_reward_mean"] = _valid_pairs(prompt_rewards(other.drawn), prompt_rewards(this.drawn))
    if (earlier := other.counts_right) and (later := this.counts_right):
        pairs["drawn_accuracy"] = ([c / n for n, c in earlier], [c / n for n, c in later])
    for name, rewards in this.scores.items():
        pairs[name] = _valid_pairs([_value(each) for each in other.scores[name]], [_value(each) for each in rewards])
    return {
        "model": other.model,
        "weights_digest": other.greedy.result.version.digest,
        "figures": {name: _paired(*values) for name, values in pairs.items() if values[0]},
        "samples": [
            {"prompt": prompt.text, "completion": sample.text, **scored, **_turns(sample)}
            for prompt, sample, scored in zip(
                other.prompts, other.greedy.samples, _rewards_and_correctness(other), strict=True
            )
        ],
    }


def _drawn(measured: ModelEvaluation, ks: Sequence[int]) -> dict[str, Any]:
    samples = [sample for of_prompt in measured.drawn for sample in of_prompt]
    counts = measured.counts_right
    rewards = [reward for reward in prompt_rewards(measured.drawn) if reward is not None]
    measures: dict[str, Any] = {
        "samples_per_prompt": len(measured.drawn[0]),
        **({"reward_mean": reward_interval(rewards).figure} if rewards else {}),
        "pass_at": {str(k): mean_pass_at_k(counts, k).figure for k in ks} if counts else {},
        "invalid": len(samples) - len(rewards_of(samples)),
        "truncated_fraction": fmean(sample.truncated for sample in samples),
        "completion_tokens": length_figures([sample.trained_length for sample in samples]),
        **_distinct(samples),
    }
    within = [_distinct(of_prompt) for of_prompt in measured.drawn]
    for name in within[0]:
        numbers = [shares[name] for shares in within if not math.isnan(shares[name])]
        measures[f"{name}_in_prompt"] = fmean(numbers) if numbers else math.nan
    return measures


def _distinct(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Diversity of the tokens that the model generated."""
    completions = list[list[int]]()
    for sample in samples:
        tokens = unpack_tokens(sample.token_ids)
        completions.append(
            [token for each in sample.segments if each.trained for token in tokens[each.start : each.end]]
        )
    return {f"distinct_{n}": distinct_n(completions, n) for n in NGRAMS}


def _value(reward: Reward | None) -> float | None:
    return reward.value if reward is not None and reward.valid else None


def _rewards(samples: Sequence[Trajectory]) -> list[float | None]:
    return [_value(sample.reward) for sample in samples]


def _rewards_and_correctness(measured: ModelEvaluation) -> list[dict[str, Any]]:
    """Reward (None if invalid) and correctness (None if rewards are graded) of each greedy completion."""
    rewards = _rewards(measured.greedy.samples)
    right: Sequence[bool | None] = measured.right or [None] * len(rewards)
    return [{"reward": reward, "correct": each} for reward, each in zip(rewards, right, strict=True)]


def _turns(sample: Trajectory) -> dict[str, Any]:
    """The turns of an agent, as in samples files; empty for a single completion."""
    if not sample.turns:
        return {}
    return {"turns": turn_lines(sample), "episode_end": sample.episode_end, "fault": sample.fault}


def _valid_pairs(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[list[float], list[float]]:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _paired(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    found = paired(before, after)
    return {
        "n": found.n,
        "other": found.before,
        "this": found.after,
        "difference": found.difference.figure,
        "higher": found.better,
        "lower": found.worse,
        "p_value": found.p_value,
    }


Progress = Callable[[str], None]
Scorers = Mapping[str, Scorer]
"""Additional scorers, by the name of their score in the results."""


def evaluate(
    spec: RunSpec,
    *,
    model: ModelSource | None = None,
    compare: ModelSource | str | None = None,
    scorers: Scorers | None = None,
    progress: Progress = lambda _: None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model on the task's held-out prompts, and on every set of `eval.sets`.

    The results hold the mean reward of greedy completions, accuracy and pass@k if answers are right or wrong, lengths,
    diversity, and every greedy completion; under "sets" the same for each set, by name.

    Args:
        model: replaces the configured one.
        compare: a second model to evaluate and compare with, or its name as in `eval.compare_with`.
        scorers: additional scorers of the greedy completions; the caller closes them.
        answers: a file that stores finished completions, so that a stopped evaluation can be resumed.

    Raises:
        UserError: the input is invalid.
    """
    this = measure(spec, model=model, scorers=scorers or {}, progress=progress, answers=answers)
    by_name = {name: figures(each, ks=spec.eval.ks) for name, each in this.items()}
    if compare is not None:
        other_model = locate(compare) if isinstance(compare, str) else compare
        progress(f"evaluating {other_model.source} on the same prompts")
        with errors_at_key("eval.compare_with"):
            other = measure(spec, model=other_model, scorers=scorers or {}, progress=progress, answers=answers)
        for name, found in by_name.items():
            found["compared_with"] = comparison(other[name], this[name])
    held_out = by_name.pop(HELD_OUT_NAME)
    return held_out | ({"sets": by_name} if by_name else {})


def measure(
    spec: RunSpec, *, model: ModelSource | None, scorers: Scorers, progress: Progress, answers: Path | None = None
) -> dict[str, ModelEvaluation]:
    """Generate and score the completions of one model: the configured one, or `model`.

    Returns:
        By name: the evaluation of the task's held-out prompts, then those of `eval.sets`.
    """
    spec = exact_models(spec)
    if model is not None and model.folder is None:
        spec, model = spec.model_copy(update={"model": model.config(spec.model)}), None
    folder = model.folder if model else None
    check_memory(spec, "eval", folder=folder, note=progress)
    check_reward_models(spec, progress=progress, policy_folder=folder)
    bundle = load_model_bundle(spec, progress=progress, model=model)
    name = model.source if model else bundle.spec.model.source
    return asyncio.run(_measure(bundle, name, scorers, progress, answers))


async def _measure(
    bundle: ModelBundle, model: str, scorers: Scorers, progress: Progress, answers: Path | None
) -> dict[str, ModelEvaluation]:
    spec, task = bundle.spec, bundle.task()
    rows = report_rows(spec, task)
    if any(rows.get(key) for key in REMARKS):
        for line in event_text(DATA, rows).splitlines():
            progress(line)
    held_out = list(task.source.held_out(spec.eval.prompts))
    found = dict[str, ModelEvaluation]()
    async with batch_generator(bundle, task, progress, cache_file=answers) as generator:
        for name, prompts in {HELD_OUT_NAME: held_out, **task.eval_prompts}.items():
            greedy, drawn = await generator.greedily(prompts, name=name), list[tuple[Trajectory, ...]]()
            if wanted := spec.eval.samples_per_prompt:
                drawn = await generator.draw(prompts, samples_per_prompt=wanted, purpose=drawn_purpose(name))
            scores = dict[str, tuple[Reward, ...]]()
            for name_of_score, scorer in scorers.items():
                pairs = zip(prompts, greedy.samples, strict=True)
                # All at once, so that a scorer that works in batches gets them together.
                scored = await asyncio.gather(*(scorer.score(prompt, sample) for prompt, sample in pairs))
                scores[name_of_score] = tuple(scored)
            scores |= model_scores(greedy.samples)
            found[name] = ModelEvaluation(
                model=model, prompts=tuple(prompts), greedy=greedy, drawn=tuple(drawn), scores=scores
            )
    return found


POLL_S = 0.2


def generate(
    spec: RunSpec,
    *,
    model: ModelSource | None = None,
    prompts: Any,
    raw: bool = False,
    progress: Progress = lambda _: None,
) -> list[dict[str, Any]]:
    """Sample one completion per prompt with `spec.sampling`, seeded by `spec.run.seed`.

    A prompt is formatted as a row of the run that trained the model: a text is a user message in the chat template if
    that run (or `spec`) uses it, after its system prompt. Messages always use the template.

    Args:
        model: replaces the configured one.
        prompts: as `data.given_prompts.questions`.
        raw: send texts as written.

    Raises:
        UserError: the input is invalid, for example a prompt longer than the context.
    """
    asked = questions(prompts)
    if raw and (written := next((each for each in asked if not each.plain), None)):
        raise UserError("messages cannot be sent as written", where=written.where, hint="leave out raw, or give text")
    wanted = prompt_format(spec, model or locate(spec.model.source))
    spec = exact_models(spec)
    check_memory(spec, "generate", folder=model.folder if model else None, note=progress)
    bundle = load_model_bundle(spec, progress=progress, model=model)
    codec = bundle.codec
    chat = wanted.chat and not raw
    system = "" if raw else wanted.system_prompt
    rendered = [_rendered(each, codec, chat=chat, system=system) for each in asked]
    encoded = [token_ids for _, token_ids in rendered]
    sampling = sampling_params(spec, codec, ())
    version = PolicyVersion(number=0, digest=weights_digest(bundle.model))
    engine = bundle.engine(version, prompt_tokens=max(map(len, encoded)))
    requests = [
        GenerateRequest(
            sample_id=SampleId(run_seed=spec.run.seed, purpose="generate", prompt_id=_name(each), epoch=0, index=index),
            lease_id="local",
            attempt=0,
            prompt_ids=pack_tokens(token_ids),
            sampling=sampling,
        )
        for index, (each, token_ids) in enumerate(zip(asked, encoded, strict=True))
    ]
    engine.submit(requests)
    tokens: dict[SampleId, list[int]] = {request.sample_id: [] for request in requests}
    logprobs: dict[SampleId, list[float]] = {request.sample_id: [] for request in requests}
    finish: dict[SampleId, str] = {}
    while len(finish) < len(requests):  # terminates: every sample stops at max_new_tokens
        for delta in engine.poll(POLL_S):
            tokens[delta.sample_id] += unpack_tokens(delta.token_ids)
            logprobs[delta.sample_id] += unpack_logprobs(delta.logprobs)
            if delta.finish is not None:
                finish[delta.sample_id] = delta.finish
        progress(f"{sum(map(len, tokens.values()))} tokens, {len(finish)} of {len(requests)} completions finished")
    return [
        {
            "prompt": each.messages[0].content if each.plain else _as_dicts(each.messages),
            "completion": codec.decode(tokens[request.sample_id]),
            "finish": finish[request.sample_id],
            "tokens": len(tokens[request.sample_id]),
            "logprob": sum(logprobs[request.sample_id]),
            "format": "chat" if in_chat(each, chat_template=chat) else "text",
            "sent": sent,
        }
        for each, (sent, _), request in zip(asked, rendered, requests, strict=True)
    ]


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _name(question: RawPrompt) -> str:
    """Part of the key of a prompt's random numbers: equal for a text and for a user message with it."""
    if [message.role for message in question.messages] == ["user"]:
        return question.messages[0].content
    return json.dumps(_as_dicts(question.messages), ensure_ascii=False)


def _rendered(question: RawPrompt, codec: TextCodec, *, chat: bool, system: str) -> tuple[str, list[int]]:
    """Text and token ids that the model gets.

    Raises:
        UserError: names the prompt that cannot be formatted.
    """
    question = msgspec.structs.replace(question, messages=after_system(question.messages, system))
    if not question.plain and not codec.tokenizer.chat_template:
        hint = "give text, or an instruction-tuned model"
        raise UserError("the model has no chat template for messages", where=question.where, hint=hint)
    try:
        return encode_question(question, codec, chat_template=chat)
    except UserError as error:
        raise UserError(error.what, where=question.where, hint=error.hint) from error
