"""The command line of fault simulation.

python -m tests.fault_simulation [--seeds 10000] [--first 0] [--guarded | --tails | --ranked | --chunks] [--processes 2]
python -m tests.fault_simulation --seed 1234 [--log]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, islice
from typing import TypeAlias

import msgspec

from tests.fault_simulation.chunks import simulate_chunk_faults
from tests.fault_simulation.scenario import draw, has_guard, has_tail, has_worker_ranks
from tests.fault_simulation.seed_run import Outcome, Simulation, simulate_faults

CHUNK = 20
Simulate: TypeAlias = Callable[[int], Outcome]
CHUNKS_REPLAY = "python -m tests.fault_simulation --seed {seed} --chunks"
REPLAY = "python -m tests.fault_simulation --seed {seed} --log"


def outcomes(seeds: Sequence[int], simulate: Simulate) -> list[Outcome]:
    return [simulate(seed) for seed in seeds]


def many(seeds: Sequence[int], processes: int, simulate: Simulate) -> Iterator[Outcome]:
    """Outcomes in order of completion."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(outcomes, chunk, simulate) for chunk in chunks]):
            yield from done.result()


def run_many(seeds: Sequence[int], processes: int, simulate: Simulate = simulate_faults) -> int:
    began_s, told_s, failed = time.monotonic(), 0.0, list[Outcome]()
    looks, virtual_s, lives = 0, 0.0, 0
    for number, outcome in enumerate(many(seeds, processes, simulate), start=1):
        looks, virtual_s, lives = looks + outcome.looks, virtual_s + outcome.virtual_s, lives + outcome.lives
        if outcome.violation:
            failed.append(outcome)
            replay = CHUNKS_REPLAY if simulate is simulate_chunk_faults else REPLAY
            print(
                f"\nseed {outcome.seed}: {outcome.violation}\n  replay: {replay.format(seed=outcome.seed)}", flush=True
            )
        spent_s = time.monotonic() - began_s
        if spent_s - told_s >= (1.0 if sys.stderr.isatty() else 30.0):
            told_s = spent_s
            _tell_progress(number, len(seeds), len(failed), spent_s)
    spent_s = time.monotonic() - began_s
    counts = f"{lives} lives of the controller", f"samples in flight checked {looks} times"
    if simulate is simulate_chunk_faults:
        counts = f"{lives} leases", f"{looks} chunks computed"
    print(
        f"{len(seeds)} seeds in {spent_s:.0f} s on {processes} processes: {counts[0]}, "
        f"{virtual_s / 3600:.0f} h of virtual time, {counts[1]}; {len(failed)} violations"
    )
    return 1 if failed else 0


def _tell_progress(done: int, seeds: int, failed: int, spent_s: float) -> None:
    left_s = spent_s / done * (seeds - done)
    line = f"{done} of {seeds} seeds, {failed} violations, {done / spent_s:.1f} seeds/s, about {left_s:.0f} s left"
    sys.stderr.write(f"\r{line} " if sys.stderr.isatty() else f"{line}\n")
    sys.stderr.flush()


def run_one(seed: int, *, log: bool) -> int:
    """Run one seed; with `log` also print the scenario and all events."""
    simulation = Simulation(draw(seed))
    outcome = simulation.run()
    if log:
        print(msgspec.json.format(msgspec.json.encode(simulation.scenario)).decode())
        for life, at_s, name, fields in simulation.log:
            said = " ".join(f"{key}={value}" for key, value in fields.items())
            print(f"{life} {at_s:10.4f} {name:12} {said}")
    for name in Outcome.__struct_fields__:
        print(f"{name:12} {getattr(outcome, name)}")
    return 1 if outcome.violation else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemill.sim.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--guarded", action="store_true", help="only those whose run has a guard that rolls back")
    parser.add_argument("--tails", action="store_true", help="only those with tail batching")
    parser.add_argument("--ranked", action="store_true", help="only those with workers of several GPUs")
    parser.add_argument("--chunks", action="store_true", help="chunks of simulation in place of samples")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--log", action="store_true", help="with --seed: the scenario and the event log")
    arguments = parser.parse_args()
    if arguments.seed is not None and arguments.chunks:
        return run_many([arguments.seed], 1, simulate_chunk_faults)
    if arguments.seed is not None:
        return run_one(arguments.seed, log=arguments.log)
    numbers: Iterator[int] = count(arguments.first)
    kinds = {has_guard: arguments.guarded, has_tail: arguments.tails, has_worker_ranks: arguments.ranked}
    for has, wanted in kinds.items():
        numbers = filter(has, numbers) if wanted else numbers
    simulate = simulate_chunk_faults if arguments.chunks else simulate_faults
    return run_many(list(islice(numbers, arguments.seeds)), arguments.processes, simulate)


if __name__ == "__main__":
    sys.exit(main())
