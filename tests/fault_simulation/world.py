"""One life of the controller with its simulated components and faults."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.doubles.costs import ConstantEngine
from tests.doubles.journal import PowerCut
from tests.doubles.provider import EventProvider
from tests.doubles.transport import FaultyTransport, corrupt, torn
from tests.fault_simulation.acting import SimulatedEnvironments, TurnEngine
from tests.fault_simulation.components import (
    EventLog,
    WatchedCheckpoints,
    WatchedJournal,
    WatchedLedger,
    WatchedScorer,
    WatchedTrainer,
    reward_of,
)
from tests.fault_simulation.guarding import Disk, PlannedGuard, SimulatedGold
from tests.fault_simulation.invariants import Invariants, Violation, require
from tests.fault_simulation.machine import Machine
from tests.fault_simulation.mailbox import ObservedFleet
from tests.fault_simulation.part_faults import PartFaultTransport, ShuffledThreads
from tests.fault_simulation.pulled_weights import (
    PromptCompute,
    PulledBytes,
    PullingWorker,
    RankRows,
    StoredPublisher,
)
from tests.fault_simulation.ranks import WatchedGroup, WatchedPublisher, ranks_of_life
from tests.fault_simulation.scenario import LifePlan, RunFault, Scenario
from tests.fault_simulation.training_invariants import TrainingInvariants
from tests.fault_simulation.worker_ranks import RankedBytes, RankedEngine, RankedTurnEngine, RankedWorker, RankSteps
from tidemill.config.schema import RunSpec
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.run import TrainingRun
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, GuardStop, RollBack, TidemillError
from tidemill.core.evidence import MachineHealth
from tidemill.core.protocols import Checkpoints, LoopClock, Publisher, Trainer, Worker
from tidemill.core.records import Lease, LeaseEvent, WorkerReport
from tidemill.runtime.cluster.ray_trainer import RayTrainer
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulated_trainer import START
from tidemill.sim.simulated_worker import SimulatedWorker
from tidemill.sim.workload import Completions, NoText, SimulatedPrompts
from tidemill.weights.node_folder import SHARED_MEMORY, NodeFolder, NodePuller, forget_snapshots
from tidemill.weights.puller import Puller, PullerGroup
from tidemill.weights.store import WeightStore

LONG_S = 3600.0
"""Virtual seconds after which a run counts as hung."""

TIMEOUTS = Timeouts(
    notice_s=5.0,
    worker_s=20.0,
    pool_s=300.0,
    scorer_s=30.0,
    act_s=100.0,
    trainer_s=100.0,
    stop_s=5.0,
    load_s=100.0,
    checkpoint_s=60.0,
)
HEARTBEAT_S = 1.0
LATE_REPORTS_S = 12.0
"""Reports of a lost worker arrive, and events are read, for so long."""


class InjectedError(Exception):
    """Raised by a scorer, a provider or an engine as a planned fault."""


class World:
    """All components around the controller in one life; created and run in a virtual loop."""

    def __init__(
        self,
        scenario: Scenario,
        life: LifePlan,
        disk: Disk,
        invariants: Invariants,
        training: TrainingInvariants,
        completions: Completions,
        *,
        steps: int,
    ) -> None:
        self._scenario, self._life, self._disk = scenario, life, disk
        self._invariants, self._training, self._completions = invariants, training, completions
        trainer = invariants.spec.trainer.model_copy(update={"steps": steps})
        self._spec: RunSpec = invariants.spec.model_copy(update={"trainer": trainer})
        if invariants.tail is not None:
            invariants.tail.steps = steps
        self._timers: list[asyncio.TimerHandle] = []
        self._unseen: list[str] = []  # unretrieved exceptions
        self._pulling = PromptCompute()
        self._wrong: list[str] = []  # versions that a worker used with other bytes than those published
        self._stop = asyncio.Event()
        self.decided: RollBack | GuardStop | None = None  # the guard ended this life
        self.ended_s = 0.0
        self._salt = life.salt + " amended" * disk.rollbacks
        clock = LoopClock()
        self.log = EventLog(clock, training)
        self._transports = [self._transport_of(life, rank) for rank in range(life.ranks)]
        rng = random.Random(life.seed)
        self.machines = {
            f"lease-{plan.name}": Machine(plan, self, random.Random(rng.getrandbits(32))) for plan in life.machines
        }
        self.ranked: dict[str, RankedWorker] = {}  # by lease
        self._memory = Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix="tidemill-faults-"))  # of all nodes
        self.provider = EventProvider()
        self.journal = WatchedJournal(
            disk.journal,
            invariants,
            power_cut_after=life.journal_bytes if life.fault == "power cut" else None,
            seconds=life.journal_s,
        )
        self._scorer = WatchedScorer(training, seconds=scenario.score_s, reward=reward_of)
        self._group = self._start_ranks() if life.ranks > 1 else None
        self._trainer, self._checkpoints = self._make_trainer(self._group)
        self._environments = self._make_environments(random.Random(f"environments {life.seed}"))
        self.reserved = SimulatedWorker(
            self._engine(scenario.engine),
            clock=clock,
            worker_id="local",
            lease_id="local",
            source=None,
            tick_s=scenario.tick_s,
        )
        elastic = scenario.elastic
        self.fleet = ObservedFleet(
            self.reserved if scenario.reserved else None,
            slots=scenario.engine.slots,
            clock=clock,
            telemetry=self.log,
            config=self._spec.fleet,
            timeouts=TIMEOUTS,
            provider=self.provider if elastic else None,
            host=self if elastic else None,
            publisher=self._make_publisher(self._group) if elastic else None,
            heartbeat_timeout_s=scenario.heartbeat_timeout_s,
        )

    def _transport_of(self, life: LifePlan, rank: int) -> FaultyTransport:
        transport = PartFaultTransport([fault for fault in life.part_faults if fault.rank % life.ranks == rank])
        transport.delay_s = self._scenario.fetch_s
        for kind, is_torn, reads in life.spoiled:
            transport.spoil(kind, torn if is_torn else corrupt, times=reads)
        return transport

    def _start_ranks(self) -> WatchedGroup:
        size = len(self._transports)
        return ranks_of_life(
            [
                RankRows(index, size, each, threads=self._threads(f"rank {index}"), seconds=0.05)
                for index, each in enumerate(self._transports)
            ],
            costs=self._scenario.trainer,
            training=self._training,
            salt=self._salt,
            disk=self._disk,
            saved=self._invariants.saved,
            fault=self._life.rank_fault,
        )

    def _make_trainer(self, group: WatchedGroup | None) -> tuple[Trainer, Checkpoints]:
        if group is None:
            trainer = WatchedTrainer(self._scenario.trainer, self._training, salt=self._salt)
            return trainer, WatchedCheckpoints(self._disk, trainer, self._scenario.trainer, self._invariants)
        remote = RayTrainer(group, START, warn=self._unseen.append)
        return remote, remote

    def _make_publisher(self, group: WatchedGroup | None) -> Publisher:
        if group is not None:
            return WatchedPublisher(group, self._training)
        store = WeightStore(self._transports[0], compute=PromptCompute(), threads=self._threads("trainer"))
        return StoredPublisher(store, self._training, seconds=0.05)

    def _threads(self, owner: str) -> ShuffledThreads:
        return ShuffledThreads(random.Random(f"threads {self._life.seed} {owner}"))

    def _engine(self, costs: ConstantEngine) -> SimulatedEngine:
        if self._scenario.agent:
            return TurnEngine(costs, self._invariants, now_s=LoopClock().now())
        return SimulatedEngine(costs, self._completions, now_s=LoopClock().now())

    def _make_environments(self, rng: random.Random) -> SimulatedEnvironments | None:
        if not self._scenario.agent:
            return None
        errors = [InjectedError("the environment is on fire"), asyncio.CancelledError()] if self._life.fault else []
        return SimulatedEnvironments(self._invariants, rng, errors)

    def _make_guard(self) -> PlannedGuard | None:
        guarding = self._invariants.guarding
        if guarding is None:
            return None
        gold = SimulatedGold(guarding.plan, guarding, random.Random(f"gold {self._life.seed}"))
        return PlannedGuard(self._spec, gold, guarding.test(again=self._disk.rollbacks > 0))

    async def live(self) -> LoopResult | None:
        """Run this life; return the result, or None if a planned fault or the guard ended it.

        Raises:
            Violation: an invariant does not hold, or the life ended unexpectedly.
        """
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._unseen.append(str(context)))
        for machine in self.machines.values():
            machine.offer()
        if self._life.fault is not None:
            self.after(self._life.fault_s, lambda: self._inject(self._life.fault))
        for at_s in self._life.tainted_s:
            self.after(at_s, self._taint)
        try:
            async with asyncio.timeout(LONG_S):
                result = await self._run()
        except TimeoutError as error:
            raise Violation(f"the run did not end in {LONG_S:g} s") from error
        except PowerCut:
            result = None
        except (RollBack, GuardStop) as error:
            require(self._scenario.guard is not None, f"the run ended with {error!r}")
            self.decided, result = error, None
        except (InjectedError, TidemillError) as error:
            require(self._allows(error), f"the run ended with {error!r}")
            result = None
        finally:
            self.ended_s = LoopClock().now()
            await self._clean_up()
        return self._judge(result)

    async def _run(self) -> LoopResult:
        spec = self._spec
        ledger = WatchedLedger(self.journal, self._invariants, self._training, round_size=spec.round_groups)
        guard = self._make_guard()
        try:
            async with self.fleet:
                rollout = RolloutContext(
                    fleet=self.fleet,
                    ledger=ledger,
                    scorer=self._scorer,
                    codec=NoText(),
                    telemetry=self.log,
                    clock=LoopClock(),
                    stop=self._stop,
                    timeouts=TIMEOUTS,
                    truncated=spec.scoring.truncated,
                    environments=self._environments,
                    agent=self._scenario.agent.limits if self._scenario.agent else None,
                    gives_up=False,  # machines may die every few seconds until the rescue comes
                )
                run = TrainingRun(
                    spec=spec,
                    rollout=rollout,
                    source=prompts_of(self._scenario, spec),
                    trainer=self._trainer,
                    eval_scorer=self._scorer,
                    checkpoints=self._checkpoints,
                    guard=guard,
                    rollbacks=self._disk.rollbacks,
                )
                return await train_loop(run)
        finally:
            if guard is not None:
                await guard.close()
            self._disk.journal = self.journal.disk

    def _judge(self, result: LoopResult | None) -> LoopResult | None:
        self._check_leases(finished=result is not None)
        if result is None or (result.interrupted and self._life.fault == "stop"):
            return None
        self._training.finished(result, self._spec.trainer.steps)
        if self._invariants.guarding is not None:
            self._invariants.guarding.finished(self._invariants.durable, self._disk.rollbacks)
        if self._environments is not None:
            self._invariants.finished(self._environments.open)
        right = self.journal.accepted
        said = result.tokens_generated
        require(said == right, f"the run reports {said} generated tokens, accepted were {right}")
        return result

    def _allows(self, error: Exception) -> bool:
        """Whether the plan allows this error."""
        if isinstance(error, InjectedError):
            return True
        if self._group is not None and self._group.allows(error):
            return True
        if isinstance(error, DeadlineError):
            return self._life.fault == "scorer hangs"
        if "cancelled its own answer" in str(error):
            return self._scenario.agent is not None and self._life.fault is not None
        return "attempts to generate" in str(error) and any(machine.breaking for machine in self.machines.values())

    def _inject(self, fault: RunFault | None) -> None:
        if fault == "stop":
            self._stop.set()
        elif fault == "scorer raises":
            self._scorer.broken = InjectedError("the reward model is on fire")
        elif fault == "scorer hangs":
            self._scorer.hangs = True
        elif fault == "provider raises":
            self.provider.tell(InjectedError("no credits left"))
        elif fault == "reserved engine dies":
            self.reserved.fail(InjectedError("engine on fire"))

    def _taint(self) -> None:
        """A worker turns out to have computed wrongly."""
        in_flight, tail = self._invariants.in_flight, self._invariants.tail
        used = {lease for sample in in_flight or () for (_, lease), _ in sample.source_starts}
        # The rescue may be the only machine that is left.
        leases = sorted(lease for lease in used if lease in self.machines and not lease.endswith("rescue"))
        if not leases or tail is None:
            return
        lease = random.Random(f"tainted {self._life.seed} {LoopClock().now()}").choice(leases)
        tail.tainted = tail.was_tainted = True
        self.fleet.finds(
            MachineHealth(
                lease_id=lease,
                worker_id=lease,
                machine=lease,
                state="quarantined",
                cause="it computes wrongly",
                wrong=True,
            )
        )

    async def _clean_up(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._group is not None:
            self._group.kill()
        await self.reserved.close()
        for worker in self.ranked.values():
            worker.kill()
        for _ in range(5):
            await asyncio.sleep(0)
        for node in self._memory.iterdir():
            await forget_snapshots("run", parent=node)
        left = [str(path.relative_to(self._memory)) for path in self._memory.glob("*/**/*")]
        shutil.rmtree(self._memory)
        require(not left, f"files of versions remain: {left}")
        left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        require(not left, f"tasks remain: {sorted(left)}")
        require(not self._unseen, f"nobody saw {self._unseen}")
        require(self._life.damages or not self._pulling.damage, f"nothing was damaged, but {self._pulling.damage}")
        require(not self._wrong, f"workers used other weights than those published: {self._wrong}")

    def _check_leases(self, *, finished: bool) -> None:
        """Check that every lease ended once, and that machines which were not evicted were released."""
        told = self.log.named
        begun = [fields["lease"] for fields in told("lease")]
        require(len(set(begun)) == len(begun), f"leases began twice: {begun}")
        ended = {fields["lease"]: fields for fields in told("lease_end")}
        require(len(ended) == len(told("lease_end")), "leases ended twice")
        require(set(begun) == ended.keys() - {"local"}, f"of leases {begun} ended {sorted(ended)}")
        evicted = [fields["lease"] for fields in told("eviction")]
        right = {lease for lease, end in ended.items() if end["evicted"]}
        # A controller that dies may have read the end of a lease without logging it.
        told_of = set(evicted) == right if finished else set(evicted) <= right
        require(told_of and len(set(evicted)) == len(evicted), f"logged evictions {sorted(evicted)}, expected {right}")
        quarantined = {fields["lease"] for fields in told("quarantine")}
        wrong = {lease for lease, machine in self.machines.items() if machine.computes_wrongly}
        require(quarantined <= wrong, f"workers of {quarantined - wrong} computed with other bytes than were published")
        ends_s = {fields["lease"]: at_s for at_s, name, fields in self.log.lines if name == "lease_end"}
        for lease_id, worker in self.ranked.items():
            until_s = worker.blocked_s + self._longest_block_s(worker, self.machines[lease_id])
            end_s = min(ends_s.get(lease_id, math.inf), self.ended_s)
            require(end_s <= until_s, f"{lease_id} ended at {end_s:.1f} s, a rank failed at {worker.blocked_s:.1f} s")
        for lease_id, machine in self.machines.items():
            invalid = lease_id in ended and "invalid delta" in ended[lease_id]["cause"]
            require(machine.breaking or not invalid, f"{lease_id}, without such a fault, {ended.get(lease_id)}")
            if lease_id in ended and machine.line is not None:
                require(machine.line.killed, f"worker of {lease_id} was not stopped")
            if lease_id in ended:
                back = ended[lease_id]["cause"] not in ("evicted", "the run ended")
                require((lease_id in self.provider.released) == back, f"{lease_id} was not released as expected")

    def _longest_block_s(self, worker: RankedWorker, machine: Machine) -> float:
        """Time within which a rank that a call waits for ends the lease."""
        hangs = worker.fault is None or worker.fault.kind == "hangs" or "hangs" in machine.applied
        noticed_s = math.inf if hangs or worker.fault is None else worker.fault.noticed_s
        silence_s = max(self._scenario.heartbeat_timeout_s, self._spec.fleet.join_timeout_s)
        return min(noticed_s, silence_s) + LATE_REPORTS_S

    # The interfaces `Surroundings` and `WorkerHost`.

    async def start(self, lease: Lease) -> Worker:
        machine = self.machines[lease.lease_id]
        more: dict[str, Any] = {
            "clock": LoopClock(),
            "worker_id": lease.worker_id,
            "lease_id": lease.lease_id,
            "tick_s": self._scenario.tick_s,
            "heartbeat_s": HEARTBEAT_S,
            "wrongly": machine.computes_wrongly,
        }

        def worker(costs: ConstantEngine) -> SimulatedWorker:
            if machine.plan.ranks:
                return self._ranked_worker(machine, costs, more)
            threads = self._threads(lease.lease_id)
            pullers = [
                Puller(each, self._pulling, clock=LoopClock(), threads=threads, timeout_s=60.0)
                for each in self._transports
            ]
            bytes_ = PulledBytes(pullers[0] if len(pullers) == 1 else PullerGroup(pullers), self._wrong)
            return PullingWorker(self._engine(costs), bytes_=bytes_, **more)

        return await machine.boot(self._scenario.engine, worker)

    def _ranked_worker(self, machine: Machine, costs: ConstantEngine, more: dict[str, Any]) -> RankedWorker:
        threads, parent = self._threads(machine.lease_id), self._memory / f"node-{machine.plan.node}"
        parent.mkdir(exist_ok=True)
        pullers = [
            NodePuller(
                each,
                self._pulling,
                clock=LoopClock(),
                threads=threads,
                timeout_s=60.0,
                folder=NodeFolder("run", rank=rank, parent=parent),
            )
            for rank, each in enumerate(self._transports)
        ]
        now_s = LoopClock().now()
        engine: RankSteps
        if self._scenario.agent:
            engine = RankedTurnEngine(costs, self._invariants, now_s=now_s)
        else:
            engine = RankedEngine(costs, self._completions, now_s=now_s)
        worker = RankedWorker(
            engine,
            size=machine.plan.ranks,
            faults=machine.plan.rank_faults,
            after=self.after,
            rng=random.Random(f"ranks {self._life.seed} {machine.plan.name}"),
            bytes_=RankedBytes(pullers, pullers[0] if len(pullers) == 1 else PullerGroup(pullers), self._wrong),
            wrong=self._wrong,
            **more,
        )
        self.ranked[machine.lease_id] = worker
        return worker

    async def close(self) -> None:
        pass

    def after(self, seconds: float, happens: Callable[[], object]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, happens))

    def tell(self, event: LeaseEvent) -> None:
        self.provider.tell(event)

    def arrives_late(self, report: WorkerReport) -> bool:
        read = report.lease_id not in self.fleet and report.lease_id not in self.fleet.unread_ends
        if read:
            self.fleet.arrives_late([report])
        return read


def prompts_of(scenario: Scenario, spec: RunSpec) -> SimulatedPrompts:
    return SimulatedPrompts(
        spec.batch.prompts, different=scenario.different_prompts, prompt_tokens=3, held_out=spec.eval.prompts
    )
