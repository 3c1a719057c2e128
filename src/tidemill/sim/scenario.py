"""A recipe's run under each of its schedules: the same samples, the same machines, the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.config.pool import RayPool, StaticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.config.simulation import ScheduleName
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.pool.build import remarks, timetable_of
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.run import Plant, check_plant, simulate_run
from tidemill.sim.schedules import SCHEDULES, Schedule
from tidemill.sim.site import Site, site_of
from tidemill.sim.workload import Workload
from tidemill.telemetry.fleet_figures import HOUR_S

ENDLESS = 10**6
"""Steps of a run that ends by the clock."""


class Planned(Record):
    """One schedule, ready to be run."""

    name: ScheduleName
    schedule: Schedule
    spec: RunSpec
    plant: Plant
    generating: int  # reserved GPUs that generate
    learning: int  # and learn


class Scenario(Record):
    site: Site
    workload: Workload
    planned: tuple[Planned, ...]
    remarks: tuple[str, ...]  # what is odd about the machines that will come


def plan_scenario(spec: RunSpec, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Scenario:
    """Everything that can be known before anything is run; `read` returns the bytes of a trace's file.

    Raises:
        UserError: what is not known, fits nowhere, or leaves nobody to generate; a trace that is none.
    """
    if isinstance(spec.pool, RayPool):
        cure = 'use "static", "trace" or "synthetic"'
        raise UserError("nobody knows when a cluster's machines will come and go", where="pool.kind", cure=cure)
    site = site_of(spec)
    workload = site.workload()
    return Scenario(
        site=site,
        workload=workload,
        planned=tuple(_planned(site, workload, name) for name in spec.simulation.schedules),
        remarks=tuple(remarks(spec.pool, read)),
    )


def _planned(site: Site, workload: Workload, name: ScheduleName) -> Planned:
    schedule = SCHEDULES[name](site.spec)
    elastic = schedule.elastic and not (isinstance(site.spec.pool, StaticPool) and not site.spec.pool.workers)
    try:
        if elastic and not site.spec.fleet.seeding:
            generating = 0
        elif schedule.shares_gpus:
            generating = site.most_generating
        else:
            generating = site.balanced(overlapping=schedule.schedule.max_policy_lag > 0)
        plant = site.plant(schedule, generating=generating, elastic=elastic)
        spec = _resolved(site.spec, schedule)
        check_plant(spec, plant, workload, elastic=elastic)
    except UserError as error:
        raise UserError(f"{name}: {error.what}", where=error.where, cure=error.cure) from None
    learning = site.gpus if schedule.shares_gpus else site.gpus - generating
    return Planned(name=name, schedule=schedule, spec=spec, plant=plant, generating=generating, learning=learning)


def _resolved(spec: RunSpec, schedule: Schedule) -> RunSpec:
    """The recipe with what the schedule changes."""
    changes: dict[str, Any] = {"schedule": schedule.schedule, "fleet": spec.fleet.model_copy(update=schedule.fleet)}
    if spec.simulation.hours:
        changes["trainer"] = spec.trainer.model_copy(update={"steps": ENDLESS})
    return spec.model_copy(update=changes)


def simulate_planned(
    planned: Planned,
    workload: Workload,
    *,
    read: Callable[[Path], bytes] = Path.read_bytes,
    tell: Callable[[int, float], None] = lambda step, now_s: None,
) -> SimulatedRun:
    """
    Args:
        read: the bytes of a trace's file.
        tell: called with each step and the virtual seconds at its end.

    Raises:
        UserError: there is nobody to generate.
    """
    spec = planned.spec
    pool = spec.pool
    assert not isinstance(pool, RayPool), "refused when the scenario was planned"
    return simulate_run(
        spec,
        planned.plant,
        workload,
        timetable_of(pool, read) if planned.plant.worker else None,
        seconds=spec.simulation.hours * HOUR_S or math.inf,
        most_workers=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
        twins=planned.schedule.twins,
        tell=tell,
    )
