"""Accepted tokens as a share of the decoding capacity of preemptible machines.

    python -m benchmarks.goodput [--hours 4] [--trace FILE ...]

The real controller (fleet, dispatcher, ledger with its journal) runs in virtual time with simulated engines of constant
speed, independent of this machine's noise. Machines follow synthetic markets with the counts, bursts and times to
eviction of two Bamboo traces, or given capacity traces. There is always more to generate than the machines can do: the
benchmark measures the cost of evictions, queues, prefills and migration, not of the end of a batch. The ideal is every
machine at its peak speed while it is leased and ready; a second figure assumes that booting and pulling take no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import RESULTS, write_result
from benchmarks.origin import parsed
from tests.doubles.costs import ConstantEngine
from tests.doubles.journal import MemoryJournal
from tidemill.config.pool import FleetConfig
from tidemill.controller.collector import collect_samples
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import TRAIN, InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.core.protocols import LoopClock
from tidemill.core.records import (
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    SamplingParams,
    pack_tokens,
)
from tidemill.pool.build_provider import trace_timetable
from tidemill.pool.provider import ScheduledProvider
from tidemill.pool.synthetic import Market, synthetic_trace
from tidemill.pool.traces import CapacityTrace, read_trace
from tidemill.sim.costs import WeightCosts
from tidemill.sim.simulated_trainer import SimulatedPublisher
from tidemill.sim.simulated_worker import SimulatedHost
from tidemill.sim.virtual_time import run_virtual
from tidemill.sim.workload import BlankCompletions, NoText, SimulatedScorer
from tidemill.telemetry.recorder import NullTelemetry

TARGET = 0.95
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
GROUP = 8
LONGEST = 8192
PROMPT_TOKENS = 256
VERSION = PolicyVersion(number=1, digest="measured")


def completion_length(sample_id: SampleId) -> int:
    """Geometric, mean 1,200 tokens."""
    return min(LONGEST, 1 + int(random.Random(sample_id.key).expovariate(1 / 1200)))


async def measure(trace: CapacityTrace, duration_s: float, seed: int) -> dict[str, Any]:
    clock, telemetry = LoopClock(), NullTelemetry(lambda _: None)
    timetable = trace_timetable(trace, start_s=0.0, notice_s=0.0, seed=seed)
    host = SimulatedHost(SPEED, WEIGHTS, completions=BlankCompletions(completion_length), clock=clock, tick_s=TICK_S)
    fleet = Fleet(
        None,
        slots=SPEED.slots,
        clock=clock,
        telemetry=telemetry,
        config=FleetConfig(seeding=False),
        provider=ScheduledProvider(timetable, clock=clock, session=1),
        host=host,
        publisher=SimulatedPublisher(WEIGHTS),
    )
    ideal = ideal_tokens(trace, duration_s)
    prompts = int(1.2 * ideal / 1200 / GROUP) + 100
    members = [
        Prompt(prompt_id=f"p{at}", token_ids=pack_tokens([at] * PROMPT_TOKENS), text="", answer="")
        for at in range(prompts)
    ]
    plan = SamplingPlan(purpose=TRAIN, run_seed=0, group_size=GROUP, sampling=SamplingParams(max_new_tokens=LONGEST))
    ledger, in_flight = Ledger(MemoryJournal(), round_size=prompts), InFlight(plan, version_number=VERSION.number)
    groups = plan_groups([(0, prompt) for prompt in members], first_position=0, from_version=VERSION.number)
    await ledger.open(in_flight, groups, members)
    rollout = RolloutContext(
        fleet=fleet,
        ledger=ledger,
        scorer=SimulatedScorer(lambda _: 0.0, lambda _: Reward(value=0.0)),
        codec=NoText(),
        telemetry=telemetry,
        clock=clock,
        stop=asyncio.Event(),
    )
    async with fleet:
        await fleet.publishing.publish(VERSION)
        async with collect_samples(in_flight, rollout) as samples:
            with suppress(TimeoutError):
                async with asyncio.timeout(duration_s):
                    async for _ in samples:
                        pass
            assert not in_flight.all_scored, "there was not enough to generate"
            tally, happened, joins = in_flight.counters, fleet.event_log.counters, len(host.workers)
    ready = ideal - joins * (SPEED.boot_s + WEIGHTS.pull_s) * SPEED.peak_tokens_per_s
    made, accepted = sum(worker.engine.generated for worker in host.workers.values()), tally.tokens_accepted
    return {
        "goodput": accepted / ready,
        "goodput_of_leased": accepted / ideal,
        "hours": duration_s / 3600,
        "evictions": happened.evictions,
        "joins": joins,
        "workers_mean": ideal / SPEED.peak_tokens_per_s / duration_s,
        "migrations": happened.migrations,
        "tokens_accepted": accepted,
        "tokens_made_and_not_accepted": made - accepted,
        "tokens_recomputed": tally.tokens_recomputed,
    }


def ideal_tokens(trace: CapacityTrace, duration_s: float) -> float:
    """Every machine at its peak speed while it is leased."""
    machine_s = 0.0
    steps = [(t, n) for t, n in trace.steps if t < duration_s]
    for (start_s, count), (end_s, _) in zip(steps, [*steps[1:], (duration_s, 0)], strict=True):
        machine_s += count * (end_s - start_s)
    return machine_s * SPEED.peak_tokens_per_s


def cases(arguments: argparse.Namespace) -> list[tuple[str, CapacityTrace, float]]:
    longest_s = arguments.hours * 3600
    found = [
        (name, synthetic_trace(market, seed=7, duration_s=longest_s), longest_s) for name, market in MARKETS.items()
    ]
    for path in arguments.trace:
        trace = read_trace(path)
        trace = trace.since(next(t for t, n in trace.steps if n))
        found.append((path.stem, trace, min(trace.end_s, longest_s)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0, help="of each trace, at most")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="an additional capacity trace")
    arguments = parsed(parser)
    table = Table("trace", "hours", "workers", "evictions", "moved", "of the ideal", "boots included", "target")
    results = {}
    for name, trace, duration_s in cases(arguments):
        began = time.perf_counter()
        result = run_virtual(measure(trace, duration_s, seed=7))
        results[name] = result | {"computed_s": time.perf_counter() - began}
        reached = "reached" if result["goodput"] >= TARGET else "missed"
        table.add_row(
            name,
            f"{result['hours']:.1f}",
            f"{result['workers_mean']:.1f}",
            str(result["evictions"]),
            str(result["migrations"]),
            f"{result['goodput']:.1%}",
            f"{result['goodput_of_leased']:.1%}",
            f"{TARGET:.0%} {reached}",
        )
        print(name, result, file=sys.stderr)
    Console(width=140).print(table)
    write_result("goodput", {"speed": repr(SPEED), "cases": {**measured_before(), **results}})
    return 0


def measured_before() -> dict[str, Any]:
    """Results of traces not given this time, at the same speed."""
    path = RESULTS / "goodput.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["cases"] if found.get("speed") == repr(SPEED) else {}


if __name__ == "__main__":
    sys.exit(main())
