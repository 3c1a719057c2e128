"""Four workers of one machine follow the same versions, each with a copy of its own, and with one snapshot for all.

    python -m benchmarks.weights_node

Made-up float32 weights of 0.25 GB; in each of 5 further versions 5 % of the elements move by up to 2^15 units in the
last place. Every worker is a process that pulls over HTTP. Memory is that of the four workers above what they had
before the first pull, in snapshots: PSS without shared memory, and every file in shared memory once. It is sampled
while they pull (peak) and when all of them hold the same version (held). Engines are not part of it. The benchmark
fails if a version was not fetched, or a further one not as a delta.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.measuring import print_records, write_result
from benchmarks.origin import parsed
from benchmarks.stopping import interruptible
from benchmarks.turns import ONE_THREAD
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion, TensorEntry, WeightManifest
from tidemill.weights.http_reader import HttpReader
from tidemill.weights.http_server import HttpTransport
from tidemill.weights.node_folder import NodeFolder, NodePuller, forget_snapshots
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, Snapshot, allocate, digest_of, sealed
from tidemill.weights.store import WeightStore, pack_manifest

T = TypeVar("T")

WORKERS, UPDATES, SHARE = 4, 5, 0.05
NBYTES, TENSORS = 1 << 28, 64
LARGEST_STEP = 1 << 15  # units in the last place
BYTES_AIM, MEMORY_AIM = 1.05, 1.3
DEADLINE_S, SAMPLE_S = 300.0, 0.01


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A worker's answer to a pull, which took `pull_s`."""

    nbytes: int
    retries: int
    pull_s: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of all workers above the start, in snapshots. A file counts once in `files`, by its mapped pages in `pss`."""

    private: float  # PSS without shared memory
    files: float
    pss: float

    @property
    def total(self) -> float:
        return self.private + self.files


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version that all workers pulled; `fetched` and `once` are bytes."""

    fetched: int  # by all workers
    once: int  # manifest, and delta or snapshot
    retries: int
    slowest_s: float
    held: Memory
    peak: Memory
    samples: int  # of the peak
    identical: bool  # every worker has the published digest


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    os.environ |= ONE_THREAD
    cases = {name: asyncio.run(measured(shared=name == "shm")) for name in ("own copies", "shm")}
    for name, versions in cases.items():
        check_versions(name, versions)
    figures = [{"case": name, **summary(versions)} for name, versions in cases.items()]
    shm = figures[-1]
    reached = {
        "fetched_once": shm["fetched_ratio_most"] <= BYTES_AIM,
        "memory_held": shm["held_most"] <= MEMORY_AIM,
        "identical": all(figure["identical"] for figure in figures),
    }
    print_records(f"{WORKERS} workers of a machine; memory in snapshots of {NBYTES / 1e6:.0f} MB", figures)
    for name, met in reached.items():
        print(f"{name}: {'reached' if met else 'MISSED'}")
    write_result(
        "weights_node",
        {
            "workers": WORKERS,
            "snapshot_bytes": NBYTES,
            "changed": SHARE,
            "aims": {"fetched_ratio": BYTES_AIM, "memory_held": MEMORY_AIM},
            "figures": figures,
            "versions": {name: [asdict(version) for version in versions] for name, versions in cases.items()},
            "reached": reached,
        },
    )
    return 0 if all(reached.values()) else 1


def check_versions(case: str, versions: Sequence[Version]) -> None:
    """Raises RuntimeError: a version was not fetched, or a further one not as a delta."""
    for number, version in enumerate(versions):
        if version.fetched < version.once:
            raise RuntimeError(f"{case}: workers fetched {version.fetched} of {version.once} bytes of version {number}")
        if number and version.once >= NBYTES:
            raise RuntimeError(f"{case}: version {number} was pulled as a whole snapshot")


def summary(versions: Sequence[Version]) -> dict[str, Any]:
    first, updates = versions[0], versions[1:]
    return {
        "fetched_mb_first": first.fetched / 1e6,
        "fetched_mb_update_most": max(version.fetched for version in updates) / 1e6,
        "fetched_ratio_most": max(version.fetched / version.once for version in versions),
        "held_first": first.held.total,
        "held_most": max(version.held.total for version in versions),
        "held_private": versions[-1].held.private,
        "held_files": versions[-1].held.files,
        "held_pss": versions[-1].held.pss,
        "peak_first": first.peak.total,
        "peak_update_most": max(version.peak.total for version in updates),
        "slowest_s_first": first.slowest_s,
        "slowest_s_update_most": max(version.slowest_s for version in updates),
        "retries": sum(version.retries for version in versions),
        "samples_least": min(version.samples for version in versions),
        "identical": all(version.identical for version in versions),
    }


async def measured(*, shared: bool) -> list[Version]:
    """Publish all versions; after each, all workers pull it.

    Raises:
        RuntimeError: a worker failed, is silent, or left a file.
    """
    token, session = secrets.token_hex(16), f"benchmark-{secrets.token_hex(4)}"
    transport = HttpTransport("127.0.0.1", 0, token)
    store, node = WeightStore(transport, compute=Inline()), Node(transport.port, token, session if shared else "")
    rng, weights, versions = np.random.default_rng(0), first_weights(), list[Version]()
    try:
        node.start()
        for number in range(1 + UPDATES):
            if number:
                weights = moved(weights, rng)
            await store.make_room()
            manifest = await store.publish(PolicyVersion(number=number, digest=str(number)), LAYOUT, weights)
            versions.append(node.pull(manifest))
            print(f"  {'shm' if shared else 'own copies'}: version {number}", file=sys.stderr, flush=True)
        node.end()
    finally:
        node.kill()
        await forget_snapshots(session)
        await store.close()
    return versions


LAYOUT = [
    TensorEntry(
        name=str(at),
        dtype="float32",
        shape=(NBYTES // TENSORS // 4,),
        offset=at * (NBYTES // TENSORS),
        nbytes=NBYTES // TENSORS,
        checksum=0,
    )
    for at in range(TENSORS)
]


def first_weights() -> Blob:
    weights = allocate(NBYTES)
    weights.view(np.float32)[:] = np.random.default_rng(1).normal(0, 0.02, NBYTES // 4)
    return weights


def moved(weights: Blob, rng: np.random.Generator) -> Blob:
    """A copy in which a share of the elements has another value."""
    new = allocate(NBYTES)
    new[:] = weights
    patterns = new.view(np.uint32)
    changed = np.flatnonzero(rng.random(len(patterns), np.float32) < SHARE)
    steps = rng.integers(1, LARGEST_STEP, len(changed), dtype=np.int32) * rng.choice([-1, 1], len(changed))
    patterns[changed] += steps.astype(np.uint32)
    return new


class Inline:
    """Implements `core.protocols.Compute` in the caller."""

    async def run(self, function: Callable[[], T]) -> T:
        return function()


class Node:
    """The workers, and their memory.

    Args:
        session: names the folder of snapshots that they share; empty: none.
    """

    def __init__(self, port: int, token: str, session: str) -> None:
        self._settings = (f"http://127.0.0.1:{port}", token, session)
        self._folder = NodeFolder(session).path if session else None
        self._workers: dict[Connection, Any] = {}
        self._at_start = (0, 0)

    def start(self) -> None:
        """Return when every worker is ready for its first pull."""
        context = multiprocessing.get_context("spawn")
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(*self._settings, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers[ours] = process
        self._answers()
        self._at_start = self._pss()

    def pull(self, manifest: WeightManifest) -> Version:
        """All workers pull a version at the same time."""
        sampled: list[Memory] = []
        loaded: list[Loaded] = self._ask(manifest.version, during=lambda: sampled.append(self._memory()))
        digests: list[str] = self._ask("digest")
        weights = manifest.delta.nbytes if manifest.delta is not None else manifest.nbytes
        return Version(
            fetched=sum(each.nbytes for each in loaded),
            once=len(pack_manifest(manifest)) + weights,
            retries=sum(each.retries for each in loaded),
            slowest_s=max(each.pull_s for each in loaded),
            held=self._memory(),
            peak=max(sampled, key=lambda memory: memory.total),
            samples=len(sampled),
            identical=set(digests) == {manifest.digest},
        )

    def end(self) -> None:
        """Raises RuntimeError: a worker left a file."""
        self._ask("end")
        for process in self._workers.values():
            process.join(DEADLINE_S)
        if self._folder is not None and self._folder.exists():
            raise RuntimeError(f"the workers have ended, and {self._folder} exists")

    def kill(self) -> None:
        for process in self._workers.values():
            process.kill()
            process.join()

    def _ask(self, what: object, *, during: Callable[[], None] = lambda: None) -> list[Any]:
        for pipe in self._workers:
            with suppress(BrokenPipeError):  # found when it does not answer
                pipe.send(what)
        return self._answers(during)

    def _answers(self, during: Callable[[], None] = lambda: None) -> list[Any]:
        """An answer of each worker; `during` is called until all have come."""
        answers, waiting, deadline_s = list[Any](), list(self._workers), time.monotonic() + DEADLINE_S
        while waiting:
            for pipe in wait(waiting, SAMPLE_S):
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                answers.append(_received(pipe))
            during()
            if waiting and time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(waiting)} workers were silent for {DEADLINE_S:.0f} s")
        return answers

    def _memory(self) -> Memory:
        pss, private = self._pss()
        return Memory(
            private=(private - self._at_start[1]) / NBYTES,
            files=float(len(self._files())),  # their space is reserved when they are created
            pss=(pss - self._at_start[0]) / NBYTES,
        )

    def _pss(self) -> tuple[int, int]:
        """Bytes of all workers, and those without shared memory."""
        total = shared = 0
        for process in self._workers.values():
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, *value = line.split()
                total += int(value[0]) * 1024 if name == "Pss:" else 0
                shared += int(value[0]) * 1024 if name == "Pss_Shmem:" else 0
        return total, total - shared

    def _files(self) -> set[int]:
        """Inodes of the snapshots in shared memory, also of those that are deleted and still mapped."""
        if self._folder is None:
            return set()
        found: set[int] = set()
        for process in self._workers.values():
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if str(self._folder) in line:
                    found.add(int(line.split()[4]))
        with suppress(FileNotFoundError):  # before the first pull
            found |= {entry.inode() for entry in os.scandir(self._folder)}
        return found


def _received(pipe: Connection) -> Any:
    try:
        kind, content = pipe.recv()
    except EOFError:
        raise RuntimeError("a worker ended") from None
    if kind != "done":
        raise RuntimeError(f"a worker failed: {content}")
    return content


def work(url: str, token: str, session: str, pipe: Connection) -> None:
    """A worker: answers every version with `Loaded`, "digest" with that of the bytes it holds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    try:
        asyncio.run(_serve(url, token, session, pipe))
    except EOFError:
        pass  # the parent has ended
    except Exception:  # noqa: BLE001 - whatever it is, the parent shows it
        pipe.send(("failed", traceback.format_exc()))


async def _serve(url: str, token: str, session: str, pipe: Connection) -> None:
    reader, clock, held = HttpReader(url, token), LoopClock(), list[Snapshot]()
    puller = Puller(reader, Inline(), clock=clock, timeout_s=DEADLINE_S)
    if session:
        puller = NodePuller(reader, Inline(), clock=clock, timeout_s=DEADLINE_S, folder=NodeFolder(session))
    pipe.send(("done", None))
    while (wanted := pipe.recv()) != "end":
        if wanted == "digest":
            pipe.send(("done", digest_of(sealed(held[-1].manifest.tensors, held[-1].buffer))))
            continue
        pulled = await puller.prepare(wanted)
        held.clear()
        puller.swap(pulled, held.extend)
        pipe.send(("done", Loaded(nbytes=pulled.nbytes, retries=pulled.retries, pull_s=pulled.pull_s)))
    held.clear()
    puller.close()
    await reader.close()
    pipe.send(("done", None))


if __name__ == "__main__":
    sys.exit(interruptible(main))
