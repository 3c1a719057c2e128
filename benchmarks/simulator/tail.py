"""Tail batching against waiting for the longest sample, on policy: 14B, as simulated for the published policy.

    python -m benchmarks.simulator.tail

RLBoost's policy, and Tidemill with `schedule.tail` = "wait" and "batching", train the same samples in `STEPS` batches
on the same machines. At the end no prompt waits, so all systems have trained the same tokens. Machines: the markets of
`availability`, and two of `benchmarks.goodput` with another seed, which no setting was chosen on. Lengths: those of the
published system, whose longest sample has less than three times the mean, and a longer tail. Nominal slots are those of
the machines that a trace has on average; on segment B also half and twice as many, and unlimited.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.goodput import MARKETS
from benchmarks.market_statistics import synthetic_trace
from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.simulator.availability import MOST, SEED, SEGMENT_S, SEGMENTS, held
from benchmarks.simulator.ours import CHANGED, ROW, ours
from benchmarks.simulator.published_system import FITTED, SETTING, Setting, cost_model, engines, workload
from benchmarks.simulator.segments import System, published_system
from tidemill.core.records import Record
from tidemill.pool.synthetic import Market, market_timetable
from tidemill.sim.simulation import simulate_run

TARGET, STEPS, UNSEEN_SEED = 1.3, 16, 11
LENGTHS = {
    "published": SETTING,
    "long tail": Setting(mean_tokens=3000.0, longest=32_768),
}
SHARES = {"": 1.0, ", half the slots": 0.5, ", twice the slots": 2.0, ", unlimited slots": 0.0}
"""Nominal slots, relative to those of the machines."""
OVERSAMPLED = (1.25, 1.1)
MACHINES: dict[str, tuple[Market, int]] = {
    **{name: (market, SEED) for name, market in SEGMENTS.items()},
    **{name: (market, UNSEEN_SEED) for name, market in MARKETS.items()},
}
"""Markets with their seeds."""
PUBLISHED, WAIT = "published policy", "wait"


class Figures(Record):
    tokens: int
    tokens_per_usd: float
    hours: float
    trainer_idle: float
    workers_idle: float
    workers: float
    evictions: int
    discarded: float  # tokens, relative to trained ones


def batching(oversample: float, share: str = "") -> str:
    return f"batching, {oversample:g}{share}"


def system(name: str, slots: float) -> System:
    """A system by name; `slots` of the machines of a trace on average."""
    if name == PUBLISHED:
        return published_system(ROW)
    found = ours(0)
    for oversample in OVERSAMPLED:
        for share, factor in SHARES.items():
            if name == batching(oversample, share):
                changed = {"tail": "batching", "oversample": oversample, "nominal_slots": round(factor * slots)}
                schedule = found.spec.schedule.model_copy(update=changed)
                return msgspec.structs.replace(found, spec=found.spec.model_copy(update={"schedule": schedule}))
    return found


def simulate(name: str, setting: Setting, market: Market, seed: int) -> Figures:
    machines = held(synthetic_trace(market, seed=seed, duration_s=SEGMENT_S), MOST[ROW])
    chosen = system(name, machines * engines(ROW, FITTED, setting)[1].slots)
    spec = chosen.spec
    changed: dict[str, Any] = {
        "trainer": spec.trainer.model_copy(update={"steps": STEPS}),
        "sampling": spec.sampling.model_copy(update={"max_new_tokens": setting.longest}),
    }
    run = simulate_run(
        spec.model_copy(update=changed),
        cost_model(ROW, FITTED, setting, delta_share=0.0 if name == PUBLISHED else CHANGED),
        workload(setting),
        market_timetable(market, seed=seed),
        seconds=math.inf,
        most_workers=MOST[ROW],
        factories=chosen.factories,
    )
    return Figures(
        tokens=run.tokens_trained,
        tokens_per_usd=run.tokens_trained / run.cost_usd,
        hours=run.seconds / 3600,
        trainer_idle=run.trainer_idle_share,
        workers_idle=run.worker_idle_share or 0.0,
        workers=run.workers_mean,
        evictions=run.evictions,
        discarded=run.total("tokens_discarded") / run.tokens_trained,
    )


def check_same_samples(found: dict[str, Figures]) -> None:
    """Raises RuntimeError: systems trained different samples, or tail batching discarded nothing."""
    if len({figures.tokens for figures in found.values()}) != 1:
        raise RuntimeError(f"different tokens were trained: {[(name, one.tokens) for name, one in found.items()]}")
    if kept := [name for name, one in found.items() if (one.discarded > 0) != name.startswith("batching")]:
        raise RuntimeError(f"unexpected discarded tokens: {kept}")


def names_on(machines: str) -> list[str]:
    shares = SHARES if machines == "B" else ("",)
    return [PUBLISHED, WAIT, *(batching(oversample, share) for oversample in OVERSAMPLED for share in shares)]


def relative(found: dict[str, dict[str, Figures]], name: str) -> float:
    """Tokens per dollar of all traces together, relative to the published policy's: the same tokens for less money."""
    published, other = (
        sum(figures[which].tokens / figures[which].tokens_per_usd for figures in found.values())
        for which in (PUBLISHED, name)
    )
    return published / other


def show(lengths: str, found: dict[str, dict[str, Figures]]) -> None:
    table = Table(title=f"tokens per dollar over the published policy's, lengths: {lengths}", box=box.SIMPLE)
    table.add_column("system")
    for column in (*found, "discarded", "trainer idle"):
        table.add_column(column, justify="right")
    for name in names_on("B"):
        ratios = [
            f"{each[name].tokens_per_usd / each[PUBLISHED].tokens_per_usd:.3f}" if name in each else ""
            for each in found.values()
        ]
        table.add_row(name, *ratios, f"{found['B'][name].discarded:.0%}", f"{found['B'][name].trainer_idle:.0%}")
    Console(width=140).print(table)


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    results: dict[str, Any] = {}
    for lengths, setting in LENGTHS.items():
        found: dict[str, dict[str, Figures]] = {}
        for machines, (market, seed) in MACHINES.items():
            found[machines] = {name: simulate(name, setting, market, seed) for name in names_on(machines)}
            print(machines, {name: round(one.tokens_per_usd) for name, one in found[machines].items()}, file=sys.stderr)
            check_same_samples(found[machines])
        show(lengths, found)
        results[lengths] = {
            "longest": setting.longest,
            "mean_tokens": setting.mean_tokens,
            "relative": {name: relative(found, name) for name in names_on("")},
            "traces": msgspec.to_builtins(found),
        }
    gain = max(results["published"]["relative"][batching(oversample)] for oversample in OVERSAMPLED)
    print(f"target {TARGET:g} times the tokens per dollar of the published policy: {gain:.3f} with its lengths")
    write_result("tail_batching", {"target": TARGET, "gain": gain, "steps": STEPS, "lengths": results})
    return 0 if gain >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
