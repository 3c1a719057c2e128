"""What the fleet and its transport cost, as a share of the CPU time of simulation, and what a worker costs to start.

    python -m benchmarks.chunks [--rounds N] [--worlds N]

Rounds of the same chunks of `quadruped` alternate between this process and two simulators of the fleet, without
training. Cost: CPU time of this process and the simulators, without that of the chunks themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.stopping import INTERRUPTED_CODE
from tidemill.config.schema import RunSpec
from tidemill.core import ipc
from tidemill.core.chunks import Array, ChunkAnswer, ChunkKey, ChunkRequest, Chunks
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion
from tidemill.robots.policy_arrays import pack
from tidemill.robots.setup import describe, setup_of
from tidemill.runtime.simulators import LocalChunks, open_chunks

STEPS, WORKERS = 32, 2
SHARE, READY_S = 0.10, 0.5
TICKS = os.sysconf("SC_CLK_TCK")


def weights_of(spec: RunSpec) -> dict[str, Array]:
    """A random policy with hidden layers of 64 units."""
    description, random = describe(spec), np.random.default_rng(0)
    sizes = [description.inputs("policy"), 64, 64, len(description.joints)]
    tensors = {"normaliser.mean": np.zeros(sizes[0]), "normaliser.variance": np.ones(sizes[0])}
    for layer, (width, units) in enumerate(pairwise(sizes)):
        tensors[f"layers.{layer}.weight"] = random.standard_normal((units, width)) / width**0.5
        tensors[f"layers.{layer}.bias"] = np.zeros(units)
    tensors["log_std"] = np.full(sizes[-1], -1.0)
    return pack({f"policy.{name}": each.astype(np.float32) for name, each in tensors.items()})


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Shards:
    """All shards on one side, and what their chunks cost."""

    def __init__(self, chunks: Chunks, shards: int) -> None:
        self.chunks, self.iteration = chunks, 0
        self.states: list[dict[str, Array]] = [{}] * shards

    async def iterate(self, weights: dict[str, Array]) -> list[ChunkAnswer]:
        number = self.iteration
        await self.chunks.publish(PolicyVersion(number=number, digest=str(number)), weights)
        keys = [ChunkKey(seed=0, purpose="train", shard=shard, iteration=number) for shard in range(len(self.states))]
        requests = [ChunkRequest(key=key, steps=STEPS, state=self.states[key.shard]) for key in keys]
        answers = await self.chunks.run(number, requests)
        self.states = [answer.state for answer in answers]
        self.iteration += 1
        return answers


async def measure(spec: RunSpec, rounds: int) -> dict[str, Any]:
    setups, weights, shards = [setup_of(spec)], weights_of(spec), spec.robot.shards
    alone = Shards(LocalChunks(setups), shards)
    found: list[dict[str, float]] = []
    async with open_chunks(spec, setups, run=None, recorder=None, clock=LoopClock()) as chunks:
        fleet = Shards(chunks, shards)
        await chunks.publish(PolicyVersion(number=0, digest="0"), weights)
        while len(ipc.child_processes()) < WORKERS or not all(map(is_idle, ipc.child_processes())):  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # there is no event for this
        pids = ipc.child_processes()
        ready_s = [cpu_of(pid) for pid in pids]
        first = await fleet.iterate(weights)
        first_s = [cpu_of(pid) - ready for pid, ready in zip(pids, ready_s, strict=True)]
        build_s = (sum(first_s) - sum(answer.cpu_s for answer in first)) / WORKERS
        await alone.iterate(weights)
        for _ in range(rounds):
            began_s = time.process_time()
            here = await alone.iterate(weights)
            alone_s = time.process_time() - began_s
            workers_s, began_s, wall_s = sum(map(cpu_of, pids)), time.process_time(), time.monotonic()
            there = await fleet.iterate(weights)
            controller_s = time.process_time() - began_s
            workers_s = sum(map(cpu_of, pids)) - workers_s
            assert [each.state for each in there] == [each.state for each in here], "the sides differ"
            chunks_s = sum(answer.cpu_s for answer in there)
            row = {"alone_s": alone_s, "chunks_s": chunks_s, "controller_s": controller_s, "workers_s": workers_s}
            found.append(row | {"wall_s": time.monotonic() - wall_s})
    shares = [(row["controller_s"] + row["workers_s"]) / row["chunks_s"] - 1 for row in found]
    against_alone = [(row["controller_s"] + row["workers_s"]) / row["alone_s"] - 1 for row in found]
    share, ready = statistics.median(shares), statistics.median(ready_s)
    return {
        "share": {"median": share, "limit": SHARE, "reached": share <= SHARE},
        "share_against_one_process": statistics.median(against_alone),
        "worker_ready_cpu_s": {"median": ready, "limit": READY_S, "reached": ready <= READY_S},
        "first_simulation_cpu_s": build_s,
        "rounds": found,
    }


def is_idle(pid: int) -> bool:
    """Whether a simulator waits for its first job: it has its three threads, and none of them runs."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
    return len(tasks) >= 3 and set(states) == {"S"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worlds", type=int, default=512)
    options = parsed(parser)
    sections = {"robot": {"task": "quadruped", "worlds": options.worlds}}
    spec = RunSpec.model_validate(sections | {"pool": {"kind": "static", "workers": WORKERS}})
    content = asyncio.run(measure(spec, options.rounds))
    share, ready = content["share"], content["worker_ready_cpu_s"]
    print(f"fleet and transport: {share['median']:.1%} of the CPU time of simulation (at most {SHARE:.0%})")
    print(f"against one process: {content['share_against_one_process']:.1%}")
    print(f"a worker is ready after {ready['median']:.2f} CPU-s (at most {READY_S:g})")
    print(f"its first simulation is built in {content['first_simulation_cpu_s']:.2f} CPU-s")
    write_result("chunks", content)
    return exit_code(content)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
