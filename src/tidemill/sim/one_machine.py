"""Simulates a recipe on this machine: the run's controller in virtual time, with parts that share the cores."""

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
    Record,
    SampleId,
    StepMetrics,
    WorkerReport,
)
from tidemill.hardware.measured_profile import MeasuredEngine, MeasuredTrainer, Packing
from tidemill.hardware.run_profile import RunProfile
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
from tidemill.sim.workload import BlankCompletions, Completions, SimulatedPrompts, SimulatedScorer, Workload


class ContinuedLengths(Record):
    """Observed completion lengths; truncated ones continue with a constant probability to end at each token.

    Implements `hardware.completion_lengths.Lengths`.
    """

    ended: tuple[tuple[int, float], ...]  # (tokens, fraction of completions with at most this length), both increasing
    limit: int  # length of the truncated ones
    rate: float  # probability that a token is the last

    def quantile(self, share: float) -> int:
        for tokens, reached in self.ended:
            if share <= reached:
                return tokens
        reached = self.ended[-1][1] if self.ended else 0.0
        left = (1 - share) / (1 - reached)  # fraction of the truncated ones that are longer
        if not 0 < self.rate < 1:
            return self.limit + (0 if self.rate else round(1e6))
        return self.limit + max(1, math.ceil(math.log(left) / math.log1p(-self.rate)))


def continued(lengths: dict[int, int], cut: dict[int, int]) -> ContinuedLengths:
    """Build the distribution of lengths.

    Args:
        lengths: number of completions by length; at least one.
        cut: of these, the number truncated by a limit.
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
    """(training, evaluation); equal if the run had no evaluations."""
    prompt = max(1, round(profile["prompt_tokens"]))
    training = Workload(lengths=continued(profile.lengths, profile.cut), prompt_tokens=prompt)
    if not profile.held_out_lengths:
        return training, training
    return training, Workload(lengths=continued(profile.held_out_lengths, {}), prompt_tokens=prompt)


def length_of(training: Workload, held_out: Workload, sample_id: SampleId) -> int:
    work = training if sample_id.purpose == "train" else held_out
    return max(1, work.length(sample_id))


class OneMachine:
    """The components of a run that share a machine; build it inside the virtual loop.

    Implements `core.protocols.WorkerHost`.
    """

    def __init__(self, spec: RunSpec, profile: RunProfile, completions: Completions, clock: Clock) -> None:
        self._spec, self._profile, self._completions, self._clock = spec, profile, completions, clock
        # GPUs are not shared, and the processes of a remote cluster have their own machines.
        shares = profile.machine.device == "cpu" and not (spec.runtime == "ray" and spec.ray.address)
        self._cores = Cores(profile.machine.cores if shares else math.inf, clock)
        self._compute = VirtualThread(self._cores)  # of the trainer and its engine
        self.controller = VirtualThread(self._cores)
        self._engine = measured_engine(spec, profile)
        self.weights = WeightCosts(publish_s=profile["publish_s"], pull_s=profile["pull_s"], swap_s=profile["swap_s"])
        self._uplink = Uplink(math.inf, math.inf, clock)
        self._call_s = profile["call_s"]
        self._workers: list[DistantWorker] = []
        self._engines: list[SteppedEngine] = []

    def local(self) -> Worker:
        """The trainer's engine."""
        return self._worker(LOCAL, LOCAL, self._compute, None)

    def trainer(self) -> LearningTrainer:
        return _SharingTrainer(self._spec, self._profile, self._compute, self._cores, self._clock, self._call_s)

    async def start(self, lease: Lease) -> Worker:
        """Start a worker; workers in the process share its one thread."""
        await self._cores.work(self._profile["boot_s"])
        apart = self._spec.runtime != "inprocess"
        compute = VirtualThread(self._cores) if apart else self._compute
        source = CountedWeights(self.weights, self._clock, self._uplink)
        return self._worker(lease.worker_id, lease.lease_id, compute, source)

    @property
    def generated(self) -> int:
        """Tokens generated by all engines."""
        return sum(engine.status().tokens_generated for engine in self._engines)

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _worker(self, worker_id: str, lease_id: str, compute: VirtualThread, source: CountedWeights | None) -> Worker:
        engine = SteppedEngine(
            self._engine,
            self._completions,
            budget_tokens=self._spec.engine.prefill_chunk_tokens,
            swap_s=0.0 if source is None else self.weights.swap_s,
            spend=compute.spend,
            keep_cache=self._spec.schedule.keeps_cache,
        )
        worker = DistantWorker(
            engine,
            compute,
            call_s=self._call_s,
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
        return worker


class DistantWorker(EngineWorker):
    """A worker with message latency in both directions."""

    def __init__(self, engine: SteppedEngine, compute: VirtualThread, *, call_s: float, **settings: Any) -> None:
        super().__init__(engine, compute, **settings)
        self._call_s = call_s

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await asyncio.sleep(self._call_s)
        await super().submit(requests)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await asyncio.sleep(self._call_s)
        await super().abort(sample_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        report = await super().next_report(timeout_s)
        if report is not None:
            await asyncio.sleep(self._call_s)
        return report


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


def measured_engine(spec: RunSpec, profile: RunProfile) -> MeasuredEngine:
    """The configured engine at the measured speed."""
    return MeasuredEngine(
        slots=spec.engine.slots,
        pass_s=profile["engine_pass_s"],
        row_s=profile["engine_row_s"],
        context_token_s=profile["engine_context_token_s"],
        drawn_s=profile["engine_drawn_s"],
        prefill_token_s=profile["engine_prefill_token_s"],
        new_prompt_share=profile["prompt_new_share"],
        new_by_depth=profile.new_by_depth if spec.engine.kind == "embedded" else (),
        boot_s=profile["boot_s"],
    )


def measured_trainer(spec: RunSpec, profile: RunProfile) -> MeasuredTrainer:
    """The configured trainer at the measured speed."""
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
        microbatch_tokens=batch.microbatch_budget,
        minibatches=batch.minibatches,
        epochs=batch.epochs,
        waits=spec.algorithm.whiten,
        checkpoint=profile["checkpoint_s"],
    )


def simulate_recipe(spec: RunSpec, profile: RunProfile, *, watch: Callable[[], None] | None = None) -> SimulatedRun:
    """Simulate a run of the recipe on the machine of the profile. Deterministic.

    Args:
        watch: called repeatedly, also while virtual time stands still; an exception that it raises ends the
            simulation.

    Raises:
        UserError: no worker ever generates.
        KeyboardInterrupt: Ctrl-C.
    """
    return run_virtual(_interruptible(_simulate(spec, profile)), watch=watch)


async def _interruptible(simulation: Coroutine[Any, Any, SimulatedRun]) -> SimulatedRun:
    """Ctrl-C cancels the task; an error during the cleanup must not replace the interrupt."""
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
    """A clock that starts at 0; implements `core.clock.Clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._origin_s = clock, clock.now()

    def now(self) -> float:
        return self._clock.now() - self._origin_s


async def _simulate(spec: RunSpec, profile: RunProfile) -> SimulatedRun:
    clock = LoopClock()
    provider: Provider | None = None
    pool = spec.pool
    if isinstance(pool, RayPool):  # real nodes are assumed to stay
        # A local cluster has as many workers as cores, less the trainer's.
        workers = pool.max_workers if spec.ray.address else min(pool.max_workers, max(1, profile.machine.cores - 1))
        pool = StaticPool(workers=workers)
    if spec.is_elastic:
        price = spec.fleet.preemptible_usd_per_hour
        provider = build_provider(pool, price_usd_per_hour=price, clock=clock, session=1)
    if spec.runtime == "ray":  # machines come and go from the start, while cluster and trainer are starting
        await asyncio.sleep(profile["start_s"])
    recording = Recording(_Since(clock))
    training, held_out = workloads(profile)
    machine = OneMachine(spec, profile, BlankCompletions(partial(length_of, training, held_out)), clock)
    trainer, local = machine.trainer(), machine.local()
    source = SimulatedPrompts(
        spec.batch.prompts,
        different=training.different_prompts,
        prompt_tokens=training.prompt_tokens,
        held_out=min(spec.eval.prompts, round(profile["held_out_prompts"]) or spec.eval.prompts),
    )
    parts = SimulatedComponents(
        local=local,
        slots=spec.engine.slots,
        local_slots=spec.engine.slots,
        trainer=trainer,
        scorer=SimulatedScorer(
            lambda _: profile["controller_sample_s"],
            lambda trajectory: training.reward(trajectory.sample_id),
            spend=machine.controller.work,  # on the controller's thread, one after another
        ),
        source=source,
        checkpoints=SimulatedCheckpoints(SimulatedDisk(), trainer, measured_trainer(spec, profile)),
        provider=provider,
        host=machine if provider else None,
        publisher=SimulatedPublisher(machine.weights) if provider else None,
        eval_sets=source.eval_sets(spec.eval),
    )
    try:
        result = await drive(spec, parts, recording, clock)
    finally:
        await local.close()
        await machine.close()
    return recording.run(
        spec, result, trainer.learned, shares_gpus=True, put_back_tokens=0, generated=machine.generated
    )
