"""Evaluation on held-out prompts: generating and scoring samples, its figures, and its schedule during a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.collector import RolloutContext, SampleCollector, collect_samples
from tidemill.controller.in_flight import InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import EvalResult, Evaluated, Ledger
from tidemill.core.errors import UserError
from tidemill.core.protocols import PromptSource, Scorer
from tidemill.core.records import CORRECT_REWARD, PolicyVersion, Prompt, Record, SamplingParams, Trajectory
from tidemill.telemetry.events import EVALUATION
from tidemill.telemetry.metrics import HELD_OUT

HELD_OUT_NAME = "held_out"


class Evaluation(Record):
    """An evaluation's figures and its samples, in the order of the prompts."""

    result: EvalResult
    samples: tuple[Trajectory, ...]


async def evaluate(
    *,
    step: int,
    version: PolicyVersion,
    prompts: Sequence[Prompt],
    rollout: RolloutContext,
    scorer: Scorer,
    sampling: SamplingParams,
    seed: int,
    name: str = HELD_OUT_NAME,
) -> Evaluation:
    """Generate one greedy completion per prompt and score it.

    Nothing is journalled; an interrupted evaluation is repeated.

    Args:
        step: batches committed before `version`, which the worker must have loaded.
        rollout: its ledger and scorer are not used.
        scorer: may differ from the training reward.
        sampling: used with temperature 0.

    Raises:
        UserError: there are no prompts.
        Exception: as `collect_samples`.
    """
    if not prompts:
        raise UserError("the task has no held-out prompts", where="task", hint="set held_out_fraction or held_out_path")
    rollout = replace(
        rollout,
        scorer=scorer,
        ledger=Ledger(None),
        reading=None,
        truncated="trained",
        phase="evaluation",
        window_s=math.inf,
    )
    greedy = msgspec.structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    plan = SamplingPlan(purpose=f"eval:{name}", run_seed=seed, group_size=1, sampling=greedy)
    in_flight = InFlight(plan, version_number=version.number)
    groups = plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=version.number)
    in_flight.open(groups, prompts)
    started_s = rollout.clock.now()
    async with collect_samples(in_flight, rollout) as scored:
        by_prompt = {trajectory.sample_id.prompt_id: trajectory async for trajectory in scored}
    samples = tuple(by_prompt[prompt.prompt_id] for prompt in prompts)
    result = eval_result(name, step, version, samples, rollout.clock.now() - started_s)
    return Evaluation(result=result, samples=samples)


def rewards_of(samples: Iterable[Trajectory]) -> list[float]:
    """Values of the valid rewards."""
    return [sample.reward.value for sample in samples if sample.reward is not None and sample.reward.valid]


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the completion is correct: `Reward.correct`, or a valid reward of 1 or more if that is None."""
    reward = trajectory.reward
    if reward is None or not reward.valid:
        return False
    return reward.value >= CORRECT_REWARD if reward.correct is None else reward.correct


def correctness(samples: Sequence[Trajectory]) -> list[bool] | None:
    """Whether each completion is correct; None if rewards are graded, or none is valid.

    Rewards without `Reward.correct` are graded unless they are 0 or 1. A sample without a valid reward is incorrect.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None and sample.reward.valid]
    if not rewards or any(reward.correct is None and reward.value not in (0.0, 1.0) for reward in rewards):
        return None
    return [is_correct(sample) for sample in samples]


def eval_result(
    name: str, step: int, version: PolicyVersion, samples: Sequence[Trajectory], duration_s: float
) -> EvalResult:
    """Figures of at least one greedy sample."""
    rewards, right = rewards_of(samples), correctness(samples)
    return EvalResult(
        name=name,
        step=step,
        version=version,
        reward_mean=fmean(rewards) if rewards else None,
        reward_stderr=stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
        greedy_accuracy=None if right is None else fmean(right),
        n=len(samples),
        invalid=len(samples) - len(rewards),
        truncated_fraction=fmean(sample.truncated for sample in samples),
        completion_tokens_mean=fmean(sample.completion_length for sample in samples),
        duration_s=duration_s,
    )


class EvalSchedule:
    """Evaluates a run's versions on held-out prompts when due.

    Args:
        sampling: of training; `[eval]` may override `max_new_tokens`.
    """

    def __init__(
        self, spec: RunSpec, source: PromptSource, scorer: Scorer, rollout: RolloutContext, *, sampling: SamplingParams
    ) -> None:
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        self._spec, self._source, self._scorer, self._rollout = spec, source, scorer, rollout
        self._sampling = msgspec.structs.replace(sampling, max_new_tokens=limit)

    async def if_due(self, step: int, version: PolicyVersion, *, training: SampleCollector | None) -> dict[str, float]:
        """Figures if an evaluation is due (before the first step, every `eval.every_steps`, after the last), else none.

        An evaluation of the same weights in the ledger is not repeated.

        Args:
            step: batches committed before `version`.
            training: the collector of training samples, which is paused meanwhile.
        """
        every = self._spec.eval.every_steps
        if not (step in (0, self._spec.trainer.steps) or (every and step % every == 0)):
            return {}
        prompts = list(self._source.held_out(self._spec.eval.prompts))
        known = self._rollout.ledger.evaluations.get(step)
        if known is not None and (known.result.version, known.result.n) == (version, len(prompts)):
            self._log_again(step, known, prompts)
            return _figures(known.result)
        return _figures(await self._evaluate(step, version, prompts, training)) if prompts else {}

    async def _evaluate(
        self, step: int, version: PolicyVersion, prompts: Sequence[Prompt], training: SampleCollector | None
    ) -> EvalResult:
        rollout = self._rollout
        with rollout.span(EVALUATION, step=step) as fields:
            async with training.paused() if training else nullcontext():
                evaluation = await evaluate(
                    step=step,
                    version=version,
                    prompts=prompts,
                    rollout=rollout,
                    scorer=self._scorer,
                    sampling=self._sampling,
                    seed=self._spec.run.seed,
                )
            fields |= _fields(evaluation.result)
        rollout.telemetry.samples(step, evaluation.samples, prompts)
        await rollout.ledger.record_evaluation(evaluation.result, evaluation.samples)
        return evaluation.result

    def _log_again(self, step: int, known: Evaluated, prompts: Sequence[Prompt]) -> None:
        """Log an evaluation again whose lines were removed by a resume from an earlier checkpoint."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        samples = [sample for sample in known.samples if sample.sample_id.prompt_id in by_id]
        if samples:
            self._rollout.telemetry.samples(step, samples, [by_id[s.sample_id.prompt_id] for s in samples])
        self._rollout.telemetry.event(EVALUATION, step=step, recovered=True, **_fields(known.result))


def _measures(result: EvalResult) -> dict[str, float]:
    """Mean reward, its standard error and accuracy, without those that are None."""
    found = {
        "reward_mean": result.reward_mean,
        "reward_stderr": result.reward_stderr,
        "greedy_accuracy": result.greedy_accuracy,
    }
    return {name: value for name, value in found.items() if value is not None}


def _fields(result: EvalResult) -> dict[str, Any]:
    """Fields of the event."""
    return {
        **_measures(result),
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
    }


def _figures(result: EvalResult) -> dict[str, float]:
    """Metrics of the step."""
    found = {f"{HELD_OUT}{name}": value for name, value in _measures(result).items()}
    return found | {"eval/n": float(result.n), "time_eval_s": result.duration_s}
