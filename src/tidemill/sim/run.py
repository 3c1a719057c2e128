"""A run of the real controller in virtual time: its loop, ledger, dispatcher, offload and fleet, among simulated twins
of engines, trainer, weights and machines.

```
 spec, plant, lengths, timetable ──▶ simulate_run ──▶ SimulatedRun: the logs that a real run writes, and what it cost
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL
from tidemill.core.clock import Clock, LoopClock
from tidemill.core.errors import UserError
from tidemill.core.protocols import Provider
from tidemill.core.records import Record
from tidemill.pool.provider import ScheduledProvider
from tidemill.pool.timetable import Timetable
from tidemill.sim.completions import BlankCompletions
from tidemill.sim.costs import EngineCosts, TrainerCosts, WeightCosts
from tidemill.sim.drive import Parts, drive
from tidemill.sim.engine import SimulatedEngine
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.provider import LastWords
from tidemill.sim.recording import Recording
from tidemill.sim.sharing import SharingWorker
from tidemill.sim.task import SimulatedPrompts, SimulatedScorer
from tidemill.sim.trainer import LearningTrainer, SimulatedCheckpoints, SimulatedDisk
from tidemill.sim.virtual_time import run_virtual
from tidemill.sim.weights import SimulatedPublisher
from tidemill.sim.worker import SimulatedHost, SimulatedWorker
from tidemill.sim.workload import Workload


class Plant(Record):
    """What everything takes."""

    trainer: TrainerCosts
    weights: WeightCosts
    reserved: EngineCosts | None = None  # all engines beside the trainer, as one
    reserved_load_s: float = 0.0  # until they have the trainer's new weights
    shares_gpus: bool = True  # they stand still while the trainer learns, which waits until they have nothing to do
    streams: bool = True  # learning begins with the first group that is complete; else with the whole batch
    worker: EngineCosts | None = None  # of each preemptible machine


class Twins(Record):
    """Other parts than the run's own, for whoever compares it with another system."""

    fleet: Callable[..., Fleet] = Fleet
    host: Callable[..., SimulatedHost] = SimulatedHost
    engine: Callable[..., SimulatedEngine] = SimulatedEngine
    tick_s: float = math.inf  # how often workers report what is under way, besides when samples end
    last_words: bool = True  # a machine that goes has told what its samples had; else they begin anew elsewhere


def simulate_run(
    spec: RunSpec,
    plant: Plant,
    work: Workload,
    timetable: Timetable | None = None,
    *,
    seconds: float = math.inf,
    most_workers: float = math.inf,
    twins: Twins | None = None,
    tell: Callable[[int, float], None] = lambda step, now_s: None,
) -> SimulatedRun:
    """Run until `spec.trainer.steps` batches are learned from, or for so many virtual seconds.

    Everything random is seeded by `spec.run.seed` and by the timetable: equal arguments, equal logs.

    Args:
        timetable: of the preemptible machines; None for none.
        most_workers: held at once.
        twins: other parts than the run's own.
        tell: called with each step and the virtual seconds at its end.

    Raises:
        UserError: nobody ever generates, no step is finished in time, or the longest sample fits no engine's cache.
    """
    check_plant(spec, plant, work, elastic=timetable is not None)
    return run_virtual(_simulate(spec, plant, work, timetable, seconds, most_workers, twins or Twins(), tell))


def check_plant(spec: RunSpec, plant: Plant, work: Workload, *, elastic: bool) -> None:
    """Raises UserError: there is nobody to generate, or the longest sample does not fit an engine's cache."""
    engines = {"reserved engines": plant.reserved, "preemptible workers": plant.worker if elastic else None}
    if not any(engines.values()):
        cure = "let the reserved side generate, or add preemptible machines"
        raise UserError("nobody generates: there is no engine, reserved or preemptible", cure=cure)
    longest = work.prompt_tokens + min(work.longest, spec.sampling.max_new_tokens)
    for name, costs in engines.items():
        cache = costs.longest_sample if costs else math.inf
        if longest > cache:
            missing = math.ceil(longest - cache)
            raise UserError(
                f"the longest sample, prompt and completion, is {longest:,} tokens, and the cache of one of the {name} "
                f"holds {math.floor(max(cache, 0)):,}: {missing:,} are missing",
                cure="give an engine more GPUs or larger ones, or limit the completions",
            )


async def _simulate(
    spec: RunSpec,
    plant: Plant,
    work: Workload,
    timetable: Timetable | None,
    seconds: float,
    most_workers: float,
    twins: Twins,
    tell: Callable[[int, float], None],
) -> SimulatedRun:
    clock = LoopClock()
    recording, completions = Recording(clock, tell), BlankCompletions(work.length)
    local = _reserved(plant, completions, clock, twins)
    gpus = local.learning if isinstance(local, SharingWorker) else nullcontext
    trainer = LearningTrainer(plant.trainer, clock=clock, gpus=gpus, streams=plant.streams)
    host = provider = None
    if timetable is not None:
        host = _host(plant, completions, clock, twins)
        provider = _provider(spec, timetable, clock, host, most_workers, last_words=twins.last_words)
    parts = _parts(spec, plant, work, local=local, trainer=trainer, host=host, provider=provider)
    result = await drive(spec, parts, recording, clock, seconds=seconds, make_fleet=twins.fleet)
    made = [worker.engine for worker in (*((local,) if local else ()), *(host.workers.values() if host else ()))]
    return SimulatedRun(
        result=result,
        events=tuple(recording.events),
        metrics=tuple(recording.metrics),
        digest=recording.digest,
        learned=tuple(trainer.learned),
        reserved_usd_per_hour=spec.fleet.reserved_usd_per_hour,
        shares_gpus=plant.shares_gpus and plant.reserved is not None,
        put_back=sum(engine.put_back for engine in made),
        put_back_tokens=sum(engine.recomputed for engine in made),
        generated=sum(engine.generated for engine in made),
    )


def _parts(
    spec: RunSpec,
    plant: Plant,
    work: Workload,
    *,
    local: SimulatedWorker | None,
    trainer: LearningTrainer,
    host: SimulatedHost | None,
    provider: Provider | None,
) -> Parts:
    engines = [costs for costs in (plant.worker, plant.reserved) if costs is not None]
    return Parts(
        local=local,
        slots=engines[0].slots,
        local_slots=engines[-1].slots,
        trainer=trainer,
        scorer=SimulatedScorer(lambda _: work.score_s, lambda trajectory: work.reward(trajectory.sample_id)),
        source=SimulatedPrompts(
            spec.batch.prompts,
            different=work.different_prompts,
            prompt_tokens=work.prompt_tokens,
            held_out=min(work.held_out, spec.eval.prompts),
        ),
        checkpoints=SimulatedCheckpoints(SimulatedDisk(), trainer, plant.trainer),
        provider=provider,
        host=host,
        publisher=SimulatedPublisher(plant.weights) if host else None,
    )


def _host(plant: Plant, completions: BlankCompletions, clock: Clock, twins: Twins) -> SimulatedHost:
    assert plant.worker is not None, "machines come, and nothing says what they can do"
    return twins.host(
        plant.worker,
        plant.weights,
        completions=completions,
        clock=clock,
        tick_s=twins.tick_s,
        engine_type=twins.engine,
    )


def _provider(
    spec: RunSpec, timetable: Timetable, clock: Clock, host: SimulatedHost, most: float, *, last_words: bool
) -> Provider:
    price = spec.fleet.preemptible_usd_per_hour
    machines = ScheduledProvider(timetable, clock=clock, session=1, price_usd_per_hour=price, most=most)
    return LastWords(machines, host, tick_s=spec.engine.tick_s) if last_words else machines


def _reserved(plant: Plant, completions: BlankCompletions, clock: Clock, twins: Twins) -> SimulatedWorker | None:
    """All engines beside the trainer, as one."""
    if plant.reserved is None:
        return None
    make = SharingWorker if plant.shares_gpus else SimulatedWorker
    return make(
        twins.engine(plant.reserved, completions, now_s=clock.now()),
        clock=clock,
        worker_id=LOCAL,
        lease_id=LOCAL,
        source=None,
        swap_s=plant.reserved_load_s,
        tick_s=twins.tick_s,
    )
