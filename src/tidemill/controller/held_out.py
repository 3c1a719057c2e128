"""Evaluation of a run under way: when it is due, what it says, and what an earlier session already found."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.collection import Collection
from tidemill.controller.entries import EvalResult, Evaluated
from tidemill.controller.evaluation import evaluate
from tidemill.controller.rollout import Rollout
from tidemill.core.protocols import PromptSource, Scorer
from tidemill.core.records import PolicyVersion, Prompt, SamplingParams
from tidemill.telemetry.events import EVALUATION
from tidemill.telemetry.metrics import HELD_OUT


class HeldOut:
    """Evaluates a run's versions on held-out prompts.

    Args:
        sampling: as in training, but for the temperature and where `[eval]` says otherwise.
    """

    def __init__(
        self, spec: RunSpec, source: PromptSource, scorer: Scorer, rollout: Rollout, *, sampling: SamplingParams
    ) -> None:
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        self._spec, self._source, self._scorer, self._rollout = spec, source, scorer, rollout
        self._sampling = msgspec.structs.replace(sampling, max_new_tokens=limit)

    async def if_due(self, step: int, version: PolicyVersion, *, training: Collection | None) -> dict[str, float]:
        """Figures before the first step, every so many, and after the last; what is known of these very weights is not
        measured again.

        Args:
            step: batches committed; `version` is what they made.
            training: what is being generated for training, which is paused meanwhile.
        """
        every = self._spec.eval.every_steps
        if not (step in (0, self._spec.trainer.steps) or (every and step % every == 0)):
            return {}
        prompts = list(self._source.held_out())[: self._spec.eval.prompts]
        known = self._rollout.ledger.evaluations.get(step)
        if known is not None and (known.result.version, known.result.n) == (version, len(prompts)):
            self._tell_again(step, known, prompts)
            return _figures(known.result)
        return _figures(await self._evaluate(step, version, prompts, training)) if prompts else {}

    async def _evaluate(
        self, step: int, version: PolicyVersion, prompts: Sequence[Prompt], training: Collection | None
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
        await rollout.ledger.evaluated(evaluation.result, evaluation.samples)
        return evaluation.result

    def _tell_again(self, step: int, known: Evaluated, prompts: Sequence[Prompt]) -> None:
        """Write what the resume dropped of an evaluation beyond the checkpoint."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        samples = [sample for sample in known.samples if sample.sample_id.prompt_id in by_id]
        if samples:
            self._rollout.telemetry.samples(step, samples, [by_id[s.sample_id.prompt_id] for s in samples])
        self._rollout.telemetry.event(EVALUATION, step=step, recovered=True, **_fields(known.result))


def _measures(result: EvalResult) -> dict[str, float]:
    """Mean reward and, where answers are right or wrong, accuracy; without what is not known."""
    found = {
        "reward_mean": result.reward_mean,
        "reward_stderr": result.reward_stderr,
        "greedy_accuracy": result.greedy_accuracy,
    }
    return {name: value for name, value in found.items() if value is not None}


def _fields(result: EvalResult) -> dict[str, Any]:
    """What the event log says of an evaluation."""
    return {
        **_measures(result),
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
    }


def _figures(result: EvalResult) -> dict[str, float]:
    """What a step's metrics say of an evaluation."""
    found = {f"{HELD_OUT}{name}": value for name, value in _measures(result).items()}
    return found | {"eval/n": float(result.n), "time_eval_s": result.duration_s}
