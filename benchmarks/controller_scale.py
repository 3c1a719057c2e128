"""The controller's share of a core with 1,000 workers of 64 samples and one report per worker and second.

    python -m benchmarks.controller_scale [--workers 1000] [--seconds 20] [--rounds 5]
    python -m benchmarks.controller_scale --turns 4

The process is pinned to one core. Three measurements:

- *The whole controller* in real time: fleet, dispatcher, mailbox, ledger with its SQLite journal, scoring and
dispatching. Share of the core = CPU seconds (all threads) per second's worth of deltas, without the time to create the
synthetic messages (`benchmarks/synthetic_fleet.py`); decoding them counts. Measure on a quiet machine: a late
controller reads more messages at a time, which is cheaper (the benchmark fails if `kept_up` is not about 1).
- *The ledger's path*: decoding, applying and journalling such messages in a loop, by number of workers. The cost per
delta must not depend on it.
- *Memory* of a batch in flight (tracemalloc), including prompts, per completion token.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from benchmarks.synthetic_fleet import (
    TICK_S,
    Apart,
    Judge,
    Mute,
    SyntheticEnvironments,
    SyntheticPool,
    SyntheticWorker,
    make_lease,
)
from tidemill.controller.collector import SampleCollector, collect_samples
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import TRAIN, InFlight, SamplingPlan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.turns import AgentLimits
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion, Prompt, SamplingParams, WorkerReport, pack_tokens
from tidemill.jobs.journal import SqliteJournal
from tidemill.runtime.compute import collected_rarely
from tidemill.telemetry.recorder import NullTelemetry

SLOTS = 64
GROUP = 16
TOKENS = 32  # per sample and second
PROMPT_TOKENS = 128
CALL_S = 1.0  # of a turn's call
SETTLING_S = 30.0  # until episodes of several turns end
VERSION = PolicyVersion(number=3, digest="0123456789abcdef0123456789abcdef")
TARGET_SHARE = 0.5
TARGET_SHARE_TURNS = 0.55  # with samples of several turns
TARGET_BYTES = 16.0
TARGET_GROWTH = 1.5  # limit of the cost per delta with the most workers relative to the fewest
KEPT_UP = 0.98  # share of messages that must arrive in time
PATH_TICKS = 8
ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(WorkerReport)


async def in_flight_of(ledger: Ledger, samples: int, agent: AgentLimits | None = None) -> InFlight:
    """`samples` started samples."""
    prompts = [
        Prompt(prompt_id=f"synthetic/{index:06d}", token_ids=pack_tokens(range(PROMPT_TOKENS)), text="", answer="")
        for index in range(samples // GROUP)
    ]
    sampling = SamplingParams(max_new_tokens=4096)
    plan = SamplingPlan(purpose=TRAIN, run_seed=0, group_size=GROUP, sampling=sampling, agent=agent)
    in_flight = InFlight(plan, version_number=VERSION.number)
    groups = plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=VERSION.number)
    await ledger.open(in_flight, groups, prompts)
    return in_flight


async def whole_controller(folder: Path, *, workers: int, seconds: float, turns: int = 1) -> dict[str, float]:
    """Run it for some seconds with 1.5 times as many samples as slots, once all are assigned and all workers have
    reported; about 3 % finish every second.

    With several turns there are 3 times as many samples as slots. A sample has about as many generated tokens, and a
    call and an observation after each turn.
    """
    ticks = (2, 60) if turns == 1 else (1, max(1, 60 // turns))
    pool = SyntheticPool(workers=workers, slots=SLOTS, tokens=TOKENS, ticks=ticks)
    agent = AgentLimits(context_tokens=8192) if turns > 1 else None
    environments = SyntheticEnvironments(turns=turns, seconds=CALL_S, tokens=TOKENS) if turns > 1 else None
    samples, settling_s = (workers * SLOTS * 3 // 2, 3 * TICK_S) if turns == 1 else (workers * SLOTS * 3, SETTLING_S)
    journal = await SqliteJournal.open(folder / "ledger.sqlite")
    ledger, telemetry, clock = Ledger(journal, round_size=samples // GROUP), NullTelemetry(), LoopClock()
    fleet = Fleet(None, slots=SLOTS, clock=clock, telemetry=telemetry, provider=pool, host=pool, publisher=pool)
    async with fleet:
        await fleet.publishing.publish(VERSION)
        async with asyncio.timeout(60.0):
            while len(fleet.serving(VERSION.number)) < workers:  # noqa: ASYNC110 - nobody else asks
                await asyncio.sleep(0.1)
        in_flight = await in_flight_of(ledger, samples, agent)
        rollout = RolloutContext(
            fleet=fleet, ledger=ledger, scorer=Judge(), codec=Mute(), telemetry=telemetry, clock=clock,
            stop=asyncio.Event(), environments=environments, agent=agent,
        )  # fmt: skip
        async with collect_samples(in_flight, rollout) as collection:
            consumer = asyncio.create_task(consume(collection))
            await asyncio.sleep(settling_s)
            answers = environments.answers if environments else 0
            figures = await measured(in_flight, pool, seconds)
            if environments:
                figures["turns_per_s"] = (environments.answers - answers) / seconds
            consumer.cancel()
            await asyncio.gather(consumer, return_exceptions=True)
    await journal.close()
    return figures


async def consume(collection: SampleCollector) -> None:
    async for _ in collection:
        pass


async def measured(in_flight: InFlight, pool: SyntheticPool, seconds: float) -> dict[str, float]:
    apart = pool.apart
    wall_s, cpu_s, apart_s, deltas = time.perf_counter(), time.process_time(), apart.cpu_s, apart.deltas
    scored, accepted, late_s = in_flight.scored, in_flight.counters.tokens_accepted, []
    while time.perf_counter() - wall_s < seconds:
        due_s = time.perf_counter() + 0.1
        await asyncio.sleep(0.1)
        late_s.append(time.perf_counter() - due_s)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s - (apart.cpu_s - apart_s)
    deltas = apart.deltas - deltas
    due = pool.workers * SLOTS / TICK_S  # deltas per second; fewer if other processes need the core
    return {
        "share_of_a_core": due * cpu_s / deltas,
        "us_per_delta": 1e6 * cpu_s / deltas,
        "deltas_per_s": deltas / wall_s,
        "kept_up": deltas / wall_s / due,
        "tokens_per_s": (in_flight.counters.tokens_accepted - accepted) / wall_s,
        "finished_per_s": (in_flight.scored - scored) / wall_s,
        "loop_late_ms_median": 1e3 * statistics.median(late_s),
        "loop_late_ms_max": 1e3 * max(late_s),
        "ignored": float(in_flight.counters.ignored.total()),
    }


async def make_workers(in_flight: InFlight, workers: int) -> list[SyntheticWorker]:
    """Workers that hold the samples and finish none."""
    crew, samples = [], list(in_flight)
    for index in range(workers):
        lease = make_lease(index)
        worker = SyntheticWorker(lease, Apart(), SLOTS, TOKENS, (10**6, 10**6), random.Random(index), VERSION)
        await worker.submit(in_flight.assign(lease.lease_id, samples[index * SLOTS : (index + 1) * SLOTS]))
        crew.append(worker)
    return crew


async def tick(ledger: Ledger, in_flight: InFlight, blobs: Sequence[bytes]) -> None:
    """Process every worker's message, in chunks of 10 ms worth of messages of 1,000 workers."""
    for at in range(0, len(blobs), 10):
        await ledger.accept(in_flight, [DECODER.decode(blob) for blob in blobs[at : at + 10]])


async def ledger_path(path: Path, *, workers: int) -> list[float]:
    """CPU seconds of decoding, applying and journalling, per delta: one figure for each tick of a fresh journal."""
    journal = await SqliteJournal.open(path)
    ledger = Ledger(journal, round_size=workers * SLOTS // GROUP)
    in_flight = await in_flight_of(ledger, workers * SLOTS)
    crew = await make_workers(in_flight, workers)
    costs = []
    for _ in range(PATH_TICKS):
        blobs = [ENCODER.encode(worker.report()) for worker in crew]
        began_s = time.process_time()
        await tick(ledger, in_flight, blobs)
        costs.append((time.process_time() - began_s) / (workers * SLOTS))
    await journal.close()
    assert in_flight.counters.tokens_accepted == workers * SLOTS * TOKENS * PATH_TICKS, "some deltas were not applied"
    return costs


def ledger_costs(folder: Path, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Microseconds per delta by number of workers; the sizes take turns."""
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            path = folder / f"{size}.sqlite"
            costs[size] += asyncio.run(ledger_path(path, workers=size))
            path.unlink()
    return {size: 1e6 * statistics.median(figures) for size, figures in costs.items()}


async def bytes_kept(workers: int, length: int) -> int:
    """Memory of a batch with samples of this length. The requests belong to the workers."""
    gc.collect()
    tracemalloc.start()
    ledger = Ledger(None)
    in_flight = await in_flight_of(ledger, workers * SLOTS)
    crew = await make_workers(in_flight, workers)
    while in_flight.samples[0].length < length:
        for worker in crew:
            await tick(ledger, in_flight, [ENCODER.encode(worker.report())])
    del crew, worker
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


def memory(workers: int) -> dict[int, float]:
    """Bytes per token by length of the samples."""
    return {
        length: asyncio.run(bytes_kept(workers, length)) / (workers * SLOTS * length)
        for length in (128, 256, 512, 1024)
    }


def check_load(controller: Mapping[str, float]) -> None:
    """Raises RuntimeError: messages were late."""
    if controller["kept_up"] < KEPT_UP:
        raise RuntimeError(
            f"only {controller['kept_up']:.1%} of the messages came in time: other processes use the core, or the "
            "controller is too slow for it"
        )


def told(figures: Mapping[Any, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1, help="more than 1: measure only the whole controller with them")
    options = parsed(parser)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sizes = [*(size for size in (10, 100) if size < options.workers), options.workers]
    with tempfile.TemporaryDirectory() as name:
        # First, in a fresh process: the heap left by the other part costs time.
        with collected_rarely():  # as the driver of a cluster does
            whole = asyncio.run(
                whole_controller(Path(name), workers=options.workers, seconds=options.seconds, turns=options.turns)
            )
        check_counts("the controller", finished_samples=whole["finished_per_s"])
        if options.turns > 1:
            check_counts("the controller", turns=whole["turns_per_s"])
            print(f"the whole controller, {options.workers} workers, {options.turns} turns a sample: {told(whole)}")
            figures = {"workers": options.workers, "slots": SLOTS, "tokens_per_delta": TOKENS, "call_s": CALL_S}
            kept_up = whole["share_of_a_core"] <= TARGET_SHARE_TURNS and whole["kept_up"] >= KEPT_UP
            figures |= {"turns": options.turns, "controller": whole, "reached": kept_up}
            write_result("controller_turns", figures)
            return exit_code(figures)
        check_load(whole)
        costs = ledger_costs(Path(name), sizes, options.rounds)
    kept = memory(min(20, options.workers))
    growth = costs[sizes[-1]] / costs[sizes[0]]
    print(f"the whole controller, {options.workers} workers: {told(whole)}")
    print(f"the ledger's path, microseconds per delta by workers: {told(costs)} (grows {growth:.2f} times)")
    print(f"memory, bytes per token by length of the samples: {told(kept)}")
    reached = {
        f"under {TARGET_SHARE:.0%} of a core": whole["share_of_a_core"] < TARGET_SHARE,
        f"under {TARGET_BYTES:g} bytes per token": max(kept.values()) < TARGET_BYTES,
        f"cost per delta grows less than {TARGET_GROWTH:g} times": growth < TARGET_GROWTH,
    }
    for target, yes in reached.items():
        print(f"{target}: {'reached' if yes else 'MISSED'}")
    figures = {"workers": options.workers, "slots": SLOTS, "tokens_per_delta": TOKENS, "tick_s": TICK_S}
    content = {"controller": whole, "us_per_delta_by_workers": costs, "bytes_per_token_by_length": kept}
    write_result("controller_scale", {**figures, **content, "reached": reached})
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
