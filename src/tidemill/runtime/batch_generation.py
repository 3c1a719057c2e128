"""A model that answers prompts and is scored, outside of any run; finished answers are kept for a resume."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tidemill.controller.collector import RolloutContext, collect_samples
from tidemill.controller.evaluation import HELD_OUT_NAME, Evaluation, eval_result, evaluate
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import sampling_params
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Group, PolicyVersion, Prompt, Record, SamplingParams, Trajectory, decode_json
from tidemill.envs.text.prompts import Task
from tidemill.models.loading import weights_digest
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import scorers
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import ModelBundle
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.recorder import NullTelemetry


class CachedCompletions(Record):
    """A line of the file: some prompts, whole."""

    key: str  # what was asked, and of whom
    duration_s: float
    samples: tuple[Trajectory, ...]


class CompletionCache:
    """A file of answered prompts; without a path nothing is kept. A context manager that closes.

    Raises:
        UserError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self._writer = JsonlWriter(path) if path else None  # which cuts a torn last line
        self._known = {one.key: one for one in _lines(path)} if path else {}

    def find(self, key: str) -> CachedCompletions | None:
        return self._known.get(key)

    def add(self, answered: CachedCompletions) -> None:
        """
        Raises:
            UserError: the disk is full.
        """
        self._known[answered.key] = answered
        if self._writer:
            self._writer.write(answered)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()


def key_of(asked: Sequence[object], prompts: Iterable[Prompt]) -> str:
    """Names these prompts, in this order, asked in this way.

    Args:
        asked: everything else that decides the answers: the weights' digest, the seed, how samples are drawn.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode([asked, [prompt.prompt_id for prompt in prompts]]))
    return digest.hexdigest()


def _lines(path: Path) -> Iterable[CachedCompletions]:
    """Every line that can be read; one that cannot is answered again."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot be read: {error}", where=str(path), hint="delete it") from error
    for line in lines:
        try:
            yield decode_json(line, CachedCompletions)
        except msgspec.DecodeError:
            continue


SAMPLES_AT_ONCE = 512
"""Asked together, and kept together: what a stop costs at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGenerator:
    """Asks one model. What it answers is a function of its weights, the prompt and the run's seed."""

    version: PolicyVersion
    rollout: RolloutContext  # with the evaluation's scorer
    sampling: SamplingParams
    seed: int
    answers: CompletionCache

    async def greedily(self, prompts: Sequence[Prompt]) -> Evaluation:
        """One greedy completion of each prompt; errors as `controller.evaluation.evaluate`."""
        samples, duration_s = list[Trajectory](), 0.0
        for some in _chunks(prompts, SAMPLES_AT_ONCE):
            key = key_of([self.version.digest, self.seed, HELD_OUT_NAME, self.sampling], some)
            answered = self.answers.find(key) or await self._ask_greedily(key, some)
            samples += answered.samples
            duration_s += answered.duration_s
        return Evaluation(
            result=eval_result(HELD_OUT_NAME, 0, self.version, samples, duration_s), samples=tuple(samples)
        )

    async def draw(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        purpose: str,
        told: Callable[[int], None] = lambda _: None,
    ) -> list[Group]:
        """So many samples of each prompt, in the order of the prompts; errors as `collecting`.

        Args:
            purpose: names the samples and their random numbers.
            told: how many prompts are answered, from time to time.
        """
        samples = list[Trajectory]()
        for some in _chunks(prompts, max(1, SAMPLES_AT_ONCE // samples_per_prompt)):
            key = key_of([self.version.digest, self.seed, purpose, samples_per_prompt, self.sampling], some)
            answered = self.answers.find(key) or await self._draw(key, some, samples_per_prompt, purpose)
            samples += answered.samples
            told(len(samples) // samples_per_prompt)
        return [
            Group(
                position=position,
                prompt_id=prompt.prompt_id,
                trajectories=tuple(samples[position * samples_per_prompt : (position + 1) * samples_per_prompt]),
            )
            for position, prompt in enumerate(prompts)
        ]

    async def _ask_greedily(self, key: str, prompts: Sequence[Prompt]) -> CachedCompletions:
        found = await evaluate(
            step=0,
            version=self.version,
            prompts=prompts,
            rollout=self.rollout,
            scorer=self.rollout.scorer,
            sampling=self.sampling,
            seed=self.seed,
        )
        return self._kept(CachedCompletions(key=key, duration_s=found.result.duration_s, samples=found.samples))

    async def _draw(
        self, key: str, prompts: Sequence[Prompt], samples_per_prompt: int, purpose: str
    ) -> CachedCompletions:
        number, began_s = self.version.number, self.rollout.clock.now()
        plan = SamplingPlan(purpose=purpose, run_seed=self.seed, group_size=samples_per_prompt, sampling=self.sampling)
        in_flight = InFlight(plan, version_number=number)
        in_flight.open(plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=number), prompts)
        drawn: dict[str, list[Trajectory]] = {prompt.prompt_id: [] for prompt in prompts}
        async with collect_samples(in_flight, self.rollout) as scored:
            async for trajectory in scored:
                drawn[trajectory.sample_id.prompt_id].append(trajectory)
        samples = [one for of_prompt in drawn.values() for one in sorted(of_prompt, key=lambda s: s.sample_id.index)]
        duration_s = self.rollout.clock.now() - began_s
        return self._kept(CachedCompletions(key=key, duration_s=duration_s, samples=tuple(samples)))

    def _kept(self, answered: CachedCompletions) -> CachedCompletions:
        self.answers.add(answered)
        return answered


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Of no prompts, one without any: whoever asks says what is wrong."""
    for first in range(0, len(prompts) or 1, size):
        yield prompts[first : first + size]


@asynccontextmanager
async def batch_generator(
    bundle: ModelBundle, task: Task, progress: Callable[[str], None], *, kept_in: Path | None = None
) -> AsyncIterator[BatchGenerator]:
    """Start what answering needs, and stop all of it in the end.

    Args:
        kept_in: a file of what was answered before under the same configuration, which is not asked again; None keeps
            nothing.

    Raises:
        UserError: a reward that cannot work.
    """
    spec, clock, telemetry = bundle.spec, LoopClock(), NullTelemetry(progress)
    version = PolicyVersion(number=0, digest=weights_digest(bundle.model))
    async with AsyncExitStack() as stack:
        answers = stack.enter_context(CompletionCache(kept_in))
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        engine = bundle.engine(version, prompt_tokens=task.longest_prompt_tokens)
        worker = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s)
        stack.push_async_callback(worker.close)
        scorer, eval_scorer = scorers(spec, task, compute)
        stack.push_async_callback(scorer.close)
        stack.push_async_callback(eval_scorer.close)
        fleet = Fleet(worker, slots=spec.engine.slots, clock=clock, telemetry=telemetry)
        await stack.enter_async_context(fleet)
        rollout = RolloutContext(
            fleet=fleet,
            ledger=Ledger(None),
            scorer=eval_scorer,
            codec=bundle.codec,
            telemetry=telemetry,
            clock=clock,
            stop=asyncio.Event(),
            phase="evaluation",
            window_s=math.inf,
        )
        sampling = sampling_params(spec, bundle.codec, task.default_stop_strings)
        limit = spec.eval.max_new_tokens or sampling.max_new_tokens
        yield BatchGenerator(
            version=version,
            rollout=rollout,
            sampling=msgspec.structs.replace(sampling, max_new_tokens=limit),
            seed=spec.run.seed,
            answers=answers,
        )
