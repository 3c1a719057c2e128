"""Runs the real controller in virtual time with simulated components.

```
 spec, cost_model, lengths, timetable ──▶ simulate_run ──▶ SimulatedRun: logs as a real run writes them, and cost
```
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.run import TrainingRun
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.formatting import counted
from tidemill.core.protocols import (
    Checkpoints,
    Clock,
    LoopClock,
    PromptSource,
    Provider,
    Publisher,
    Scorer,
    Trainer,
    Worker,
    WorkerHost,
)
from tidemill.core.records import Prompt, Record, SampleId
from tidemill.pool.provider import ScheduledProvider, Timetable
from tidemill.sim.costs import EngineCosts, TrainerCosts, WeightCosts
from tidemill.sim.outcome import Recording, SimulatedRun
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.simulated_trainer import LearningTrainer, SimulatedCheckpoints, SimulatedDisk, SimulatedPublisher
from tidemill.sim.simulated_worker import FinalReportProvider, SimulatedHost, SimulatedWorker
from tidemill.sim.virtual_time import run_virtual
from tidemill.sim.workload import BlankCompletions, NoText, SimulatedPrompts, SimulatedScorer, Workload
from tidemill.telemetry.events import DECODE, JOIN, LEASE
from tidemill.telemetry.fleet_figures import HOUR_S

LONG_S = 1e9
DAY_S = 86_400.0
TIMEOUTS = Timeouts(notice_s=3600.0, worker_s=LONG_S, pool_s=DAY_S, scorer_s=LONG_S, trainer_s=LONG_S, load_s=LONG_S)
"""Simulated engines never hang: only missing machines end a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedComponents:
    """The components around the controller; created within the virtual loop."""

    local: Worker | None  # the trainer's engine
    slots: int
    local_slots: int
    trainer: Trainer
    scorer: Scorer
    source: PromptSource
    checkpoints: Checkpoints
    provider: Provider | None = None
    host: WorkerHost | None = None
    publisher: Publisher | None = None
    eval_sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)


async def drive(
    spec: RunSpec,
    components: SimulatedComponents,
    recording: Recording,
    clock: Clock,
    *,
    seconds: float = math.inf,
    make_fleet: Callable[..., Fleet] = Fleet,
) -> LoopResult:
    """Run the real fleet and training loop with simulated components.

    Raises:
        UserError: no engine ever generates, or no step finishes in time.
    """
    fleet = make_fleet(
        components.local,
        slots=components.slots,
        local_slots=components.local_slots,
        clock=clock,
        telemetry=recording,
        config=spec.fleet,
        timeouts=TIMEOUTS,
        provider=components.provider,
        host=components.host,
        publisher=components.publisher,
        heartbeat_timeout_s=math.inf,
    )
    stop = asyncio.Event()
    if seconds < math.inf:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    try:
        async with fleet:
            rollout = RolloutContext(
                fleet=fleet,
                ledger=Ledger(None, round_size=spec.round_groups),
                scorer=components.scorer,
                codec=NoText(),
                telemetry=recording,
                clock=clock,
                stop=stop,
                timeouts=TIMEOUTS,
                truncated=spec.scoring.truncated,
            )
            run = TrainingRun(
                spec=spec,
                rollout=rollout,
                source=components.source,
                trainer=components.trainer,
                eval_scorer=components.scorer,
                checkpoints=components.checkpoints,
                eval_sets=components.eval_sets,
            )
            result = await train_loop(run)
    except DeadlineError as error:
        raise _starved(recording, clock.now()) from error
    if not recording.metrics:
        raise _starved(recording, clock.now(), in_time=True)
    return result


def _starved(recording: Recording, now_s: float, *, in_time: bool = False) -> UserError:
    """Explain why no step finished.

    Args:
        in_time: the time limit ended the run, not the wait for a machine.
    """
    hours, steps = f"{now_s / HOUR_S:.3g} h", counted(len(recording.metrics), "step")
    machines = sum(event["event"] == LEASE for event in recording.events)
    joined = sum(event["event"] == JOIN and "error" not in event for event in recording.events)
    generated = any(event["event"] == DECODE for event in recording.events)
    if in_time and generated:
        what, where = f"no step finished within {hours}", "simulation.hours"
        return UserError(what, where=where, hint="simulate for longer, or use smaller batches")
    if joined or generated:
        what = f"the run stalled after {steps}: no engine to generate until the end of {hours}"
        hint = "simulate for longer, let the reserved side generate, or use a pool whose machines return"
    elif machines:
        what = f"no worker ever joined: each of {counted(machines, 'machine')} in {hours} was lost before it was ready"
        hint = "raise fleet.join_timeout_s, make machines boot and pull faster, or let the reserved side generate"
    else:
        what = f"no engine to generate: no machine appeared in {hours}, and the reserved side does not generate"
        hint = "let the reserved side generate, or use a pool that has machines"
    return UserError(what, where="pool", hint=hint)


class SharingWorker(SimulatedWorker):
    """An engine on the trainer's GPUs. Training starts when the engine is idle; requests wait meanwhile."""

    def __init__(self, *positional: Any, clock: Clock, **named: Any) -> None:
        super().__init__(*positional, clock=clock, **named)
        self._now, self._vacated = clock.now, asyncio.Event()

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Reserve the GPUs for the trainer within the block."""
        while True:
            self.engine.advance(self._now())
            if not self.engine.running:
                break
            self._vacated.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.engine.next_change_s()):
                    await self._vacated.wait()
        self.engine.pause(self._now())
        try:
            yield
        finally:
            self.engine.resume(self._now())
            self._wake()

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await super().abort(sample_ids)
        self._vacated.set()


class CostModel(Record):
    """The costs of all components."""

    trainer: TrainerCosts
    weights: WeightCosts
    reserved: EngineCosts | None = None  # all reserved engines, as one
    reserved_load_s: float = 0.0  # time to load a new version
    shares_gpus: bool = True  # reserved engines and trainer alternate on the same GPUs
    streams: bool = True  # train on each complete group; else on the whole batch
    worker: EngineCosts | None = None  # per preemptible machine


class ComponentFactories(Record):
    """Replacement components, for comparisons with other systems."""

    fleet: Callable[..., Fleet] = Fleet
    host: Callable[..., SimulatedHost] = SimulatedHost
    engine: Callable[..., SimulatedEngine] = SimulatedEngine
    tick_s: float = math.inf  # interval of progress reports, in addition to reports of finished samples
    final_report: bool = True  # an evicted worker first reports its tokens; else its samples restart


def simulate_run(
    spec: RunSpec,
    cost_model: CostModel,
    work: Workload,
    timetable: Timetable | None = None,
    *,
    seconds: float = math.inf,
    most_workers: float = math.inf,
    factories: ComponentFactories | None = None,
    tell: Callable[[int, float], None] = lambda step, now_s: None,
) -> SimulatedRun:
    """Simulate `spec.trainer.steps` steps, or `seconds` of virtual time.

    Everything random is seeded by `spec.run.seed` and the timetable: equal arguments give equal logs.

    Args:
        timetable: of the preemptible machines; None: no such machines.
        most_workers: preemptible workers at once.
        factories: replacement components.
        tell: called at the end of each step with its number and the virtual time in seconds.

    Raises:
        UserError: no engine ever generates, no step finishes in time, or the longest sample fits no engine's cache.
    """
    check_cost_model(spec, cost_model, work, elastic=timetable is not None)
    makers = factories or ComponentFactories()
    if spec.schedule.keeps_cache:
        makers = msgspec.structs.replace(makers, engine=partial(makers.engine, keep_cache=True))

    async def simulate() -> SimulatedRun:
        clock = LoopClock()
        recording, completions = Recording(clock, tell), BlankCompletions(work.length)
        local = _reserved(cost_model, completions, clock, makers)
        gpus = local.learning if isinstance(local, SharingWorker) else nullcontext
        trainer = LearningTrainer(cost_model.trainer, clock=clock, gpus=gpus, streams=cost_model.streams)
        host: SimulatedHost | None = None
        provider: Provider | None = None
        if timetable is not None:
            assert cost_model.worker is not None, "a timetable needs the costs of a worker"
            host = makers.host(
                cost_model.worker,
                cost_model.weights,
                completions=completions,
                clock=clock,
                tick_s=makers.tick_s,
                engine_type=makers.engine,
            )
            price = spec.fleet.preemptible_usd_per_hour
            provider = ScheduledProvider(timetable, clock=clock, session=1, price_usd_per_hour=price, most=most_workers)
            if makers.final_report:
                provider = FinalReportProvider(provider, host, tick_s=spec.engine.tick_s)
        engines = [costs for costs in (cost_model.worker, cost_model.reserved) if costs is not None]
        source = SimulatedPrompts(
            spec.batch.prompts,
            different=work.different_prompts,
            prompt_tokens=work.prompt_tokens,
            held_out=min(work.held_out, spec.eval.prompts),
        )
        components = SimulatedComponents(
            local=local,
            slots=engines[0].slots,
            local_slots=engines[-1].slots,
            trainer=trainer,
            scorer=SimulatedScorer(lambda _: 0.0, lambda trajectory: work.reward(trajectory.sample_id)),
            source=source,
            checkpoints=SimulatedCheckpoints(SimulatedDisk(), trainer, cost_model.trainer),
            provider=provider,
            host=host,
            publisher=SimulatedPublisher(cost_model.weights) if host else None,
            eval_sets=source.eval_sets(spec.eval) if work.held_out else {},
        )
        result = await drive(spec, components, recording, clock, seconds=seconds, make_fleet=makers.fleet)
        made = [worker.engine for worker in (*((local,) if local else ()), *(host.workers.values() if host else ()))]
        return recording.run(
            spec,
            result,
            trainer.learned,
            shares_gpus=cost_model.shares_gpus and cost_model.reserved is not None,
            put_back_tokens=sum(engine.recomputed for engine in made),
            generated=sum(engine.generated for engine in made),
        )

    return run_virtual(simulate())


def check_cost_model(spec: RunSpec, cost_model: CostModel, work: Workload, *, elastic: bool) -> None:
    """Raises UserError: there is no engine, or the longest sample does not fit an engine's cache."""
    engines = {"reserved engines": cost_model.reserved, "preemptible workers": cost_model.worker if elastic else None}
    if not any(engines.values()):
        hint = "let the reserved side generate, or add preemptible machines"
        raise UserError("no engine to generate, reserved or preemptible", hint=hint)
    longest = work.prompt_tokens + min(work.longest, spec.sampling.max_new_tokens)
    for name, costs in engines.items():
        cache = costs.longest_sample if costs else math.inf
        if longest > cache:
            missing = math.ceil(longest - cache)
            raise UserError(
                f"the longest sample, prompt and completion, has {longest:,} tokens; the cache of one of the {name} "
                f"holds {math.floor(max(cache, 0)):,}: {missing:,} are missing",
                hint="use more or larger GPUs per engine, or limit the completions",
            )


def _reserved(
    cost_model: CostModel, completions: BlankCompletions, clock: Clock, factories: ComponentFactories
) -> SimulatedWorker | None:
    """All reserved engines, as one worker."""
    if cost_model.reserved is None:
        return None
    make = SharingWorker if cost_model.shares_gpus else SimulatedWorker
    return make(
        factories.engine(cost_model.reserved, completions, now_s=clock.now()),
        clock=clock,
        worker_id=LOCAL,
        lease_id=LOCAL,
        source=None,
        swap_s=cost_model.reserved_load_s,
        tick_s=factories.tick_s,
    )
