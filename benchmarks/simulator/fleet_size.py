"""Throughput per dollar by the number of preemptible workers, 1 to 1,000.

    python -m benchmarks.simulator.fleet_size [--workers 1 3 10 30 100 300 1000]

The real controller in virtual time: an 8B model trains on 2 reserved machines of 8 H100, which also generate; each
worker is a machine of 2 H100 with a mean lifetime of two hours. A batch has 256 prompts x 8 samples of 4,000 tokens on
average, at a lag of 1. Profiles and prices are the catalogue's; nothing is fitted. Draws `docs/fleet_size.svg`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.line_charts import PICTURES, Line, Panel, write_chart
from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from tidemill.config.schema import RunSpec
from tidemill.runtime.compute import collected_rarely
from tidemill.sim.comparison import plan_scenario, simulate_planned
from tidemill.telemetry.fleet_figures import HOUR_S

SIZES = (1, 2, 4, 7, 10, 15, 22, 40, 100, 300, 1000)
STEPS, FILLING, EMPTYING = 7, 2, 2
"""Excluded steps: the first, in which workers boot and samples spread over two versions, and the last, without new
samples."""


def spec_of(workers: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "batch": {"prompts": 256, "group_size": 8, "order": "arrival", "microbatch_tokens": 16_384},
            "sampling": {"max_new_tokens": 14_336},
            "engine": {"slots": 128},
            "schedule": {"max_policy_lag": 1, "membership": "first_finished"},
            "trainer": {"steps": STEPS, "activation_checkpointing": True},
            "fleet": {"join_timeout_s": 3600.0},  # a thousand machines pull from one uplink
            "pool": {
                "kind": "synthetic",
                "workers": workers,
                "mean_time_to_eviction_s": 7200.0,
                "mean_time_to_return_s": 600.0,
            },
            "simulation": {
                "schedules": ["tidemill"],
                "parameters": 8e9,
                "machine": "rlboost-8xh100",
                "machines": 2,
                "worker_machine": "rlboost-2xh100",
                "engine_gpus": 2,
                "completion_tokens": 4000.0,
            },
        }
    )


def measured(workers: int) -> dict[str, Any]:
    """Figures of the steps in the middle."""
    scenario = plan_scenario(spec_of(workers))
    (planned,) = scenario.planned
    began_s = time.process_time()
    run = simulate_planned(planned, scenario.workload)
    cpu_s = time.process_time() - began_s
    steps = run.metrics[FILLING : STEPS - EMPTYING]
    window = (run.metrics[FILLING - 1].elapsed_s, steps[-1].elapsed_s)
    seconds, fleet = window[1] - window[0], planned.spec.fleet
    tokens = sum(line.values["tokens_trained"] for line in steps)
    held_s = within(window, ((one.start_s, one.end_s) for one in run.preemptible))
    usd = (fleet.reserved_usd_per_hour * seconds + fleet.preemptible_usd_per_hour * held_s) / HOUR_S
    return {
        "workers": workers,
        "workers_mean": held_s / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_usd": tokens / usd,
        "learning_share": within(window, run.learned) / seconds,
        "workers_idle_share": 1 - within(window, run.decoding("preemptible")) / held_s,
        "step_s": seconds / len(steps),
        "cpu_s": cpu_s,
    }


def check_row(row: Mapping[str, float]) -> None:
    """Raises RuntimeError: less than half of the machines were held, or they or the trainer had nothing to do."""
    if row["workers_mean"] < row["workers"] / 2:
        raise RuntimeError(f"{row['workers']} workers: only {row['workers_mean']:.1f} were held on average")
    check_counts(f"{row['workers']} workers", learning=row["learning_share"], decoding=1 - row["workers_idle_share"])


def within(window: tuple[float, float], stretches: Iterable[tuple[float, float]]) -> float:
    """Seconds of all intervals within the window."""
    return sum(max(0.0, min(end_s, window[1]) - max(begin_s, window[0])) for begin_s, end_s in stretches)


def draw(rows: list[dict[str, Any]]) -> None:
    xs = [float(row["workers"]) for row in rows]
    most = max(row["tokens_per_s"] / row["learning_share"] for row in rows)

    def line(label: str, key: str, colour: int, factor: float = 1.0) -> Line:
        return Line(label=label, xs=xs, ys=[factor * row[key] for row in rows], colour=colour)

    panels = [
        Panel(
            title="thousand trained tokens per dollar",
            x_title="preemptible workers",
            lines=[line("tokens per dollar", "tokens_per_usd", 0, 1e-3)],
            low=0.0,
            logarithmic=True,
        ),
        Panel(
            title="thousand tokens per second (dotted: all it can learn)",
            x_title="preemptible workers",
            lines=[line("throughput", "tokens_per_s", 1, 1e-3)],
            low=0.0,
            marks=[most / 1000],
            logarithmic=True,
        ),
        Panel(
            title="shares of the time",
            x_title="preemptible workers",
            lines=[
                line("the trainer learns", "learning_share", 2),
                line("workers have no samples", "workers_idle_share", 3),
            ],
            low=0.0,
            high=1.0,
            logarithmic=True,
        ),
    ]
    write_chart(PICTURES / "fleet_size.svg", "Where another worker stops paying", panels, columns=3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(SIZES), metavar="N")
    arguments = parsed(parser)
    table = Table("workers", "tokens/s", "tokens/$", "trainer learns", "workers idle", "step s", "CPU s")
    rows = []
    with collected_rarely():
        for workers in arguments.workers:
            rows.append(row := measured(workers))
            check_row(row)
            print(f"{workers}: {row['cpu_s']:.0f} s of CPU time", file=sys.stderr, flush=True)
            table.add_row(
                str(workers),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_usd']:,.0f}",
                f"{row['learning_share']:.0%}",
                f"{row['workers_idle_share']:.0%}",
                f"{row['step_s']:.0f}",
                f"{row['cpu_s']:.1f}",
            )
    Console(width=120).print(table)
    best = max(rows, key=lambda row: row["tokens_per_usd"])
    print(f"most tokens per dollar: {best['workers']} workers")
    if tuple(arguments.workers) == SIZES:
        write_result("fleet_size", {"best": best["workers"], "rows": rows})
        draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
