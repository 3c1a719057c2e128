"""When preemptible machines pay: the scenario `rlboost-14b` with other lengths, lags, evictions and prices.

    python -m benchmarks.simulator.when_it_pays

Reserved machines alone on policy (`colocated`) and with a lag (`bounded_staleness`), against the same machines with
preemptible workers (`tidemill`), and with Tidemill's schedule but without preemptible workers. Prices change only the
bill, so one simulation gives the figures of all prices.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from tidemill.config.load import load_spec
from tidemill.sim.comparison import figures, plan_scenario, simulate_planned

HOUR_S = 3600.0
LENGTHS = {4000: (14336, 30), 1000: (4096, 60), 400: (1024, 120)}
"""Mean completion tokens: their limit, and steps, so that booting does not count much."""
SCHEDULES = ("colocated", "bounded_staleness", "tidemill")
VARIANTS = {
    "lag 0": ["--schedule.max_policy_lag", "0"],
    "evicted every 100 s": ["--pool.mean_time_to_eviction_s", "100"],
    "none preemptible": ["--pool.kind", "static", "--pool.workers", "0"],
    "none preemptible, lag 0": ["--pool.kind", "static", "--pool.workers", "0", "--schedule.max_policy_lag", "0"],
}
PRICES = (5.32, 10.64, 13.5, 20.95)
"""Dollars per hour of a preemptible machine of two GPUs; two reserved GPUs cost 20.95."""


def simulated(*overrides: str, schedules: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The figures of `tidemill simulate` by schedule."""
    names = "[" + ", ".join(f'"{name}"' for name in schedules) + "]"
    spec = load_spec(["@rlboost-14b", *overrides, "--simulation.schedules", names], purpose="read")
    scenario = plan_scenario(spec)
    return {one.name: figures(simulate_planned(one, scenario.workload)) for one in scenario.planned}


def of_length(tokens: int) -> list[str]:
    limit, steps = LENGTHS[tokens]
    return [
        *("--simulation.completion_tokens", str(tokens)),
        *("--sampling.max_new_tokens", str(limit)),
        *("--trainer.steps", str(steps)),
    ]


def at_price(run: dict[str, Any], reserved_usd_per_hour: float, usd_per_hour: float) -> float:
    """Trained tokens per dollar if a preemptible machine had this price."""
    cost = run["seconds"] / HOUR_S * (reserved_usd_per_hour + run["workers_mean"] * usd_per_hour)
    return float(run["tokens_trained"] / cost)


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    lengths: list[dict[str, Any]] = []
    for tokens, (limit, steps) in LENGTHS.items():
        runs = simulated(*of_length(tokens), schedules=SCHEDULES)
        lengths.append({"tokens": tokens, "limit": limit, "steps": steps, "schedules": runs})
        print(f"{tokens} tokens simulated", file=sys.stderr, flush=True)
    longest = lengths[0]["schedules"]
    variants = {}
    for name, overrides in VARIANTS.items():
        variants[name] = simulated(*of_length(4000), *overrides, schedules=("tidemill",))["tidemill"]
    reserved = longest["colocated"]
    usd_per_hour = reserved["cost_usd"] / reserved["seconds"] * HOUR_S
    prices = []
    for price in PRICES:
        gain = at_price(longest["tidemill"], usd_per_hour, price) / reserved["tokens_per_usd"]
        prices.append({"usd_per_hour": price, "tokens_per_usd_ratio": gain})
    table = Table("tokens", "steps", *SCHEDULES)
    for row in lengths:
        costs = [f"${row['schedules'][name]['cost_usd']:.2f}" for name in SCHEDULES]
        table.add_row(str(row["tokens"]), str(row["steps"]), *costs)
    Console(width=100).print(table)
    content = {"reserved_usd_per_hour": usd_per_hour, "lengths": lengths, "variants": variants, "prices": prices}
    write_result("when_it_pays", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
