"""Simulated schedules side by side: figures, text, and one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.pool import RayPool, ScheduleName, StaticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, counted, doing, dollars, duration, percent
from tidemill.core.records import Record
from tidemill.pool.build_provider import remarks, timetable_of
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.schedules import SCHEDULES, Schedule, SimulatedCluster, cluster_of
from tidemill.sim.simulation import CostModel, check_cost_model, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.fleet_figures import HOUR_S
from tidemill.telemetry.report.pages import render_page
from tidemill.telemetry.report.timeline import Bar, timeline, timeline_json

ENDLESS = 10**6
"""Steps of a run that ends by the clock."""


class Planned(Record):
    """One schedule, ready to be run."""

    name: ScheduleName
    schedule: Schedule
    spec: RunSpec
    cost_model: CostModel
    generating: int  # reserved GPUs that generate
    learning: int  # and learn


class Scenario(Record):
    cluster: SimulatedCluster
    workload: Workload
    planned: tuple[Planned, ...]
    remarks: tuple[str, ...]  # what is odd about the machines that will come


def plan_scenario(spec: RunSpec, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Scenario:
    """Everything that can be known before anything is run; `read` returns the bytes of a trace's file.

    Raises:
        UserError: what is not known, fits nowhere, or leaves nobody to generate; a trace that is none.
    """
    if isinstance(spec.pool, RayPool):
        hint = 'use "static", "trace" or "synthetic"'
        raise UserError("nobody knows when a cluster's machines will come and go", where="pool.kind", hint=hint)
    cluster = cluster_of(spec)
    workload = cluster.workload()
    return Scenario(
        cluster=cluster,
        workload=workload,
        planned=tuple(_planned(cluster, workload, name) for name in spec.simulation.schedules),
        remarks=tuple(remarks(spec.pool, read)),
    )


def _planned(cluster: SimulatedCluster, workload: Workload, name: ScheduleName) -> Planned:
    schedule = SCHEDULES[name](cluster.spec)
    elastic = schedule.elastic and not (isinstance(cluster.spec.pool, StaticPool) and not cluster.spec.pool.workers)
    try:
        if elastic and not cluster.spec.fleet.seeding:
            generating = 0
        elif schedule.shares_gpus:
            generating = cluster.most_generating
        else:
            generating = cluster.balanced(overlapping=schedule.schedule.max_policy_lag > 0)
        cost_model = cluster.cost_model(schedule, generating=generating, elastic=elastic)
        spec = _resolved(cluster.spec, schedule)
        check_cost_model(spec, cost_model, workload, elastic=elastic)
    except UserError as error:
        raise UserError(f"{name}: {error.what}", where=error.where, hint=error.hint) from None
    learning = cluster.gpus if schedule.shares_gpus else cluster.gpus - generating
    return Planned(
        name=name, schedule=schedule, spec=spec, cost_model=cost_model, generating=generating, learning=learning
    )


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
        planned.cost_model,
        workload,
        timetable_of(pool, read) if planned.cost_model.worker else None,
        seconds=spec.simulation.hours * HOUR_S or math.inf,
        most_workers=pool.max_workers if isinstance(pool, TracePool) else pool.workers,
        factories=planned.schedule.factories,
        tell=tell,
    )


HEADINGS = ("", "tokens/s", "", "tokens/$", "", "cost", "step", "learns", "generates", "idle", "workers\nidle",
            "evicted", "computed\nagain")  # fmt: skip
TIMES = HEADINGS.index("step")
"""Columns before it are what a schedule achieves and costs."""
REMARKS = (
    "step: on average; learns, generates, idle: of that, what the GPUs that learn do",
    "× is relative to the first",
)
FREE = "no price known"
CROWDED = 0.1
"""Tokens computed again for want of cache, by tokens generated, from which on it is said."""


class Compared(Record):
    planned: Planned
    run: SimulatedRun


def figures(run: SimulatedRun) -> dict[str, Any]:
    """What `--json` says of a schedule. Times in seconds, of an average step where they are a step's."""
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
    """Versions between a trained token and the trainer, on average over tokens."""
    weighted = sum(
        int(name.removeprefix("lag/")) * share * line.values["tokens_trained"]
        for line in run.metrics
        for name, share in line.values.items()
        if name.startswith("lag/")
    )
    return weighted / run.tokens_trained


def rows(compared: Sequence[Compared]) -> list[list[str]]:
    """A row of text for each, under `HEADINGS`."""
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
    """Schedules whose engines begin more samples than their caches hold to the end."""
    return [words for one in compared if (words := _crowded(one))]


def _crowded(one: Compared) -> str:
    run, cost_model = one.run, one.planned.cost_model
    if run.put_back_tokens < CROWDED * run.generated:
        return ""
    cache = min(engine.longest_sample for engine in (cost_model.reserved, cost_model.worker) if engine is not None)
    prompt, samples = one.planned.spec.simulation.prompt_tokens, run.total("samples")
    longest = max(line.values["completion_tokens_max"] for line in run.metrics)
    mean, most = (cache / (prompt + tokens) for tokens in (run.tokens_trained / samples, longest))
    return (
        f"{one.planned.name}: full caches had {compact(run.put_back_tokens)} tokens computed again; the smallest holds "
        f"about {counted(round(mean), 'sample')} of mean length, {most:.0f} of the longest; engine.slots = "
        f"{one.planned.spec.engine.slots}"
    )


def headline(compared: Sequence[Compared]) -> str:
    """The schedule with the most tokens per dollar, or where nothing has a price per second, against the first."""
    first = compared[0]
    best = max(compared, key=lambda one: (one.run.tokens_per_usd or 0.0, one.run.throughput_tokens_per_s))
    if best is first:
        return f"{first.planned.name} is ahead" if len(compared) > 1 else first.planned.name
    faster = best.run.throughput_tokens_per_s / first.run.throughput_tokens_per_s
    text = f"{best.planned.name}: {faster:.2f} times the throughput of {first.planned.name}"
    if best.run.tokens_per_usd and first.run.tokens_per_usd:
        text += f", {best.run.tokens_per_usd / first.run.tokens_per_usd:.2f} times the tokens per dollar"
    return text


def described(scenario: Scenario) -> list[str]:
    """What is simulated, in words."""
    cluster, spec = scenario.cluster, scenario.cluster.spec
    given, batch = spec.simulation, spec.batch
    model = given.model or f"{cluster.shape.parameters / 1e9:.3g}B parameters"
    duration_words = f"{given.hours:g} h" if given.hours else counted(spec.trainer.steps, "step")
    reserved, preemptible = _price(spec.fleet.reserved_usd_per_hour), _price(spec.fleet.preemptible_usd_per_hour)
    each = " each" if preemptible != FREE else ""
    machines = f"{given.machines} × {cluster.machine.name} ({reserved})"
    lines = [
        f"{model}, {duration_words} of {batch.prompts} × {batch.group_size} samples, seed {spec.run.seed}",
        f"{machines}, preemptible {cluster.worker_machine.name} ({preemptible}{each})",
    ]
    who = (f"{one.name}: {_who(one)}" for one in scenario.planned)
    remarks = (*_left_over(scenario), *_free(scenario), *scenario.remarks)
    return [*lines, *who, *(f"note: {remark}" for remark in remarks)]


def _price(usd_per_hour: float) -> str:
    return f"{dollars(usd_per_hour)} an hour" if usd_per_hour else FREE


def _who(one: Planned) -> str:
    """Who learns, and who generates."""
    words, verb = [doing(one.learning, "GPU", "learn")], "generates" if one.generating == 1 else "generate"
    if one.generating:
        words.append(f"{one.generating} {'of them ' if one.schedule.shares_gpus else ''}{verb}")
    if one.schedule.shares_gpus and one.generating == one.learning:
        words = [f"{words[0]} and {verb}"]
    if one.cost_model.worker:
        words.append("as do preemptible workers" if one.generating else "preemptible workers generate")
    return ", ".join(words)


def _free(scenario: Scenario) -> list[str]:
    """Machines that cost nothing because nobody said what they cost."""
    cluster, fleet = scenario.cluster, scenario.cluster.spec.fleet
    unknown = {"reserved_usd_per_hour": cluster.machine.name} if not fleet.reserved_usd_per_hour else {}
    if any(one.cost_model.worker for one in scenario.planned) and not fleet.preemptible_usd_per_hour:
        unknown["preemptible_usd_per_hour"] = f"preemptible {cluster.worker_machine.name}"
    return [f"{name} costs nothing here, no price being known; set fleet.{key}" for key, name in unknown.items()]


def _left_over(scenario: Scenario) -> list[str]:
    """GPUs of a machine that no engine fits on."""
    cluster, planned = scenario.cluster, scenario.planned
    machines = {cluster.machine.name: cluster.machine} if any(one.generating for one in planned) else {}
    if any(one.cost_model.worker for one in planned):
        machines[cluster.worker_machine.name] = cluster.worker_machine
    return [
        f"engines of {cluster.engine_gpus} GPUs take {each.gpus - left} of the {each.gpus} of {name}; the rest has none"
        for name, each in machines.items()
        if (left := each.gpus % cluster.engine_gpus)
    ]


def planned_data(scenario: Scenario) -> dict[str, Any]:
    """What is resolved."""
    cluster, spec = scenario.cluster, scenario.cluster.spec
    return {
        "simulation": spec.simulation.model_dump(mode="json"),
        "parameters": cluster.shape.parameters,
        "assumed_shape": cluster.shape.assumed,
        "machine": cluster.machine.name,
        "worker_machine": cluster.worker_machine.name,
        "reserved_usd_per_hour": spec.fleet.reserved_usd_per_hour,
        "preemptible_usd_per_hour": spec.fleet.preemptible_usd_per_hour,
        "prices": [
            f"{each.name}: {each.priced}, {each.price_source}" for each in (cluster.machine, cluster.worker_machine)
        ],
        "schedules": {
            one.name: {
                "words": one.schedule.words,
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
    """
    Args:
        title: of the page.
        words: what was simulated, a line each.
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
        ("Step", duration(run.seconds / len(run.metrics)), f"on average, of {len(run.metrics)}"),
        ("Trainer idle", percent(run.trainer_idle_share), f"learning {percent(run.learning_share)} of the time"),
        ("Computed again", compact(run.tokens_recomputed), "tokens"),
    ]
    if run.tokens_per_usd:
        tiles.append(("Tokens per dollar", compact(run.tokens_per_usd), f"{dollars(run.cost_usd)} in all"))
    if worker_idle is not None:
        tiles.append(("Workers idle", percent(worker_idle), f"{run.workers_mean:.1f} on average"))
        tiles.append(("Evictions", str(run.evictions), f"{compact(run.total('tokens_lost'))} tokens lost"))
    return {"name": one.planned.name, "words": one.planned.schedule.words, "tiles": tiles}


def _drawn(run: SimulatedRun) -> dict[str, Any]:
    """The timeline of a run's logs, with what the trainer did while its batch came in."""
    found = timeline(run.events, run.metrics, reserved_only=True)
    assert found is not None, "a timeline of reserved machines is wanted"
    learned = tuple(
        Bar(row=0, kind="learn", start_s=begin_s, end_s=end_s, text=f"learning\n{duration(end_s - begin_s)}")
        for begin_s, end_s in run.learned
    )
    bars = (*(bar for bar in found.bars if bar.kind != "train"), *learned)
    return timeline_json(msgspec.structs.replace(found, bars=bars))
