"""One life of the controller, among everything that its plan has for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tests.fault_simulation.components import (
    EventLog,
    WatchedJournal,
    WatchedLedger,
    WatchedScorer,
    WatchedTrainer,
    reward_of,
)
from tests.fault_simulation.invariants import Violation, Witness, require
from tests.fault_simulation.machine import Machine
from tests.fault_simulation.mailbox import OverheardFleet
from tests.fault_simulation.pulled_weights import PromptCompute, PulledBytes, PullingWorker, StoredPublisher
from tests.fault_simulation.scenario import Blow, LifePlan, Scenario
from tests.fault_simulation.training_invariants import Lessons
from tests.memory_journal import PowerCut
from tidemill.config.schema import RunSpec
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, TidemillError
from tidemill.core.protocols import LoopClock, Worker
from tidemill.core.records import Lease, LeaseEvent, WorkerReport
from tidemill.sim.costs import ConstantEngine
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulated_trainer import SimulatedCheckpoints, SimulatedDisk
from tidemill.sim.simulated_worker import SimulatedWorker
from tidemill.sim.workload import Completions, NoText, SimulatedPrompts
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import MemoryTransport, corrupt, torn
from tidemill.weights.store import WeightStore

LONG_S = 3600.0
"""Of the run's time: one that is not over by then never ends."""

TIMEOUTS = Timeouts(
    notice_s=5.0,
    worker_s=20.0,
    pool_s=300.0,
    scorer_s=30.0,
    trainer_s=100.0,
    stop_s=5.0,
    load_s=100.0,
    checkpoint_s=60.0,
)
HEARTBEAT_S = 1.0


class Blown(Exception):
    """What a scorer, a provider or an engine raises when its time has come."""


class ToldProvider:
    """Implements `core.protocols.Provider`: says what the machines tell it to."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self._events: asyncio.Queue[LeaseEvent | Exception] = asyncio.Queue()

    def tell(self, event: LeaseEvent | Exception) -> None:
        self._events.put_nowait(event)

    def want(self, workers: int) -> None:
        pass

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    async def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    async def close(self) -> None:
        pass


class World:
    """Everything around the controller in one of its lives; made and lived in a virtual loop."""

    def __init__(
        self,
        scenario: Scenario,
        life: LifePlan,
        disk: SimulatedDisk,
        witness: Witness,
        lessons: Lessons,
        completions: Completions,
    ) -> None:
        self._scenario, self._life, self._disk = scenario, life, disk
        self._witness, self._lessons, self._completions = witness, lessons, completions
        self._spec: RunSpec = witness.spec
        self._timers: list[asyncio.TimerHandle] = []
        self._unseen: list[str] = []  # exceptions that nobody took
        self._stop = asyncio.Event()
        clock = LoopClock()
        self.log = EventLog(clock, lessons)
        self._transport = MemoryTransport(zero_copy=False)
        self._transport.delay_s = scenario.fetch_s
        for kind, is_torn, reads in life.spoiled:
            self._transport.spoil(kind, torn if is_torn else corrupt, times=reads)
        rng = random.Random(life.seed)
        self.machines = {
            f"lease-{plan.name}": Machine(plan, self, random.Random(rng.getrandbits(32))) for plan in life.machines
        }
        self.provider = ToldProvider()
        self.journal = WatchedJournal(
            disk.journal,
            witness,
            power_cut_after=life.journal_bytes if life.blow == "power cut" else None,
            seconds=life.journal_s,
        )
        self._scorer = WatchedScorer(lessons, seconds=scenario.score_s, reward=reward_of)
        self._trainer = WatchedTrainer(scenario.trainer, lessons, salt=life.salt)
        self.reserved = SimulatedWorker(
            SimulatedEngine(scenario.engine, completions, now_s=clock.now()),
            clock=clock,
            worker_id="local",
            lease_id="local",
            source=None,
            tick_s=scenario.tick_s,
        )
        elastic = scenario.elastic
        self.fleet = OverheardFleet(
            self.reserved if scenario.reserved else None,
            slots=scenario.engine.slots,
            clock=clock,
            telemetry=self.log,
            config=self._spec.fleet,
            timeouts=TIMEOUTS,
            provider=self.provider if elastic else None,
            host=self if elastic else None,
            publisher=StoredPublisher(WeightStore(self._transport, compute=PromptCompute()), lessons, seconds=0.05)
            if elastic
            else None,
            heartbeat_timeout_s=scenario.heartbeat_timeout_s,
        )

    async def live(self) -> LoopResult | None:
        """To the end that the plan allows; None when it was not the run's own.

        Raises:
            Violation: the controller did what it must never do, or ended as it must not.
        """
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._unseen.append(str(context)))
        for machine in self.machines.values():
            machine.offer()
        if self._life.blow is not None:
            self.after(self._life.blow_s, lambda: self._strike(self._life.blow))
        try:
            async with asyncio.timeout(LONG_S):
                result = await self._run()
        except TimeoutError as error:
            raise Violation(f"the run did not end in {LONG_S:g} s") from error
        except PowerCut:
            result = None
        except (Blown, TidemillError) as error:
            require(self._allows(error), f"the run ended with {error!r}")
            result = None
        finally:
            await self._tidy()
        return self._judge(result)

    async def _run(self) -> LoopResult:
        spec = self._spec
        ledger = WatchedLedger(self.journal, self._witness, self._lessons, round_size=spec.batch.prompts)
        checkpoints = SimulatedCheckpoints(self._disk, self._trainer, self._scenario.trainer)
        try:
            async with self.fleet:
                return await train_loop(
                    spec=spec,
                    source=prompts_of(self._scenario, spec),
                    fleet=self.fleet,
                    trainer=self._trainer,
                    scorer=self._scorer,
                    eval_scorer=self._scorer,
                    ledger=ledger,
                    checkpoints=checkpoints,
                    telemetry=self.log,
                    codec=NoText(),
                    clock=LoopClock(),
                    stop=self._stop,
                    timeouts=TIMEOUTS,
                )
        finally:
            self._disk.journal = self.journal.disk

    def _judge(self, result: LoopResult | None) -> LoopResult | None:
        self._check_leases(finished=result is not None)
        if result is None or (result.interrupted and self._life.blow == "stop"):
            return None
        self._lessons.finished(result)
        right = self.journal.accepted
        said = result.tokens_generated
        require(said == right, f"the run says that it generated {said} tokens, and {right} were accepted")
        return result

    def _allows(self, error: Exception) -> bool:
        """Whether the plan accounts for this end."""
        if isinstance(error, Blown):
            return True
        if isinstance(error, DeadlineError):
            return self._life.blow == "scorer hangs"
        return "attempts to generate" in str(error) and any(machine.breaking for machine in self.machines.values())

    def _strike(self, blow: Blow | None) -> None:
        if blow == "stop":
            self._stop.set()
        elif blow == "scorer raises":
            self._scorer.broken = Blown("the reward model is on fire")
        elif blow == "scorer hangs":
            self._scorer.hangs = True
        elif blow == "provider raises":
            self.provider.tell(Blown("no credits left"))
        elif blow == "reserved engine dies":
            self.reserved.fail(Blown("engine on fire"))

    async def _tidy(self) -> None:
        for timer in self._timers:
            timer.cancel()
        await self.reserved.close()
        for _ in range(5):
            await asyncio.sleep(0)
        left = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        require(not left, f"tasks were left behind: {sorted(left)}")
        require(not self._unseen, f"nobody saw {self._unseen}")

    def _check_leases(self, *, finished: bool) -> None:
        """Every lease that began has ended, once, and whom its provider did not take it got back."""
        told = self.log.named
        begun = [fields["lease"] for fields in told("lease")]
        require(len(set(begun)) == len(begun), f"leases began twice: {begun}")
        ended = {fields["lease"]: fields for fields in told("lease_end")}
        require(len(ended) == len(told("lease_end")), "leases ended twice")
        require(set(begun) == ended.keys() - {"local"}, f"of the leases {begun} there ended {sorted(ended)}")
        evicted = [fields["lease"] for fields in told("eviction")]
        right = {lease for lease, end in ended.items() if end["evicted"]}
        # A controller that dies may have read of an end, and not have told what it came to.
        told_of = set(evicted) == right if finished else set(evicted) <= right
        require(told_of and len(set(evicted)) == len(evicted), f"evictions of {sorted(evicted)} are told, not {right}")
        for lease_id, machine in self.machines.items():
            if lease_id in ended and machine.line is not None:
                require(machine.line.killed, f"nobody told {lease_id} that it is over")
            if lease_id in ended:
                back = ended[lease_id]["cause"] not in ("taken away", "the run ended")
                require((lease_id in self.provider.released) == back, f"{lease_id} was not given back as it should be")

    # What machines need of it, and the fleet: the world is the host of its machines.

    async def start(self, lease: Lease) -> Worker:
        machine = self.machines[lease.lease_id]

        def worker(costs: ConstantEngine) -> SimulatedWorker:
            clock = LoopClock()
            puller = Puller(self._transport, PromptCompute(), clock=clock, timeout_s=60.0)
            return PullingWorker(
                SimulatedEngine(costs, self._completions, now_s=clock.now()),
                clock=clock,
                worker_id=lease.worker_id,
                lease_id=lease.lease_id,
                tick_s=self._scenario.tick_s,
                heartbeat_s=HEARTBEAT_S,
                bytes_=PulledBytes(puller),
                wrongly=machine.computes_wrongly,
            )

        return await machine.boot(self._scenario.engine, worker)

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
