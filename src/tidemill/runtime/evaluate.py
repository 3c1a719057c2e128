"""`tidemill eval` in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.evaluation import Evaluation, correct
from tidemill.controller.evaluation import evaluate as evaluate_prompts
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import sampling_params
from tidemill.controller.rollout import Rollout
from tidemill.core.clock import LoopClock
from tidemill.core.records import PolicyVersion, Prompt
from tidemill.models.loading import weights_digest
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.machinery import scorers
from tidemill.runtime.parts import Parts, load_parts
from tidemill.runtime.rewards import check_reward_models
from tidemill.telemetry.silent import SilentTelemetry


def evaluate(
    spec: RunSpec, *, model_folder: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Greedy accuracy of a model on the task's held-out prompts, and every completion.

    Args:
        model_folder: a model or checkpoint instead of the configured one.

    Raises:
        UserError: a fault of the input.
    """
    check_reward_models(spec, progress=progress)
    parts = load_parts(spec, progress=progress, folder=model_folder)
    evaluation, prompts = asyncio.run(_evaluate(parts, progress))
    result = evaluation.result
    return {
        "greedy_accuracy": result.greedy_accuracy,
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
        "duration_s": result.duration_s,
        "model": parts.spec.model.source,
        "weights_digest": result.version.digest,
        "samples": [
            {"prompt": prompt.text, "completion": sample.text, "answer": prompt.answer, "correct": correct(sample)}
            for prompt, sample in zip(prompts, evaluation.samples, strict=True)
        ],
    }


async def _evaluate(parts: Parts, progress: Callable[[str], None]) -> tuple[Evaluation, list[Prompt]]:
    spec, clock = parts.spec, LoopClock()
    task = parts.task()
    prompts = list(task.source.held_out())[: spec.eval.prompts]
    version = PolicyVersion(number=0, digest=weights_digest(parts.model))
    async with AsyncExitStack() as stack:
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        engine = parts.engine(version, prompt_tokens=task.longest_prompt_tokens)
        worker = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s)
        stack.push_async_callback(worker.close)
        scorer, eval_scorer = scorers(spec, task, compute)
        stack.push_async_callback(scorer.close)
        stack.push_async_callback(eval_scorer.close)
        telemetry = SilentTelemetry(progress)
        fleet = Fleet(worker, slots=spec.engine.slots, clock=clock, telemetry=telemetry)
        await stack.enter_async_context(fleet)
        rollout = Rollout(
            fleet=fleet,
            ledger=Ledger(None),
            scorer=scorer,
            codec=parts.codec,
            telemetry=telemetry,
            clock=clock,
            stop=asyncio.Event(),
        )
        sampling = sampling_params(spec, parts.codec, task.default_stop_strings)
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        evaluation = await evaluate_prompts(
            step=0,
            version=version,
            prompts=prompts,
            rollout=rollout,
            scorer=eval_scorer,
            sampling=msgspec.structs.replace(sampling, max_new_tokens=limit),
            seed=spec.run.seed,
        )
    return evaluation, prompts
