"""A recipe's own controller among the parts of one machine, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tidemill.config.pool import RayPool, StaticPool
from tidemill.config.schema import RunSpec
from tidemill.core.clock import Clock, LoopClock
from tidemill.core.protocols import Provider
from tidemill.planner.calibration.profile import RunProfile
from tidemill.planner.forecast.one_machine import OneMachine, SharedScorer, measured_trainer
from tidemill.planner.forecast.work import length_of, workloads
from tidemill.pool.build import build_provider
from tidemill.sim.completions import BlankCompletions
from tidemill.sim.drive import Parts, drive
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.recording import Recording
from tidemill.sim.task import SimulatedPrompts
from tidemill.sim.trainer import SimulatedCheckpoints, SimulatedDisk
from tidemill.sim.virtual_time import run_virtual
from tidemill.sim.weights import SimulatedPublisher


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
    parts = Parts(
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
