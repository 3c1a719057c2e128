"""A model that answers prompts and is judged, in one process and outside of any run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from tidemill.controller.collection import collecting
from tidemill.controller.evaluation import Evaluation, evaluate
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight, Plan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import sampling_params
from tidemill.controller.rollout import Rollout
from tidemill.core.clock import LoopClock
from tidemill.core.records import Group, PolicyVersion, Prompt, SamplingParams, Trajectory
from tidemill.envs.text.task import Task
from tidemill.models.loading import weights_digest
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.machinery import scorers
from tidemill.runtime.parts import Parts
from tidemill.telemetry.silent import SilentTelemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Asks one model. What it answers is a function of its weights, the prompt and the run's seed."""

    version: PolicyVersion
    rollout: Rollout  # with the evaluation's scorer: a reward of 1 is a right answer
    sampling: SamplingParams
    seed: int

    async def greedily(self, prompts: Sequence[Prompt]) -> Evaluation:
        """One greedy completion of each prompt; errors as `controller.evaluation.evaluate`."""
        return await evaluate(
            step=0,
            version=self.version,
            prompts=prompts,
            rollout=self.rollout,
            scorer=self.rollout.scorer,
            sampling=self.sampling,
            seed=self.seed,
        )

    async def draw(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, purpose: str) -> list[Group]:
        """So many samples of each prompt, in the order of the prompts; errors as `collecting`.

        Args:
            purpose: names the samples and their random numbers.
        """
        number = self.version.number
        plan = Plan(purpose=purpose, run_seed=self.seed, group_size=samples_per_prompt, sampling=self.sampling)
        in_flight = InFlight(plan, version_number=number)
        in_flight.open(plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=number), prompts)
        drawn: dict[str, list[Trajectory]] = {prompt.prompt_id: [] for prompt in prompts}
        async with collecting(in_flight, self.rollout) as scored:
            async for trajectory in scored:
                drawn[trajectory.sample_id.prompt_id].append(trajectory)
        return [_group(position, prompt_id, drawn[prompt_id]) for position, prompt_id in enumerate(drawn)]


def _group(position: int, prompt_id: str, samples: Sequence[Trajectory]) -> Group:
    ordered = sorted(samples, key=lambda sample: sample.sample_id.index)
    return Group(position=position, prompt_id=prompt_id, trajectories=tuple(ordered))


@asynccontextmanager
async def answering(parts: Parts, task: Task, progress: Callable[[str], None]) -> AsyncIterator[Answering]:
    """Start what answering needs, and stop all of it in the end.

    Raises:
        UserError: a reward that cannot work.
    """
    spec, clock, telemetry = parts.spec, LoopClock(), SilentTelemetry(progress)
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
        fleet = Fleet(worker, slots=spec.engine.slots, clock=clock, telemetry=telemetry)
        await stack.enter_async_context(fleet)
        rollout = Rollout(
            fleet=fleet,
            ledger=Ledger(None),
            scorer=eval_scorer,
            codec=parts.codec,
            telemetry=telemetry,
            clock=clock,
            stop=asyncio.Event(),
            phase="evaluation",
            window_s=math.inf,
        )
        sampling = sampling_params(spec, parts.codec, task.default_stop_strings)
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        yield Answering(
            version=version,
            rollout=rollout,
            sampling=msgspec.structs.replace(sampling, max_new_tokens=limit),
            seed=spec.run.seed,
        )
