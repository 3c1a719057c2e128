"""Compares simulated schedules: planning, figures, text and a self-contained page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidemill.config.pool import RayPool, ScheduleName, TracePool
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, counted, doing, dollars, duration, percent
from tidemill.core.records import Record
from tidemill.pool.build_provider import timetable_of, trace_remarks
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.schedules import (
    EXECUTABLE,
    SCHEDULES,
    Schedule,
    SimulatedCluster,
    cluster_of,
    with_all_machines,
)
from tidemill.sim.simulation import CostModel, check_cost_model, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.fleet_figures import HOUR_S
from tidemill.telemetry.report.pages import render_page
from tidemill.telemetry.report.timeline import Bar, timeline, timeline_json

ENDLESS = 10**6
"""Step limit of a run that is limited by time."""


class Planned(Record):
    """One schedule, ready to run."""

    name: ScheduleName
    schedule: Schedule
    spec: RunSpec
    cost_model: CostModel
    generating: int  # generating reserved GPUs
    learning: int  # training reserved GPUs


class Scenario(Record):
    cluster: SimulatedCluster
    workload: Workload
    planned: tuple[Planned, ...]
    remarks: tuple[str, ...]  # notes about the pool


def plan_scenario(spec: RunSpec) -> Scenario:
    """Resolve all schedules before anything runs.

    Raises:
        UserError: unknown model or machine, a model that does not fit, no engine, or an invalid trace.
    """
    remarks = trace_remarks(spec.pool)
    cluster = cluster_of(spec)
    if isinstance(spec.pool, RayPool):
        cluster, machines = with_all_machines(cluster, spec.pool)
        where = f"on {counted(machines, 'preemptible machine')}" if machines else "beside the reserved engine"
        remarks = [f'pool.kind = "ray" has no timetable: all workers are there from the start, {where}']
    workload = cluster.workload()
    return Scenario(
        cluster=cluster,
        workload=workload,
        planned=tuple(_planned(cluster, workload, name) for name in spec.simulation.schedules),
        remarks=tuple(remarks),
    )


def _planned(cluster: SimulatedCluster, workload: Workload, name: ScheduleName) -> Planned:
    schedule = SCHEDULES[name](cluster.spec)
    elastic = schedule.elastic and cluster.spec.is_elastic
    try:
        if elastic and not cluster.spec.fleet.seeding:
            generating = 0
        elif cluster.is_fixed(schedule):
            schedule = msgspec.structs.replace(schedule, shares_gpus=False)
            generating = cluster.own_engines * cluster.engine_gpus
        elif schedule.shares_gpus:
            generating = cluster.most_generating
        else:
            generating = cluster.balanced(overlapping=schedule.schedule.max_policy_lag > 0)
        cost_model = cluster.cost_model(schedule, generating=generating, elastic=elastic)
        changed = {"schedule": schedule.schedule, "fleet": cluster.spec.fleet.model_copy(update=schedule.fleet)}
        spec = cluster.spec.model_copy(update=changed)
        if spec.simulation.hours:
            spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"steps": ENDLESS})})
        check_cost_model(spec, cost_model, workload, elastic=elastic)
    except UserError as error:
        raise UserError(f"{name}: {error.what}", where=error.where, hint=error.hint) from None
    learning = cluster.learning(schedule, generating)
    return Planned(
        name=name, schedule=schedule, spec=spec, cost_model=cost_model, generating=generating, learning=learning
    )


def simulate_planned(
    planned: Planned,
    workload: Workload,
    *,
    tell: Callable[[int, float], None] = lambda step, now_s: None,
) -> SimulatedRun:
    """Simulate one schedule.

    Args:
        tell: called at the end of each step with its number and the virtual time in seconds.

    Raises:
        UserError: no engine to generate.
    """
    spec = planned.spec
    pool = spec.pool
    assert not isinstance(pool, RayPool), "refused by plan_scenario"
    return simulate_run(
        spec,
        planned.cost_model,
        workload,
        timetable_of(pool) if planned.cost_model.worker else None,
        seconds=spec.simulation.hours * HOUR_S or math.inf,
        most_workers=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
        factories=planned.schedule.factories,
        tell=tell,
    )


HEADINGS = ("", "tokens/s", "", "tokens/$", "", "cost", "step", "trains", "generates", "idle", "workers\nidle",
            "evicted", "re-\ncomputed")  # fmt: skip
TIMES = HEADINGS.index("step")
"""Earlier columns are results and costs."""
REMARKS = (
    "step: mean; trains, generates, idle: parts of it, for the training GPUs",
    "× is relative to the first",
)
FREE = "no price"
CROWDED = 0.1
"""A larger ratio of tokens recomputed, because the KV cache was full, to tokens generated is reported."""


class Compared(NamedTuple):
    planned: Planned
    run: SimulatedRun


def figures(run: SimulatedRun) -> dict[str, Any]:
    """The figures of a schedule for `--json`. Times in seconds; step times are means."""
    steps, fleet = len(run.metrics), run.fleet_figures()
    return {
        "throughput_tokens_per_s": run.throughput_tokens_per_s,
        "tokens_per_usd": run.tokens_per_usd,
        "cost_usd": run.cost_usd,
        "trainer_idle_share": run.trainer_idle_share,
        "worker_idle_share": run.worker_idle_share,
        "tokens_recomputed": run.tokens_recomputed,
        "tokens_put_back": run.put_back_tokens,
        "tokens_trained": run.tokens_trained,
        "tokens_generated": run.generated,
        "tokens_discarded": int(run.total("tokens_discarded")),
        "tokens_lost": int(run.total("tokens_lost")),
        "steps": steps,
        "seconds": run.seconds,
        "step_s": run.seconds / steps,
        "learning_s": run.learning_share * run.seconds / steps,
        "reserved_generating_s": run.reserved_generating_share * run.seconds / steps,
        "trainer_idle_s": run.trainer_idle_share * run.seconds / steps,
        "workers_mean": run.workers_mean,
        "evictions": run.evictions,
        "evictions_noticed": fleet["evictions_noticed"],
        "migrations": fleet["migrations"],
        "policy_lag_mean": lag_mean(run),
        "digest": run.digest,
    }


def lag_mean(run: SimulatedRun) -> float:
    """Mean policy lag over trained tokens."""
    weighted = sum(
        int(name.removeprefix("lag/")) * share * line.values["tokens_trained"]
        for line in run.metrics
        for name, share in line.values.items()
        if name.startswith("lag/")
    )
    return weighted / run.tokens_trained


def rows(compared: Sequence[Compared]) -> list[list[str]]:
    """Table rows under `HEADINGS`."""
    return [_row(one, compared[0].run) for one in compared]


def _row(one: Compared, first: SimulatedRun) -> list[str]:
    run = one.run
    steps, rate, base = len(run.metrics), run.tokens_per_usd, first.tokens_per_usd
    generates_s = run.reserved_generating_share * run.seconds / steps if run.shares_gpus else None
    return [
        one.planned.name,
        f"{run.throughput_tokens_per_s:,.0f}",
        f"{run.throughput_tokens_per_s / first.throughput_tokens_per_s:.2f}×",
        compact(rate) if rate else "-",
        f"{rate / base:.2f}×" if rate and base else "",
        dollars(run.cost_usd),
        duration(run.seconds / steps),
        duration(run.learning_share * run.seconds / steps),
        duration(generates_s) if generates_s is not None else "-",
        percent(run.trainer_idle_share),
        percent(run.worker_idle_share) if run.worker_idle_share is not None else "-",
        str(run.evictions) if run.worker_idle_share is not None else "-",
        compact(run.tokens_recomputed),
    ]


def crowded(compared: Sequence[Compared]) -> list[str]:
    """Notes on schedules whose caches overflowed."""
    notes = []
    for planned, run in compared:
        if run.put_back_tokens >= CROWDED * run.generated:
            engines = (planned.cost_model.reserved, planned.cost_model.worker)
            cache = min(engine.longest_sample for engine in engines if engine is not None)
            prompt, samples = planned.spec.simulation.prompt_tokens, run.total("samples")
            longest = max(line.values["completion_tokens_max"] for line in run.metrics)
            mean, most = (cache / (prompt + tokens) for tokens in (run.tokens_trained / samples, longest))
            notes.append(
                f"{planned.name}: full caches caused {compact(run.put_back_tokens)} tokens to be recomputed; the "
                f"smallest holds about {counted(round(mean), 'sample')} of mean length, {most:.0f} of the longest; "
                f"engine.slots = {planned.spec.engine.slots}"
            )
    return notes


def headline(compared: Sequence[Compared]) -> str:
    """The best schedule by tokens per dollar (per second without prices), relative to the first."""
    first = compared[0]
    best = max(compared, key=lambda one: (one.run.tokens_per_usd or 0.0, one.run.throughput_tokens_per_s))
    if best is first:
        return f"{first.planned.name} is best" if len(compared) > 1 else first.planned.name
    faster = best.run.throughput_tokens_per_s / first.run.throughput_tokens_per_s
    text = f"{best.planned.name}: {faster:.2f} times the throughput of {first.planned.name}"
    if best.run.tokens_per_usd and first.run.tokens_per_usd:
        text += f", {best.run.tokens_per_usd / first.run.tokens_per_usd:.2f} times the tokens per dollar"
    return text


def described(scenario: Scenario) -> list[str]:
    """Describe the simulation, one line each."""
    cluster, spec = scenario.cluster, scenario.cluster.spec
    given, batch = spec.simulation, spec.batch
    model = given.model or f"{cluster.shape.parameters / 1e9:.3g}B parameters"
    duration_text = f"{given.hours:g} h" if given.hours else counted(spec.trainer.steps, "step")
    reserved, preemptible = _price(spec.fleet.reserved_usd_per_hour), _price(spec.fleet.preemptible_usd_per_hour)
    each = " each" if preemptible != FREE else ""
    machines = f"{given.machines} × {cluster.machine.name} ({reserved})"
    lines = [
        f"{model}, {duration_text} of {batch.prompts} × {batch.group_size} samples, seed {spec.run.seed}",
        f"{machines}, preemptible {cluster.worker_machine.name} ({preemptible}{each})",
    ]
    who = (f"{one.name}: {_who(one)}" for one in scenario.planned)
    elastic = any(one.cost_model.worker for one in scenario.planned)
    unpriced = {"reserved_usd_per_hour": cluster.machine.name} if not spec.fleet.reserved_usd_per_hour else {}
    if elastic and not spec.fleet.preemptible_usd_per_hour:
        unpriced["preemptible_usd_per_hour"] = f"preemptible {cluster.worker_machine.name}"
    used = [cluster.machine] if any(one.generating for one in scenario.planned) else []
    used += [cluster.worker_machine] if elastic else []
    remarks = list[str]()
    for name, gpus in {machine.name: machine.gpus for machine in used}.items():
        if unused := gpus % cluster.engine_gpus:
            remarks.append(f"engines of {cluster.engine_gpus} GPUs use {gpus - unused} of the {gpus} GPUs of {name}")
    remarks += [f"{name} has no price and counts as free; set fleet.{key}" for key, name in unpriced.items()]
    remarks += [*scenario.remarks, *cluster.efficiency_remarks, executable([one.name for one in scenario.planned])]
    return [*lines, *who, *(f"note: {remark}" for remark in remarks)]


def executable(names: Sequence[ScheduleName]) -> str:
    """Which schedules this release can run."""
    runs = ", ".join(name for name in names if name in EXECUTABLE) or "none of these schedules"
    rest = ", ".join(name for name in names if name not in EXECUTABLE)
    return f"this release can run {runs}" + (f"; only simulated: {rest}" if rest else "")


def _price(usd_per_hour: float) -> str:
    return f"{dollars(usd_per_hour)} per hour" if usd_per_hour else FREE


def _who(one: Planned) -> str:
    """Which GPUs train and which generate."""
    words, verb = [doing(one.learning, "GPU", "train")], "generates" if one.generating == 1 else "generate"
    if one.generating:
        words.append(f"{one.generating} {'of them ' if one.schedule.shares_gpus else ''}{verb}")
    if one.schedule.shares_gpus and one.generating == one.learning:
        words = [f"{words[0]} and {verb}"]
    if one.cost_model.worker:
        words.append("as do preemptible workers" if one.generating else "preemptible workers generate")
    return ", ".join(words)


def planned_data(scenario: Scenario) -> dict[str, Any]:
    """The resolved settings for `--json`."""
    cluster, spec = scenario.cluster, scenario.cluster.spec
    return {
        "simulation": spec.simulation.model_dump(mode="json"),
        "parameters": cluster.shape.parameters,
        "assumed_shape": cluster.shape.assumed,
        "machine": cluster.machine.name,
        "worker_machine": cluster.worker_machine.name,
        "efficiencies": list(cluster.efficiency_remarks),
        "reserved_usd_per_hour": spec.fleet.reserved_usd_per_hour,
        "preemptible_usd_per_hour": spec.fleet.preemptible_usd_per_hour,
        "prices": [
            f"{each.name}: {each.priced}, {each.price_source}" for each in (cluster.machine, cluster.worker_machine)
        ],
        "schedules": {
            one.name: {
                "description": one.schedule.description,
                "learning_gpus": one.learning,
                "generating_gpus": one.generating,
                "preemptible": one.cost_model.worker is not None,
                "schedule": one.schedule.schedule.model_dump(mode="json"),
            }
            for one in scenario.planned
        },
    }


TEMPLATE = Path(__file__).parent / "templates" / "simulation.html.j2"


def render(title: str, words: Sequence[str], compared: Sequence[Compared]) -> str:
    """Render the page.

    Args:
        title: of the page.
        words: description of the simulation, one line each.
    """
    return render_page(
        TEMPLATE,
        title=title,
        headline=headline(compared),
        headings=HEADINGS,
        rows=rows(compared),
        remarks=REMARKS,
        words=words,
        schedules=[_section(one) for one in compared],
        chart_data={"fleets": [_drawn(one.run) for one in compared]},
    )


def _section(one: Compared) -> dict[str, Any]:
    run, worker_idle = one.run, one.run.worker_idle_share
    tiles = [
        ("Throughput", compact(run.throughput_tokens_per_s), "trained tokens per second"),
        ("Step", duration(run.seconds / len(run.metrics)), f"mean of {len(run.metrics)}"),
        ("Trainer idle", percent(run.trainer_idle_share), f"training {percent(run.learning_share)} of the time"),
        ("Recomputed", compact(run.tokens_recomputed), "tokens"),
    ]
    if run.tokens_per_usd:
        tiles.append(("Tokens per dollar", compact(run.tokens_per_usd), f"{dollars(run.cost_usd)} in total"))
    if worker_idle is not None:
        tiles.append(("Workers idle", percent(worker_idle), f"{run.workers_mean:.1f} on average"))
        tiles.append(("Evictions", str(run.evictions), f"{compact(run.total('tokens_lost'))} tokens lost"))
    return {"name": one.planned.name, "description": one.planned.schedule.description, "tiles": tiles}


def _drawn(run: SimulatedRun) -> dict[str, Any]:
    """The timeline of a run, with training intervals."""
    found = timeline(run.events, run.metrics, reserved_only=True)
    assert found is not None, "reserved_only always gives a timeline"
    learned = tuple(
        Bar(row=0, kind="learn", start_s=begin_s, end_s=end_s, text=f"training\n{duration(end_s - begin_s)}")
        for begin_s, end_s in run.learned
    )
    bars = (*(bar for bar in found.bars if bar.kind != "train"), *learned)
    return timeline_json(msgspec.structs.replace(found, bars=bars))
