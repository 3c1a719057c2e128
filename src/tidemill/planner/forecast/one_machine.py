"""A recipe on this machine: its own controller in virtual time, among parts that share the machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from tidemill.config.pool import RayPool, StaticPool
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import LOCAL
from tidemill.core.protocols import Clock, LoopClock, Provider, Worker
from tidemill.core.records import (
    GenerateRequest,
    Group,
    Lease,
    Loaded,
    PolicyVersion,
    Prompt,
    Record,
    Reward,
    SampleId,
    StepMetrics,
    Trajectory,
    WorkerReport,
)
from tidemill.hardware.measured_profile import MeasuredEngine, MeasuredTrainer, Packing
from tidemill.planner.calibration.profile import RunProfile
from tidemill.pool.build_provider import build_provider
from tidemill.rollout.worker import EngineWorker
from tidemill.sim.costs import WeightCosts
from tidemill.sim.outcome import Recording, SimulatedRun
from tidemill.sim.simulated_engine import SteppedEngine
from tidemill.sim.simulated_trainer import (
    CountedWeights,
    LearningTrainer,
    SimulatedCheckpoints,
    SimulatedDisk,
    SimulatedPublisher,
    Uplink,
)
from tidemill.sim.simulation import SimulatedComponents, drive
from tidemill.sim.virtual_time import Cores, VirtualThread, run_virtual
from tidemill.sim.workload import BlankCompletions, Completions, SimulatedPrompts, Workload


class ContinuedLengths(Record):
    """As often as they were seen; what a limit cut goes on, and ends with the mean rate of all. Implements
    `hardware.completion_lengths.Lengths`."""

    ended: tuple[tuple[int, float], ...]  # (tokens, share of all completions that long or shorter), both rising
    limit: int  # where the others were cut
    rate: float  # of a token, to be the last

    def quantile(self, share: float) -> int:
        for tokens, reached in self.ended:
            if share <= reached:
                return tokens
        reached = self.ended[-1][1] if self.ended else 0.0
        left = (1 - share) / (1 - reached)  # of the cut ones, those that are longer still
        if not 0 < self.rate < 1:
            return self.limit + (0 if self.rate else round(1e6))
        return self.limit + max(1, math.ceil(math.log(left) / math.log1p(-self.rate)))


def continued(lengths: dict[int, int], cut: dict[int, int]) -> ContinuedLengths:
    """
    Args:
        lengths: how many of each; at least one.
        cut: of these, how many a limit ended.
    """
    count, tokens = sum(lengths.values()), sum(length * number for length, number in lengths.items())
    ended = [(length, number - cut.get(length, 0)) for length, number in sorted(lengths.items())]
    reached = accumulate(number / count for _, number in ended)
    stopped = sum(number for _, number in ended)
    return ContinuedLengths(
        ended=tuple((length, share) for (length, number), share in zip(ended, reached, strict=True) if number),
        limit=max(lengths),
        rate=stopped / tokens if tokens else 1.0,
    )


def workloads(profile: RunProfile) -> tuple[Workload, Workload]:
    """(training, held-out prompts); without evaluations in the run, they are taken to be alike."""
    prompt = max(1, round(profile["prompt_tokens"]))
    training = Workload(lengths=continued(profile.lengths, profile.cut), prompt_tokens=prompt)
    if not profile.held_out_lengths:
        return training, training
    return training, Workload(lengths=continued(profile.held_out_lengths, {}), prompt_tokens=prompt)


def length_of(training: Workload, held_out: Workload, sample_id: SampleId) -> int:
    work = training if sample_id.purpose == "train" else held_out
    return max(1, work.length(sample_id))


class OneMachine:
    """Everything that computes in a run; made within the virtual loop. Implements `core.protocols.WorkerHost`."""

    def __init__(self, spec: RunSpec, profile: RunProfile, completions: Completions, clock: Clock) -> None:
        self._spec, self._profile, self._completions, self._clock = spec, profile, completions, clock
        # GPUs are not shared, and processes of a cluster elsewhere have machines of their own.
        shares = profile.machine.device == "cpu" and not (spec.runtime == "ray" and spec.ray.address)
        self._cores = Cores(profile.machine.cores if shares else math.inf, clock)
        self._compute = VirtualThread(self._cores)  # of the trainer and its engine
        self._controller = VirtualThread(self._cores)
        self._engine = measured_engine(spec, profile)
        self.weights = WeightCosts(publish_s=profile["publish_s"], pull_s=profile["pull_s"], swap_s=profile["swap_s"])
        self._uplink = Uplink(math.inf, math.inf, clock)
        self._call_s = profile["call_s"]
        self._workers: list[EngineWorker] = []
        self._engines: list[SteppedEngine] = []

    def local(self) -> Worker:
        """The trainer's own engine."""
        return self._worker(LOCAL, LOCAL, self._compute, None)

    def trainer(self) -> LearningTrainer:
        return _SharingTrainer(self._spec, self._profile, self._compute, self._cores, self._clock, self._call_s)

    async def start(self, lease: Lease) -> Worker:
        """An in-process worker takes its turns on the one thread of all."""
        await self._cores.work(self._profile["boot_s"])
        apart = self._spec.runtime != "inprocess"
        compute = VirtualThread(self._cores) if apart else self._compute
        source = CountedWeights(self.weights, self._clock, self._uplink)
        return self._worker(lease.worker_id, lease.lease_id, compute, source)

    @property
    def generated(self) -> int:
        """Tokens that engines made."""
        return sum(engine.status().tokens_generated for engine in self._engines)

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Everything that the controller does for a sample, on its thread."""
        await self._controller.work(self._profile["controller_sample_s"])

    def _worker(self, worker_id: str, lease_id: str, compute: VirtualThread, source: CountedWeights | None) -> Worker:
        engine = SteppedEngine(
            self._engine,
            self._completions,
            budget_tokens=self._spec.engine.prefill_chunk_tokens,
            swap_s=0.0 if source is None else self.weights.swap_s,
            spend=compute.spend,
        )
        worker = EngineWorker(
            engine,
            compute,
            clock=self._clock,
            tick_s=self._spec.engine.tick_s,
            worker_id=worker_id,
            lease_id=lease_id,
            source=source,
            heartbeat_s=self._spec.fleet.heartbeat_s,
            timer=lambda: compute.spent_s,
        )
        self._workers.append(worker)
        self._engines.append(engine)
        return DistantWorker(worker, self._call_s)


class DistantWorker:
    """Implements `core.protocols.Worker` around one that messages take a while to reach, there and back."""

    def __init__(self, worker: EngineWorker, call_s: float) -> None:
        self._worker, self._call_s = worker, call_s

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await asyncio.sleep(self._call_s)
        await self._worker.submit(requests)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await asyncio.sleep(self._call_s)
        await self._worker.abort(sample_ids)

    async def load(self, version: PolicyVersion) -> Loaded:
        return await self._worker.load(version)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        report = await self._worker.next_report(timeout_s)
        if report is not None:
            await asyncio.sleep(self._call_s)
        return report

    async def close(self) -> None:
        await self._worker.close()

    def kill(self) -> None:
        self._worker.kill()


class _SharingTrainer(LearningTrainer):
    """Learns on the thread that its engine generates on."""

    def __init__(
        self, spec: RunSpec, profile: RunProfile, compute: VirtualThread, cores: Cores, clock: Clock, call_s: float
    ) -> None:
        self._measured = measured_trainer(spec, profile)
        super().__init__(self._measured, clock=clock, gpus=compute.turn, spend=cores.work)
        self._call_s = call_s

    async def accumulate(self, group: Group) -> None:
        await asyncio.sleep(self._call_s)
        await super().accumulate(group)

    async def commit(self, step: int) -> StepMetrics:
        await asyncio.sleep(self._call_s)
        metrics = await super().commit(step)
        packed, pairs = self._measured.take_counts()
        told = {"tokens_packed": packed, "pairs_packed": pairs}
        return msgspec.structs.replace(metrics, values={**metrics.values, **told})


class SharedScorer:
    """Implements `core.protocols.Scorer`: judging is the controller's own work, one sample after another."""

    def __init__(self, machine: OneMachine, reward: Callable[[Trajectory], Reward]) -> None:
        self._machine, self._reward = machine, reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        await self._machine.score(prompt, trajectory)
        return self._reward(trajectory)

    async def close(self) -> None:
        pass


def measured_engine(spec: RunSpec, profile: RunProfile) -> MeasuredEngine:
    """The engine that a recipe configures, at the speed that was measured."""
    return MeasuredEngine(
        slots=spec.engine.slots,
        pass_s=profile["engine_pass_s"],
        row_s=profile["engine_row_s"],
        context_token_s=profile["engine_context_token_s"],
        drawn_s=profile["engine_drawn_s"],
        prefill_token_s=profile["engine_prefill_token_s"],
        new_prompt_share=profile["prompt_new_share"],
        boot_s=profile["boot_s"],
    )


def measured_trainer(spec: RunSpec, profile: RunProfile) -> MeasuredTrainer:
    """The trainer that a recipe configures, at the speed that was measured."""
    batch = spec.batch
    return MeasuredTrainer(
        step_s=profile["train_step_s"],
        token_s=profile["train_token_s"],
        pair_s=profile["train_pair_s"],
        first_s=profile["train_first_s"],
        packing=Packing(
            prompt_tokens=profile["packed_prompt_tokens"],
            new_by_depth=profile.new_by_depth,
            learned_share=profile["learned_share"],
        ),
        batch_groups=batch.prompts,
        microbatch_tokens=batch.microbatch_tokens,
        minibatches=batch.minibatches,
        epochs=batch.epochs,
        waits=spec.algorithm.whiten,
        checkpoint=profile["checkpoint_s"],
    )


def simulate_recipe(spec: RunSpec, profile: RunProfile, *, watch: Callable[[], None] | None = None) -> SimulatedRun:
    """A run of the recipe on the machine of the profile; equal arguments, equal logs.

    Args:
        watch: called again and again meanwhile, also where no time passes; what it raises ends the simulation.

    Raises:
        UserError: nobody ever generates.
        KeyboardInterrupt: Ctrl-C.
    """
    return run_virtual(_interruptible(_simulate(spec, profile)), watch=watch)


async def _interruptible(simulation: Coroutine[Any, Any, SimulatedRun]) -> SimulatedRun:
    """Ctrl-C cancels the task, and what ends then may fail in its own way: that must not hide why it ended."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    try:
        run = await simulation
    except Exception:
        if task.cancelling():
            raise asyncio.CancelledError from None
        raise
    if task.cancelling():
        raise asyncio.CancelledError
    return run


class _Since:
    """Implements `core.clock.Clock` from a moment on."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._origin_s = clock, clock.now()

    def now(self) -> float:
        return self._clock.now() - self._origin_s


async def _simulate(spec: RunSpec, profile: RunProfile) -> SimulatedRun:
    clock = LoopClock()
    provider = _provider(spec, clock, cores=profile.machine.cores)
    if spec.runtime == "ray":  # whose machines come and go from the beginning, while cluster and trainer start
        await asyncio.sleep(profile["start_s"])
    recording = Recording(_Since(clock))
    training, held_out = workloads(profile)
    machine = OneMachine(spec, profile, BlankCompletions(partial(length_of, training, held_out)), clock)
    trainer, local = machine.trainer(), machine.local()
    parts = SimulatedComponents(
        local=local,
        slots=spec.engine.slots,
        local_slots=spec.engine.slots,
        trainer=trainer,
        scorer=SharedScorer(machine, lambda trajectory: training.reward(trajectory.sample_id)),
        source=SimulatedPrompts(
            spec.batch.prompts,
            different=training.different_prompts,
            prompt_tokens=training.prompt_tokens,
            held_out=min(spec.eval.prompts, round(profile["held_out_prompts"]) or spec.eval.prompts),
        ),
        checkpoints=SimulatedCheckpoints(SimulatedDisk(), trainer, measured_trainer(spec, profile)),
        provider=provider,
        host=machine if provider else None,
        publisher=SimulatedPublisher(machine.weights) if provider else None,
    )
    try:
        result = await drive(spec, parts, recording, clock)
    finally:
        await local.close()
        await machine.close()
    return SimulatedRun(
        result=result,
        events=tuple(recording.events),
        metrics=tuple(recording.metrics),
        digest=recording.digest,
        learned=tuple(trainer.learned),
        reserved_usd_per_hour=spec.fleet.reserved_usd_per_hour,
        shares_gpus=True,
        put_back=0,
        put_back_tokens=0,
        generated=machine.generated,
    )


def _provider(spec: RunSpec, clock: Clock, *, cores: int) -> Provider | None:
    """The recipe's own machines, on the recipe's own timetable; real nodes are taken to stay."""
    pool = spec.pool
    if isinstance(pool, RayPool):
        # Of a cluster made on this machine there are as many as cores, less the trainer's.
        pool = StaticPool(workers=pool.max_workers if spec.ray.address else min(pool.max_workers, max(1, cores - 1)))
    if isinstance(pool, StaticPool) and not pool.workers:
        return None
    return build_provider(pool, price_usd_per_hour=spec.fleet.preemptible_usd_per_hour, clock=clock, session=1)
