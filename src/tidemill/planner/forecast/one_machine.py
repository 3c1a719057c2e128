"""The parts of a run that shares one machine, in virtual time: in-process engines and trainer take turns on one thread,
Ray's processes have one each, and all of them share the machine's cores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import LOCAL
from tidemill.core.clock import Clock
from tidemill.core.protocols import Worker
from tidemill.core.records import (
    GenerateRequest,
    Group,
    Lease,
    Loaded,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    StepMetrics,
    Trajectory,
    WorkerReport,
)
from tidemill.planner.calibration.profile import RunProfile
from tidemill.rollout.worker import EngineWorker
from tidemill.sim.completions import Completions
from tidemill.sim.cores import Cores, VirtualThread
from tidemill.sim.costs import ConstantWeights
from tidemill.sim.profiles.measured import MeasuredEngine, MeasuredTrainer, Packing
from tidemill.sim.stepped import SteppedEngine
from tidemill.sim.trainer import LearningTrainer
from tidemill.sim.uplink import Uplink
from tidemill.sim.weights import CountedWeights


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
        self.weights = ConstantWeights(publish=profile["publish_s"], pull=profile["pull_s"], swap=profile["swap_s"])
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
            swap_s=0.0 if source is None else self.weights.swap,
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
