"""Time from the SIGKILL of a Ray worker to its samples decoding on another worker.

    python -m benchmarks.migration [--kills 20]

A run on a Ray cluster of this machine: three workers with spare slots, and a trainer with little work. The process of a
decoding worker is killed repeatedly at random moments. The measured time is real: the connection notices the death, the
lease ends, the samples wait and go to other workers with their tokens, and the first new token of each is reported. A
new worker replaces the dead one meanwhile. The benchmark fails if samples do not move after as many kills.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray._private import state

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Provider, WorkerHost
from tidemill.core.records import (
    GenerateRequest,
    Lease,
    LeaseEvent,
    LeaseGranted,
    Loaded,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    WorkerReport,
)
from tidemill.jobs.train import train
from tidemill.runtime.backend import RuntimeBackend
from tidemill.runtime.cluster.ray_backend import on_ray
from tidemill.runtime.cluster.ray_worker import RayWorker
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

TARGET_S = 1.0  # median over the kills, of the time until the last sample of a dead worker is decoded elsewhere
WORKERS = 3
PATIENCE_S = 60.0
MOST_TRIES = 3  # for each kill
LETTERS = "".join(chr(code) for code in range(0x100, 0x300))  # a large alphabet: an untrained model rarely stops early
SPEC = {
    "runtime": "ray",
    "run": {"name": "migration"},
    "model": {"source": "char", "char": {"alphabet": "0123456789+=\n" + LETTERS, "context": 256}},
    "task": {"kind": "arithmetic", "shots": 0},
    "sampling": {"max_new_tokens": 200},
    "engine": {"slots": 32},
    "pool": {"kind": "static", "workers": WORKERS},
    "fleet": {"seeding": False},
    "batch": {"prompts": 6, "group_size": 4},
    "trainer": {"steps": 100_000, "threads": 1},
    "eval": {"every_steps": 0, "prompts": 1},
    "checkpoint": {"every_steps": 0},
    "telemetry": {"live": False},
}


class Replacements:
    """Implements `Provider`: `workers` leases, and a new one for each that ended."""

    def __init__(self, clock: Clock, workers: int = WORKERS) -> None:
        self._clock, self._granted = clock, 0
        self._free: asyncio.Queue[None] = asyncio.Queue()
        for _ in range(workers):
            self._free.put_nowait(None)

    def request_workers(self, workers: int) -> None:
        """Ignored: always the same number."""

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        try:
            await asyncio.wait_for(self._free.get(), timeout_s)
        except TimeoutError:
            return None
        self._granted += 1
        name = f"worker-{self._granted}"
        return LeaseGranted(
            lease=Lease(
                lease_id=name,
                worker_id=name,
                kind="preemptible",
                price_usd_per_hour=0.0,
                start_s=self._clock.now(),
            )
        )

    async def release(self, lease_id: str) -> None:
        self._free.put_nowait(None)

    def avoid(self, machine: str, seconds: float) -> None:
        pass

    async def close(self) -> None:
        """Nothing was started."""


@dataclass
class Decoding:
    """Which worker decodes which sample, as the driver learns it."""

    clock: Clock
    pids: dict[str, int] = field(default_factory=dict)  # by lease, of workers that decode
    samples: dict[str, set[SampleId]] = field(default_factory=lambda: defaultdict(set))  # decoding there
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)
    seen: dict[SampleId, tuple[str, float]] = field(default_factory=dict)  # the last new token: lease, time

    async def note(self, lease_id: str, report: WorkerReport) -> None:
        for delta in report.deltas:
            if delta.token_ids:
                self.seen[delta.sample_id] = (lease_id, self.clock.now())
                self.samples[lease_id].add(delta.sample_id)
            if delta.finish is not None:
                self.samples[lease_id].discard(delta.sample_id)
        async with self.heard:
            self.heard.notify_all()


class Watched:
    """Implements `Worker`."""

    def __init__(self, worker: RayWorker, lease: Lease, decoding: Decoding) -> None:
        self._worker, self._lease_id, self._decoding = worker, lease.lease_id, decoding

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._worker.submit(requests)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        self._decoding.samples[self._lease_id] -= set(sample_ids)
        await self._worker.abort(sample_ids)

    async def load(self, version: PolicyVersion) -> Loaded:
        return await self._worker.load(version)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return await self._worker.run_probe(token_ids)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        report = await self._worker.next_report(timeout_s)
        if report is not None:
            await self._decoding.note(self._lease_id, report)
        return report

    async def close(self) -> None:
        await self._worker.close()

    def kill(self) -> None:
        self._decoding.pids.pop(self._lease_id, None)
        self._worker.kill()


class WatchedHost:
    """Implements `WorkerHost`."""

    def __init__(self, host: WorkerHost, decoding: Decoding) -> None:
        self._host, self._decoding = host, decoding

    async def start(self, lease: Lease) -> Watched:
        worker = await self._host.start(lease)
        assert isinstance(worker, RayWorker)
        self._decoding.pids[lease.lease_id] = state.actors(worker._remote.handle._actor_id.hex())["Pid"]
        return Watched(worker, lease, self._decoding)

    async def close(self) -> None:
        """The host is closed by its owner."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """One kill. Seconds from the signal to the first new token elsewhere."""

    samples: int
    first_s: float
    median_s: float
    last_s: float


async def kill_again_and_again(
    decoding: Decoding,
    kills: int,
    results: list[Migration],
    *,
    kill: Callable[[str, int], None] = lambda _, pid: os.kill(pid, signal.SIGKILL),
    patience_s: float = PATIENCE_S,
) -> None:
    """`kill` gets the lease and the process id of a worker that decodes beside another one."""
    random_ = random.Random(0)
    for _ in range(MOST_TRIES * kills):
        if len(results) == kills:
            break
        await asyncio.sleep(random_.uniform(0.3, 1.5))
        try:
            async with decoding.heard, asyncio.timeout(patience_s):
                await decoding.heard.wait_for(lambda: len(_busy(decoding)) >= 2)
        except TimeoutError:
            print(f" fewer than 2 workers decode for {patience_s:.0f} s")
            break
        await asyncio.sleep(random_.uniform(0.0, 0.1))  # anywhere in a tick
        if len(busy := _busy(decoding)) < 2:
            continue
        victim = random_.choice(busy)
        pid, samples = decoding.pids.pop(victim), set(decoding.samples[victim])
        killed_s = decoding.clock.now()
        kill(victim, pid)
        try:
            results.append(await _migrated(decoding, victim, samples, killed_s, patience_s))
        except TimeoutError:
            print(" a kill at the end of a step: the worker's samples were finished, or belong to the next step")
            continue
        print(f"kill {len(results):2}: {results[-1]}", flush=True)
    os.kill(os.getpid(), signal.SIGINT)  # ends the run like Ctrl-C


def _busy(decoding: Decoding) -> list[str]:
    return [lease for lease in decoding.pids if decoding.samples[lease]]


async def _migrated(
    decoding: Decoding, victim: str, samples: set[SampleId], killed_s: float, patience_s: float = PATIENCE_S
) -> Migration:
    """Raises TimeoutError: no sample of the victim continued elsewhere."""
    first: dict[SampleId, float] = {}

    def all_there() -> bool:
        for sample in samples - first.keys():
            lease, at_s = decoding.seen[sample]
            if lease != victim:
                first[sample] = at_s - killed_s
        # The victim's last report may still have arrived and finished a sample.
        return not (samples & decoding.samples[victim]) - first.keys()

    async with decoding.heard, asyncio.timeout(patience_s):
        await decoding.heard.wait_for(all_there)
    if not first:
        raise TimeoutError
    times = sorted(first.values())
    del decoding.samples[victim]
    return Migration(samples=len(times), first_s=times[0], median_s=statistics.median(times), last_s=times[-1])


def check_migrations(results: Sequence[Migration], kills: int) -> None:
    """Raises RuntimeError: the samples of fewer workers than asked for were continued elsewhere."""
    if len(results) < kills:
        raise RuntimeError(f"samples moved after only {len(results)} of {kills} kills")


def watched(kills: int, results: list[Migration], *, workers: int = WORKERS, **how: Any):  # type: ignore[no-untyped-def]
    """`on_ray` with observed workers that are killed; `how` is for `kill_again_and_again`."""

    @asynccontextmanager
    async def opened(
        spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
    ) -> AsyncIterator[RuntimeBackend]:
        async with on_ray(spec, run, recorder, clock) as backend:
            assert backend.host is not None
            decoding = Decoding(clock)
            provider: Provider = Replacements(clock, workers)
            killing = asyncio.create_task(kill_again_and_again(decoding, kills, results, **how))
            try:
                yield replace(backend, host=WatchedHost(backend.host, decoding), provider=provider)
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

    return opened


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    kills = parsed(parser).kills
    results: list[Migration] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec.model_validate({**SPEC, "run": {"name": "migration", "dir": str(Path(folder) / "run")}})
        train(spec, telemetry_stream=io.StringIO(), open_backend=watched(kills, results))
    check_migrations(results, kills)
    figures = {
        f"{name}_{which}": reduce(getattr(result, name) for result in results)
        for name in ("first_s", "median_s", "last_s")
        for which, reduce in (("median", statistics.median), ("worst", max))
    }
    for name, value in figures.items():
        print(f"{name:16} {value:6.3f}")
    reached = figures["last_s_median"] < TARGET_S
    print(f"all samples of a dead worker decode elsewhere after (median) {figures['last_s_median']:.3f} s, "
          f"target {TARGET_S:g} s: {'reached' if reached else 'MISSED'}")  # fmt: skip
    write_result("migration", {"kills": kills, "target_s": TARGET_S, "reached": reached, **figures,
                               "each": [vars(result) for result in results]})  # fmt: skip
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
