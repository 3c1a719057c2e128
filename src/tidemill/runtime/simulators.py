"""Who computes the chunks of a run: this process, or simulators on the machines of a pool."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.chunks import DEPTH, FleetChunks, WeightBlobs
from tidemill.controller.fleet import Fleet
from tidemill.core import ipc
from tidemill.core.chunks import Array, ChunkAnswer, ChunkJob, ChunkReport, ChunkRequest, Chunks, NewWeights
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import Clock, Provider, WorkerHost
from tidemill.core.records import Lease, Loaded, PolicyVersion, Record
from tidemill.robots import program
from tidemill.robots.setup import Simulations, SimulationSetup
from tidemill.runtime.backend import scheduled_provider
from tidemill.telemetry.recorder import NullTelemetry, Recorder
from tidemill.telemetry.run_dir import RunDirectory

SIMULATOR_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SIMULATOR_ENV["MUJOCO_GL"] = "disable"  # nothing is rendered: `import mujoco` is faster
SOCKET_BYTES = 1 << 22
"""Buffer of a socket: room for an answer while this process trains."""
CLOSE_S = 10.0
TOGETHER = 8
"""Most shards that are computed together: nothing else happens in this process meanwhile."""
Note: TypeAlias = Callable[[str], None]


class LocalChunks:
    """Implements `core.chunks.Chunks` in this process."""

    def __init__(self, setups: Sequence[SimulationSetup]) -> None:
        self._simulations = Simulations(setups)

    async def publish(self, version: PolicyVersion, weights: Mapping[str, Array]) -> None:
        self._simulations.load(version.number, weights)

    async def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        answers: list[ChunkAnswer] = []
        for _, group in groupby(requests, _shared):
            similar = list(group)
            for first in range(0, len(similar), TOGETHER):
                answers += self._simulations.run(version, similar[first : first + TOGETHER])
                await asyncio.sleep(0)
        return answers

    def take_figures(self) -> dict[str, float]:
        return {"robot/repeated_chunks": 0.0}

    def close(self) -> None:
        self._simulations.close()


def _shared(request: ChunkRequest) -> tuple[object, ...]:
    """What requests have in common that are computed together."""
    return request.setup, request.steps, request.deterministic, request.record, not request.state


@asynccontextmanager
async def open_chunks(
    spec: RunSpec,
    setups: Sequence[SimulationSetup],
    *,
    run: RunDirectory | None,
    recorder: Recorder | None,
    clock: Clock,
) -> AsyncIterator[Chunks]:
    """Start what computes the chunks of a run, and stop all of it when the block ends.

    Args:
        setups: the simulations, by the number in `ChunkRequest.setup`.
        run: the run's directory; None: of a job without one.
        recorder: gets the fleet's events; None: nobody does.

    Raises:
        UserError: the pool or the cluster cannot be used.
    """
    if not spec.is_elastic:
        chunks = LocalChunks(setups)
        try:
            yield chunks
        finally:
            chunks.close()
        return
    telemetry = recorder or NullTelemetry()
    blobs = WeightBlobs()
    async with AsyncExitStack() as stack:
        log: Note = recorder.note if recorder else lambda _: None
        provider: Provider | None
        host: WorkerHost
        if spec.runtime == "ray":
            from tidemill.runtime.cluster.ray_simulator import simulators_on_ray

            machines = simulators_on_ray(spec, setups, blobs, run=run, clock=clock, log=log)
            provider, host = await stack.enter_async_context(machines)
        else:
            times = {"heartbeat_s": spec.fleet.heartbeat_s, "start_s": spec.fleet.join_timeout_s}
            host = LocalSimulatorHost(setups, blobs, **times)
            stack.push_async_callback(host.close)
            provider = scheduled_provider(spec, run, clock, log=log)
        fleet = await stack.enter_async_context(
            Fleet(
                None,
                slots=DEPTH,
                clock=clock,
                telemetry=telemetry,
                config=spec.fleet,
                provider=provider,
                host=host,
                publisher=blobs,
            )
        )
        on_fleet = FleetChunks(fleet=fleet, blobs=blobs, clock=clock, telemetry=telemetry)
        yield await stack.enter_async_context(on_fleet)


def start_process(stream: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process of `robots.program` at the other end of a socket."""
    command = [sys.executable, "-m", program.__name__]
    return subprocess.Popen(command, stdin=stream.fileno(), env=os.environ | SIMULATOR_ENV)


class SentWeights:
    """The versions that a simulator has, by the rule of `robots.setup.Simulations`."""

    def __init__(self, blobs: WeightBlobs) -> None:
        self._blobs = blobs
        self._sent: set[int] = set()

    def missing(self, number: int, *, again: bool = False) -> list[NewWeights]:
        """What must be sent before a chunk of this version.

        Args:
            again: send it even if the simulator has this version.
        """
        if number in self._sent and not again:
            return []
        self._sent = {each for each in self._sent if each >= number - 1} | {number}
        return [NewWeights(number=number, blob=self._blobs[number])]


class LocalSimulator:
    """Implements `core.chunks.Simulator` with a process of this machine; see `robots.program`."""

    def __init__(self, process: subprocess.Popen[bytes], weights: SentWeights) -> None:
        self.process = process
        self._weights = weights
        self._reports: asyncio.Queue[ChunkReport | None] = asyncio.Queue()

    async def connect(self, stream: socket.socket, beginning: program.Beginning) -> None:
        """Returns when the process is ready. Raises WorkerLost: it ended before."""
        reader, self._writer = await asyncio.open_connection(sock=stream, limit=SOCKET_BYTES)
        self._receiving = asyncio.create_task(self._receive(reader))
        await self._send(beginning)
        await self.next_report(timeout_s=10**6)

    async def load(self, version: PolicyVersion) -> Loaded:
        sent = self._weights.missing(version.number, again=True)
        await self._send(*sent)
        return Loaded(version=version, nbytes=sum(len(each.blob) for each in sent))

    async def submit(self, job: ChunkJob) -> None:
        await self._send(*self._weights.missing(job.version), job)

    async def next_report(self, timeout_s: float) -> ChunkReport | None:
        try:
            async with asyncio.timeout(timeout_s):
                report = await self._reports.get()
        except TimeoutError:
            return None
        if report is None:
            self._reports.put_nowait(None)  # for the next call
            raise WorkerLost(f"its process {self._how_it_ended()}")
        return report

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self._writer.close()
        self._receiving.cancel()

    async def _send(self, *messages: Record) -> None:
        try:
            for message in messages:
                self._writer.write(ipc.framed(msgspec.msgpack.encode(message)))
            await self._writer.drain()
        except OSError as error:
            raise WorkerLost(f"its process {self._how_it_ended()}") from error

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(ChunkReport)
        try:
            while True:
                self._reports.put_nowait(decoder.decode(await ipc.read(reader)))
        except (EOFError, OSError):
            self._reports.put_nowait(None)

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(0.1)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class LocalSimulatorHost:
    """Implements `core.protocols.WorkerHost` with processes of this machine.

    Args:
        heartbeat_s: interval of the heartbeats of idle simulators.
        start_s: deadline for starting one.
    """

    def __init__(
        self, setups: Sequence[SimulationSetup], blobs: WeightBlobs, *, heartbeat_s: float, start_s: float
    ) -> None:
        self._setups, self._blobs = tuple(setups), blobs
        self._heartbeat_s, self._start_s = heartbeat_s, start_s
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self, lease: Lease) -> Any:
        beginning = program.Beginning(
            lease_id=lease.lease_id, worker_id=lease.worker_id, setups=self._setups, heartbeat_s=self._heartbeat_s
        )
        ours, theirs = socket.socketpair()
        for stream in (ours, theirs):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs:
            process = start_process(theirs)
        self._processes = [each for each in self._processes if each.poll() is None]  # also waits for ended ones
        self._processes.append(process)
        simulator = LocalSimulator(process, SentWeights(self._blobs))
        try:
            async with asyncio.timeout(self._start_s):
                await simulator.connect(ours, beginning)
        except BaseException:
            simulator.kill()
            raise
        return simulator

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(CLOSE_S)
