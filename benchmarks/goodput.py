"""Accepted tokens as a share of the decoding capacity of preemptible machines.

    python -m benchmarks.goodput [--hours 2] [--trace FILE ...] [--mode MODE ...] [--orders]

The real controller (training loop, fleet, dispatcher) runs in virtual time with simulated engines of constant speed,
independent of this machine's noise. Machines follow synthetic markets with the counts, bursts and times to eviction of
two Bamboo traces, or given capacity traces. Modes:

- *batches*: finite batches at lag 0, as a run has them. The trainer takes no time, so what is lost is lost to
  generating. At the end of a batch there is less to generate than slots; the *ideal* is the best that any order and any
  migration could do with the same lengths and machines, if nothing but decoding took time.
- *tail batching*: the same with `schedule.tail = "batching"`; its nominal slots are those of the machines that a market
  has on average. The ideal is that of the groups that were trained on, batch by batch.
- *endless*: lag 1, groups in the order in which they finish: there is always more to generate.
- *endless, keep_cache*: the same with `schedule.keep_cache`: no keys and values are computed again after new weights.

Accepted are tokens of finished samples; those in unfinished ones at the end are a figure of their own. The benchmark
fails if machines were evicted with samples on them and none migrated, if a sample that lost its machine waited although
slots were free, or behind an endless supply for more than 400 s, if one lost tokens, or if one on a machine got none
for 400 s. `--orders` compares two orders of waiting samples at lag 0 over three seeds: longest first, evicted first.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.market_statistics import synthetic_trace
from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.slot_time import DONE, TimedEngine, Watch, shares
from tests.doubles.costs import ConstantEngine, ConstantTrainer
from tidemill.config.schema import RunSpec
from tidemill.controller import run as run_module
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.samples import Sample
from tidemill.core.records import Record
from tidemill.pool.build_provider import trace_timetable
from tidemill.pool.synthetic import Market
from tidemill.pool.traces import CapacityTrace, read_trace
from tidemill.sim import simulation as simulation_module
from tidemill.sim.costs import WeightCosts
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.simulated_worker import SimulatedHost
from tidemill.sim.simulation import ComponentFactories, CostModel, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.events import EVICTION, MIGRATION

TARGET, STALL_S, LONGEST_WAIT_S, LONGEST_PAUSE_S = 0.97, 30.0, 400.0, 400.0
ENDLESS = {"max_policy_lag": 1, "membership": "first_finished"}
MODES: dict[str, dict[str, Any]] = {
    "batches": {},
    "tail batching": {"tail": "batching"},
    "endless": ENDLESS,
    "endless, keep_cache": {**ENDLESS, "keep_cache": True},
}
"""Keys of [schedule] by mode."""
TARGETS = {"endless, keep_cache": 0.96, "tail batching": 0.9}
"""Of the modes whose target is not TARGET."""
SEEDS = (7, 8, 9)
# Counts, times to eviction and return, and burst sizes of two Bamboo traces (g4dn in us-east-1c and us-east-1d).
MARKETS = {
    "like Bamboo us-east-1c": Market(
        machines=12,
        present=4,
        mean_time_to_eviction_s=8457,
        mean_time_to_return_s=922,
        bursts=(1.0, 0.486, 0.286, 0.2, 0.114, 0.114, 0.086, 0.057, 0.057, 0.029),
        arrivals=(1.0, 0.8, 0.65, 0.55, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1),
    ),
    "like Bamboo us-east-1d": Market(
        machines=12,
        present=2,
        mean_time_to_eviction_s=2222,
        mean_time_to_return_s=2272,
        bursts=(1.0, 0.765, 0.588, 0.412, 0.176, 0.059),
        arrivals=(1.0, 1.0, 0.733, 0.4, 0.267, 0.2, 0.133, 0.067),
    ),
}
# An engine like one small GPU with an 8B model; boot and pull as with a warm image and a fast network.
SPEED = ConstantEngine(slots=64, plateau=64, step_s=0.025, prefill_tokens_per_s=8000.0, boot_s=20.0)
WEIGHTS = WeightCosts(pull_s=5.0)
TICK_S = 1.0
PROMPTS, GROUP = 512, 8
MEAN_TOKENS, LONGEST = 1200, 8192
PROMPT_TOKENS = 256


class GeometricLengths(Record):
    """Geometric, cut at the longest."""

    def quantile(self, share: float) -> int:
        return min(LONGEST, 1 + int(-math.log1p(-share) * MEAN_TOKENS))


WORK = Workload(lengths=GeometricLengths(), prompt_tokens=PROMPT_TOKENS)


def spec_of(mode: str, seed: int, trace: CapacityTrace | None = None) -> RunSpec:
    schedule = MODES[mode]
    if mode == "tail batching" and trace is not None:
        schedule = {"nominal_slots": round(mean_machines(trace) * SPEED.slots), **schedule}
    return RunSpec.model_validate(
        {
            "run": {"seed": seed},
            "batch": {
                "prompts": PROMPTS,
                "group_size": GROUP,
                "order": "arrival" if "max_policy_lag" in schedule else "canonical",
            },
            "sampling": {"max_new_tokens": LONGEST},
            "engine": {"slots": SPEED.slots},
            "schedule": schedule,
            "trainer": {"steps": 10_000},
            "checkpoint": {"every_steps": 0},
            "eval": {"every_steps": 0},
            "fleet": {"seeding": False},
            "pool": {"kind": "synthetic"},
        }
    )


def measure(trace: CapacityTrace, duration_s: float, mode: str, seed: int) -> dict[str, Any]:
    """Figures of a run on the machines of a trace.

    Raises:
        RuntimeError: machines with samples were evicted and nothing migrated, or a sample was not continued.
    """
    hosts: list[SimulatedHost] = []
    watches: list[Watch] = []
    batches: list[list[int]] = []  # lengths of the samples of each batch

    class Seen(InFlight):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            watches[0].in_flight = watches[0].in_flight or self

    class Recording(Ledger):
        async def record_batch(
            self, in_flight: InFlight, step: int, positions: Sequence[int], *, reward_mean: float | None
        ) -> list[Sample]:
            samples = await super().record_batch(in_flight, step, positions, reward_mean=reward_mean)
            batches.append([sample.length for sample in samples])
            return samples

    class Host(SimulatedHost):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            hosts.append(self)
            watches.append(Watch(more["clock"], end_s=duration_s, host=self))
            self._watching = asyncio.create_task(watches[0].run())

        async def close(self) -> None:
            self._watching.cancel()
            await super().close()

    model = CostModel(trainer=ConstantTrainer(tokens_per_s=math.inf), weights=WEIGHTS, shares_gpus=False, worker=SPEED)
    factories = ComponentFactories(host=Host, engine=TimedEngine, tick_s=TICK_S, final_report=False)
    timetable = trace_timetable(trace, start_s=0.0, notice_s=0.0, seed=seed)
    with patch.object(run_module, "InFlight", Seen), patch.object(simulation_module, "Ledger", Recording):
        run = simulate_run(spec_of(mode, seed, trace), model, WORK, timetable, seconds=duration_s, factories=factories)
    (watch,) = watches
    in_flight = watch.in_flight
    assert in_flight is not None
    engines = {lease: worker.engine for lease, worker in hosts[0].workers.items()}
    leases = {one.lease_id: (one.start_s, min(one.end_s, duration_s)) for one in run.preemptible}
    check_migrations(run, watch, endless="max_policy_lag" in MODES[mode])
    unfinished = sum(sample.length for sample in in_flight if sample.state not in DONE)
    finished = sum(sample.length for sample in in_flight if sample.state in DONE)
    accepted = run.tokens_trained + (finished if mode != "tail batching" else 0)  # which may be discarded
    machine_s = sum(end_s - start_s for start_s, end_s in leases.values())
    steps = [line.elapsed_s for line in run.metrics if line.step > 0]
    step_s = [after - before for before, after in zip([0.0, *steps], steps, strict=False)]
    found = {
        "target": TARGETS.get(mode, TARGET),
        "goodput": accepted / (machine_s * SPEED.peak_tokens_per_s),
        "shares": shares(engines, leases, watch),  # type: ignore[arg-type]
        "hours": duration_s / 3600,
        "steps": len(steps),
        "step_s": fmean(step_s) if step_s else None,
        "half_of_groups_s": fmean(watch.half_done_s) if watch.half_done_s else None,
        "longest_wait_s": watch.longest_wait_s,
        "longest_pause_s": watch.longest_pause_s,
        "held_tokens_peak": watch.held_peak,
        "workers_mean": machine_s / duration_s,
        "evictions": run.evictions,
        "migrated_samples": migrated(run),
        "tokens_accepted": accepted,
        "tokens_unfinished": unfinished,
        "tokens_recomputed": run.tokens_recomputed,
    }
    if "max_policy_lag" not in MODES[mode]:
        found["tokens_discarded"] = run.total("tokens_discarded")
        found["of_ideal"] = ideal_s(trace, batches[: len(steps)]) / steps[-1]
    return found


def mean_machines(trace: CapacityTrace) -> float:
    ends = [at for at, _ in trace.steps[1:]] + [trace.end_s]
    return sum(n * (end_s - at) for (at, n), end_s in zip(trace.steps, ends, strict=True)) / trace.end_s


def migrated(run: SimulatedRun) -> int:
    return sum(int(event["samples"]) for event in run.events if event["event"] == MIGRATION)


def check_migrations(run: SimulatedRun, watch: Watch, *, endless: bool) -> None:
    """Raises RuntimeError: machines with samples were evicted and nothing migrated, or a sample lost tokens or
    stood still."""
    lost = [event for event in run.events if event["event"] == EVICTION and event["samples"]]
    if lost and not migrated(run):
        raise RuntimeError(f"{len(lost)} machines with samples were evicted, and none migrated")
    if (stalled_s := watch.longest_stall_s) > STALL_S:
        raise RuntimeError(f"samples that lost their machine waited {stalled_s:.0f} s although slots were free")
    # A batch ends only with all its samples: there, one may wait until slots become free.
    if (waited_s := watch.longest_wait_s) > LONGEST_WAIT_S and endless:
        raise RuntimeError(f"a sample that lost its machine waited {waited_s:.0f} s for another")
    if watch.dropped_tokens:
        raise RuntimeError(f"unfinished samples lost {watch.dropped_tokens} tokens")
    if (pause_s := watch.longest_pause_s) > LONGEST_PAUSE_S:
        raise RuntimeError(f"a sample on a machine got no token for {pause_s:.0f} s")


def ideal_s(trace: CapacityTrace, batches: Sequence[Sequence[int]]) -> float:
    """The least time in which the machines of a trace can decode batches one after the other: a batch ends no earlier
    than its longest sample, and than all slots together have made its tokens."""
    now_s = 0.0
    for lengths in batches:
        work = sum(lengths) * SPEED.step_s
        now_s = max(now_s + max(lengths) * SPEED.step_s, _after(trace, now_s, work))
    return now_s


def _after(trace: CapacityTrace, start_s: float, slot_s: float) -> float:
    """When all slots have worked for `slot_s` since `start_s`."""
    ends = [at for at, _ in trace.steps[1:]] + [math.inf]
    for (_, count), end_s in zip(trace.steps, ends, strict=True):
        here_s = max(0.0, end_s - start_s) if count else 0.0
        if count and end_s > start_s and slot_s <= here_s * count * SPEED.slots:
            return start_s + slot_s / (count * SPEED.slots)
        if end_s > start_s:
            slot_s -= here_s * count * SPEED.slots if count else 0.0
            start_s = end_s
    return math.inf


def evicted_first(self: Dispatcher, sample: Sample) -> None:
    """The other order: samples that have lost a machine go before those that have not begun."""
    waits = not sample.turns.returning and sample.attempt == 0
    heapq.heappush(self._queue, (waits, sample.from_version, 0, -self._expected(sample), sample.ordinal))


def orders(traces: Sequence[tuple[str, CapacityTrace, float]], hours: float) -> list[dict[str, Any]]:
    """Both orders at lag 0, on each market and for each seed."""
    found = []
    for name, market in MARKETS.items():
        for seed in SEEDS:
            trace = synthetic_trace(market, seed=seed, duration_s=hours * 3600)
            for order in ("longest first", "evicted first"):
                patched = (
                    patch.object(Dispatcher, "_push", evicted_first) if order == "evicted first" else nullcontext()
                )
                with patched:
                    figures = measure(trace, hours * 3600, "batches", seed)
                kept = ("goodput", "of_ideal", "step_s", "half_of_groups_s", "held_tokens_peak", "migrated_samples")
                found.append({"market": name, "seed": seed, "order": order, **{key: figures[key] for key in kept}})
                print(found[-1], file=sys.stderr)
    return found


def cases(options: argparse.Namespace) -> list[tuple[str, CapacityTrace, float]]:
    longest_s = options.hours * 3600
    found = [
        (name, synthetic_trace(market, seed=7, duration_s=longest_s), longest_s) for name, market in MARKETS.items()
    ]
    for path in options.trace:
        trace = read_trace(path)
        trace = trace.since(next(t for t, n in trace.steps if n))
        found.append((path.stem, trace, min(trace.end_s, longest_s)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of each trace, at most")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="an additional capacity trace")
    parser.add_argument("--mode", action="append", choices=MODES, help="only these modes; nothing is written")
    parser.add_argument("--orders", action="store_true", help="also compare orders of waiting samples at lag 0")
    options = parsed(parser)
    results: dict[str, dict[str, Any]] = {}
    for name, trace, duration_s in cases(options):
        for mode in options.mode or MODES:
            began = time.perf_counter()
            figures = measure(trace, duration_s, mode, seed=7)
            results[f"{name}, {mode}"] = figures | {"computed_s": time.perf_counter() - began}
            print(name, mode, figures, file=sys.stderr)
    show(results)
    if options.mode:
        return 0 if all(reached(figures) for figures in results.values()) else 1
    compared = orders(cases(options), options.hours) if options.orders else []
    write_result("goodput", {"speed": repr(SPEED), "target": TARGET, "cases": results, "orders": compared})
    return 0 if all(reached(figures) for figures in results.values()) else 1


def reached(figures: dict[str, Any]) -> bool:
    """In batches the share of the ideal counts: the end of a batch leaves slots empty in any order."""
    return bool(figures.get("of_ideal", figures["goodput"]) >= figures["target"])


def show(results: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(results.values()))["shares"])
    table = Table("case", "workers", "evicted", "moved", "goodput", "of the ideal", "target", *names)
    for name, figures in results.items():
        ideal = f"{figures['of_ideal']:.1%}" if "of_ideal" in figures else ""
        table.add_row(
            name,
            f"{figures['workers_mean']:.1f}",
            str(figures["evictions"]),
            str(figures["migrated_samples"]),
            f"{figures['goodput']:.1%}",
            ideal,
            f"{figures['target']:.0%} {'reached' if reached(figures) else 'MISSED'}",
            *(f"{figures['shares'][share]:.2%}" for share in names),
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main())
