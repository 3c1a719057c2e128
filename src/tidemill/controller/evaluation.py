"""Evaluation on held-out prompts: generating and scoring samples, its figures, and its schedule during a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.collector import SampleCollector, collect_samples
from tidemill.controller.entries import EvalResult, Evaluated
from tidemill.controller.in_flight import InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.core.errors import UserError
from tidemill.core.protocols import PromptSource, Scorer
from tidemill.core.records import PolicyVersion, Prompt, SamplingParams, Trajectory
from tidemill.telemetry.events import EVALUATION
from tidemill.telemetry.metrics import EVAL_TIME, HELD_OUT_NAME, PASS_AT, held_out_prefix
from tidemill.telemetry.statistics import mean_pass_at_k, reward_interval


def drawn_purpose(name: str) -> str:
    """Purpose of the samples for pass@k; part of the sample ids, which seed the random numbers."""
    return f"eval:{name}:drawn"


async def draw(
    *,
    version: PolicyVersion,
    prompts: Sequence[Prompt],
    rollout: RolloutContext,
    sampling: SamplingParams,
    seed: int,
    purpose: str,
    samples_per_prompt: int,
) -> list[tuple[Trajectory, ...]]:
    """Generate and score samples of each prompt: in the order of the prompts, by index. Errors as `collect_samples`."""
    plan = SamplingPlan(
        purpose=purpose, run_seed=seed, group_size=samples_per_prompt, sampling=sampling, agent=rollout.agent
    )
    in_flight = InFlight(plan, version_number=version.number)
    groups = plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=version.number)
    in_flight.open(groups, prompts)
    drawn: dict[str, list[Trajectory]] = {prompt.prompt_id: [] for prompt in prompts}
    async with collect_samples(in_flight, rollout) as scored:
        async for trajectory in scored:
            drawn[trajectory.sample_id.prompt_id].append(trajectory)
    return [tuple(sorted(samples, key=lambda each: each.sample_id.index)) for samples in drawn.values()]


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
    samples_per_prompt: int = 0,
    ks: Sequence[int] = (),
) -> Evaluated:
    """Generate and score one greedy completion per prompt in their order, then `samples_per_prompt` samples.

    Nothing is journalled; an interrupted evaluation is repeated.

    Args:
        step: batches committed before `version`, which the worker must have loaded.
        rollout: its ledger and scorer are not used.
        scorer: may differ from the training reward.
        sampling: of the drawn samples; greedy completions use it with temperature 0.
        ks: values of k for pass@k of the drawn samples.

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
        frozen_scoring=None,
        observers=(),
        truncated="trained",
        phase="evaluation",
        window_s=math.inf,
    )
    if rollout.agent is not None and rollout.agent.opens:  # clients are for training; here the model answers once
        rollout = replace(rollout, environments=None, agent=None)
    greedy = msgspec.structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    generate = partial(draw, version=version, prompts=prompts, rollout=rollout, seed=seed)
    started_s = rollout.clock.now()
    samples = [one for (one,) in await generate(sampling=greedy, purpose=f"eval:{name}", samples_per_prompt=1)]
    drawn = list[tuple[Trajectory, ...]]()
    if samples_per_prompt:
        drawn = await generate(sampling=sampling, purpose=drawn_purpose(name), samples_per_prompt=samples_per_prompt)
    result = eval_result(name, step, version, samples, rollout.clock.now() - started_s, drawn=drawn, ks=ks)
    return Evaluated(result, (*samples, *(sample for group in drawn for sample in group)))


def rewards_of(samples: Iterable[Trajectory]) -> list[float]:
    """Values of the valid rewards."""
    return [sample.reward.value for sample in samples if sample.reward is not None and sample.reward.valid]


def is_correct(trajectory: Trajectory) -> bool:
    """Whether the completion is correct; a completion without a valid reward is not."""
    reward = trajectory.reward
    return reward is not None and reward.valid and reward.correct is True


def correctness(samples: Sequence[Trajectory]) -> list[bool] | None:
    """Whether each completion is correct; None if a valid reward does not tell, or none is valid.

    A sample without a valid reward is incorrect.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None and sample.reward.valid]
    if not rewards or any(reward.correct is None for reward in rewards):
        return None
    return [is_correct(sample) for sample in samples]


def counts_correct(drawn: Sequence[Sequence[Trajectory]]) -> list[tuple[int, int]] | None:
    """(samples, correct samples) of each prompt; None if rewards are graded."""
    if correctness([sample for samples in drawn for sample in samples]) is None:
        return None
    return [(len(samples), sum(map(is_correct, samples))) for samples in drawn]


def prompt_rewards(drawn: Sequence[Sequence[Trajectory]]) -> list[float | None]:
    """Mean valid reward of each prompt's samples; None if none is valid."""
    rewards = [rewards_of(samples) for samples in drawn]
    return [fmean(each) if each else None for each in rewards]


def eval_result(
    name: str,
    step: int,
    version: PolicyVersion,
    samples: Sequence[Trajectory],
    duration_s: float,
    *,
    drawn: Sequence[Sequence[Trajectory]] = (),
    ks: Sequence[int] = (),
) -> EvalResult:
    """Figures of at least one greedy sample, and of the samples drawn of each prompt."""
    rewards, right = rewards_of(samples), correctness(samples)
    ends = reward_interval(rewards).ends
    counts, drawn_rewards = counts_correct(drawn), [each for each in prompt_rewards(drawn) if each is not None]
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
        completion_tokens_mean=fmean(sample.trained_length for sample in samples),
        duration_s=duration_s,
        samples_per_prompt=len(drawn[0]) if drawn else 0,
        pass_at={k: mean_pass_at_k(counts, k).value for k in ks} if counts else {},
        drawn_reward_mean=fmean(drawn_rewards) if drawn_rewards else None,
        reward_interval=(ends[0], ends[1]) if ends else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSchedule:
    """Evaluates a run's versions when due: on the task's held-out prompts, then on every other set."""

    spec: RunSpec
    source: PromptSource
    scorer: Scorer
    rollout: RolloutContext
    sampling: SamplingParams  # of training; `[eval]` may override `max_new_tokens`
    sets: Mapping[str, Sequence[Prompt]]  # the prompts of `eval.sets`, by name

    async def if_due(self, step: int, version: PolicyVersion, *, training: SampleCollector | None) -> dict[str, float]:
        """Figures if an evaluation is due (before the first step, every `eval.every_steps`, after the last), else none.

        An evaluation of the same weights in the ledger is not repeated.

        Args:
            step: batches committed before `version`.
            training: the collector of training samples, which is paused meanwhile.
        """
        config = self.spec.eval
        every, limit = config.every_steps, config.max_new_tokens or self.sampling.max_new_tokens
        if not (step in (0, self.spec.trainer.steps) or (every and step % every == 0)):
            return {}
        held_out = list(self.source.held_out(config.prompts))
        figures: dict[str, float] = {}
        async with AsyncExitStack() as pause:
            for name, prompts in {HELD_OUT_NAME: held_out, **self.sets}.items():
                known = self.rollout.ledger.evaluations.get((step, name))
                expected = (version, len(prompts), config.samples_per_prompt)
                if known and (known.result.version, known.result.n, known.result.samples_per_prompt) == expected:
                    # The lines that a resume from an earlier checkpoint removed are logged again.
                    result = known.result
                    self._log_samples(step, known.samples, prompts)
                    self.rollout.telemetry.event(EVALUATION, step=step, recovered=True, **_fields(result))
                elif prompts:
                    with self.rollout.span(EVALUATION, step=step) as fields:
                        if training is not None:
                            await pause.enter_async_context(training.paused())
                            training = None  # paused until the block ends
                        evaluation = await evaluate(
                            step=step,
                            version=version,
                            prompts=prompts,
                            rollout=self.rollout,
                            scorer=self.scorer,
                            sampling=msgspec.structs.replace(self.sampling, max_new_tokens=limit),
                            seed=self.spec.run.seed,
                            name=name,
                            samples_per_prompt=config.samples_per_prompt,
                            ks=config.ks,
                        )
                        fields |= _fields(evaluation.result)
                    result = evaluation.result
                    self._log_samples(step, evaluation.samples, prompts)
                    await self.rollout.ledger.record_evaluation(result, evaluation.samples)
                else:
                    continue
                prefix, measures = held_out_prefix(name), {**_measures(result), "n": float(result.n)}
                figures |= {f"{prefix}{measure}": value for measure, value in measures.items()}
                figures[EVAL_TIME] = figures.get(EVAL_TIME, 0.0) + result.duration_s
        return figures

    def _log_samples(self, step: int, samples: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        known = [sample for sample in samples if sample.sample_id.prompt_id in by_id]
        if known:
            self.rollout.telemetry.samples(step, known, [by_id[sample.sample_id.prompt_id] for sample in known])


def _measures(result: EvalResult) -> dict[str, float]:
    """Mean reward, its standard error, accuracy, and figures of drawn samples, without those that are None."""
    measures = {
        "reward_mean": result.reward_mean,
        "reward_stderr": result.reward_stderr,
        "greedy_accuracy": result.greedy_accuracy,
        **{f"{PASS_AT}{k}": share for k, share in result.pass_at.items()},
        "drawn_reward_mean": result.drawn_reward_mean,
    }
    return {name: value for name, value in measures.items() if value is not None}


def _fields(result: EvalResult) -> dict[str, Any]:
    """Fields of the event; `set` is the name, unless the prompts are the task's."""
    return {
        **({} if result.name == HELD_OUT_NAME else {"set": result.name}),
        **_measures(result),
        **({"reward_mean_interval": list(result.reward_interval)} if result.reward_interval else {}),
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
    }
