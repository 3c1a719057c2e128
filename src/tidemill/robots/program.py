"""The process of a simulator: `python -m tidemill.robots.program`. It imports no torch, and ends with its parent.

Messages over the socket that is its standard input: first `Beginning`, then weights and jobs; it sends `ChunkReport`s.
Two threads receive and send, so that the next chunk is there when one is finished, and heartbeats do not wait.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from typing import Any

import msgspec

from tidemill.core import ipc
from tidemill.core.chunks import Array, ChunkFailure, ChunkJob, ChunkReport, NewWeights
from tidemill.core.errors import UserError
from tidemill.core.records import Record, WorkerStatus
from tidemill.robots.setup import Simulations, SimulationSetup


class Beginning(Record):
    """What a simulator needs to know first."""

    lease_id: str
    worker_id: str
    setups: tuple[SimulationSetup, ...]
    heartbeat_s: float


class SimulatorLoop:
    """Computes the jobs that it is given, one after another, and makes reports."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._simulations = Simulations(beginning.setups)
        self._version = 0
        self.unfinished = 0

    def load(self, weights: NewWeights) -> None:
        self._simulations.load(weights.number, msgspec.msgpack.decode(weights.blob, type=dict[str, Array]))
        self._version = weights.number

    def compute(self, job: ChunkJob) -> ChunkReport:
        try:
            (answer,) = self._simulations.run(job.version, [job.request])
        except UserError as error:
            failure = ChunkFailure(what=error.what, where=error.where, hint=error.hint)
        else:
            return self.report(number=job.number, answer=answer)
        return self.report(number=job.number, failure=failure)

    def report(self, **result: Any) -> ChunkReport:
        """A report with the result of a job, or a heartbeat."""
        running = min(1, self.unfinished)
        status = WorkerStatus(
            worker_id=self._beginning.worker_id,
            version=self._version,
            running=running,
            queued=self.unfinished - running,
            free_slots=1 - running,
        )
        return ChunkReport(lease_id=self._beginning.lease_id, deltas=(), status=status, **result)


def main() -> None:
    """Answer until the socket closes."""
    ipc.die_with_parent(signal.SIGKILL)
    stream = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    beginning = msgspec.msgpack.decode(ipc.receive(stream), type=Beginning)
    loop = SimulatorLoop(beginning)
    inbox, outbox = queue.SimpleQueue[NewWeights | ChunkJob](), queue.SimpleQueue[ChunkReport]()
    outbox.put(loop.report())  # ready
    threading.Thread(target=_send, args=(stream, outbox, loop, beginning.heartbeat_s), daemon=True).start()
    threading.Thread(target=_receive, args=(stream, inbox, loop), daemon=True).start()
    while True:
        message = inbox.get()
        if isinstance(message, NewWeights):
            loop.load(message)
        else:
            report = loop.compute(message)
            loop.unfinished -= 1
            outbox.put(report)


def _receive(stream: socket.socket, inbox: queue.SimpleQueue[NewWeights | ChunkJob], loop: SimulatorLoop) -> None:
    decoder = msgspec.msgpack.Decoder(NewWeights | ChunkJob)
    try:
        while True:
            message = decoder.decode(ipc.receive(stream))
            loop.unfinished += isinstance(message, ChunkJob)
            inbox.put(message)
    finally:
        os._exit(0)  # the other end has closed the socket


def _send(
    stream: socket.socket, outbox: queue.SimpleQueue[ChunkReport], loop: SimulatorLoop, heartbeat_s: float
) -> None:
    try:
        while True:
            try:
                report = outbox.get(timeout=heartbeat_s)
            except queue.Empty:
                report = loop.report()
            stream.sendall(ipc.framed(msgspec.msgpack.encode(report)))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
