"""The real controller, its fleet and its loop, among simulated parts: until it has learned from its batches, or until
nobody can be expected to generate any more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.config.schema import RunSpec
from tidemill.config.words import counted
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.waiting import Patience
from tidemill.core.clock import Clock
from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.protocols import Checkpoints, PromptSource, Provider, Publisher, Scorer, Trainer, Worker, WorkerHost
from tidemill.sim.recording import Recording
from tidemill.sim.task import NoText
from tidemill.telemetry.events import DECODE, JOIN, LEASE
from tidemill.telemetry.fleet_figures import HOUR_S

LONG_S = 1e9
DAY_S = 86_400.0
PATIENCE = Patience(notice_s=3600.0, worker_s=LONG_S, pool_s=DAY_S, scorer_s=LONG_S, trainer_s=LONG_S, load_s=LONG_S)
"""A simulated engine is never hung: only machines that never come end a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What stands around the controller; made within the virtual loop."""

    local: Worker | None  # the trainer's own engine
    slots: int
    local_slots: int
    trainer: Trainer
    scorer: Scorer
    source: PromptSource
    checkpoints: Checkpoints
    provider: Provider | None = None
    host: WorkerHost | None = None
    publisher: Publisher | None = None


async def drive(
    spec: RunSpec,
    parts: Parts,
    recording: Recording,
    clock: Clock,
    *,
    seconds: float = math.inf,
    make_fleet: Callable[..., Fleet] = Fleet,
) -> LoopResult:
    """The real controller, its fleet and its loop, among simulated parts.

    Raises:
        UserError: nobody ever generates, or no step is finished in time.
    """
    fleet = _fleet(spec, parts, recording, clock, make_fleet)
    stop = asyncio.Event()
    if seconds < math.inf:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    try:
        async with fleet:
            result = await train_loop(
                spec=spec,
                source=parts.source,
                fleet=fleet,
                trainer=parts.trainer,
                scorer=parts.scorer,
                eval_scorer=parts.scorer,
                ledger=Ledger(None, round_size=spec.batch.prompts),
                checkpoints=parts.checkpoints,
                telemetry=recording,
                codec=NoText(),
                clock=clock,
                stop=stop,
                patience=PATIENCE,
            )
    except DeadlineError as error:
        raise _starved(recording, clock.now()) from error
    if not recording.metrics:
        raise _starved(recording, clock.now(), in_time=True)
    return result


def _fleet(spec: RunSpec, parts: Parts, recording: Recording, clock: Clock, make_fleet: Callable[..., Fleet]) -> Fleet:
    return make_fleet(
        parts.local,
        slots=parts.slots,
        local_slots=parts.local_slots,
        clock=clock,
        telemetry=recording,
        config=spec.fleet,
        patience=PATIENCE,
        provider=parts.provider,
        host=parts.host,
        publisher=parts.publisher,
        silence_s=math.inf,
    )


def _starved(recording: Recording, now_s: float, *, in_time: bool = False) -> UserError:
    """Why there was nobody to generate, or not for long enough.

    Args:
        in_time: the run was ended by the time it was given, not by waiting in vain.
    """
    hours, steps = f"{now_s / HOUR_S:.3g} h", counted(len(recording.metrics), "step")
    machines = sum(event["event"] == LEASE for event in recording.events)
    joined = sum(event["event"] == JOIN and "error" not in event for event in recording.events)
    generated = any(event["event"] == DECODE for event in recording.events)
    if in_time and generated:
        what, where = f"{hours} are over, and no step is finished", "simulation.hours"
        return UserError(what, where=where, cure="simulate for longer, or take smaller batches")
    if joined or generated:
        what = f"the run came to a standstill after {steps}: {hours} are over, and there is nobody to generate"
        cure = "simulate for longer, let the reserved side generate, or take a pool whose machines come back"
    elif machines:
        what = f"the run starves: of {counted(machines, 'machine')} that came in {hours} none was up before it went"
        cure = "raise fleet.join_s, make machines boot and pull faster, or let the reserved side generate"
    else:
        what = f"the run starves: no machine came in {hours}, and the reserved side does not generate"
        cure = "let the reserved side generate, or take a pool that has machines"
    return UserError(what, where="pool", cure=cure)
