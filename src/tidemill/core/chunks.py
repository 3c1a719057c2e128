"""Chunks: what a trainer of robot policies exchanges with the processes that simulate.

A *shard* is a fixed number of worlds. A *chunk* is the simulation of one shard for some control steps. It is a pure
function of the weights, the shard's state and the key, so that a lost chunk is computed again with the same result,
and whichever answer comes first counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidemill.core.records import Loaded, PolicyVersion, Record, WorkerReport


class Array(Record, gc=False):
    """A dense array: bytes in C order."""

    dtype: str  # of numpy: "<f4"
    shape: tuple[int, ...]
    data: bytes


class ChunkKey(Record, frozen=True):
    """Names a chunk, and seeds all noise in it."""

    seed: int
    purpose: str  # "train", or of another use with the same shard numbers: "before", "twin:mass=1.2"
    shard: int
    iteration: int


class ChunkRequest(Record):
    """A chunk to compute."""

    key: ChunkKey
    steps: int  # control steps
    setup: int = 0  # which of the worker's simulations; see `robots.setup`
    state: dict[str, Array] = {}  # of the shard; empty: it starts
    deterministic: bool = False  # act with the mean
    record: bool = False  # also return the poses of every step


class ChunkAnswer(Record):
    """A computed chunk: its experience together with the state after it."""

    key: ChunkKey
    version: int  # of the weights
    experience: dict[str, Array]
    state: dict[str, Array]
    cpu_s: float = 0.0


class NewWeights(Record, tag=True):
    """Weights of a version, on their way to a simulator."""

    number: int  # of the version
    blob: bytes  # MessagePack of arrays by name


class ChunkJob(Record, tag=True):
    """A chunk on its way to a simulator."""

    number: int  # never used again
    version: int  # of the weights
    request: ChunkRequest


class ChunkFailure(Record):
    """Why a chunk cannot be computed on any worker; see `core.errors.UserError`."""

    what: str
    where: str
    hint: str


class ChunkReport(WorkerReport):
    """A heartbeat of a simulator, with the result of a job if one has ended."""

    number: int = -1  # of the job; -1: none has ended
    answer: ChunkAnswer | None = None
    failure: ChunkFailure | None = None


HELD = "held_by"
"""Array of a state whose larger part is in the worker that computed the chunk: elsewhere, all episodes restart."""


class Chunks(Protocol):
    """Computes chunks: in this process, or on the fleet."""

    async def publish(self, version: PolicyVersion, weights: Mapping[str, Array]) -> None:
        """Make the weights of a version available. The version before stays available, too."""

    async def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        """Compute chunks with the weights of a version; answers are in the order of the requests.

        Raises:
            UserError: the task or the environment failed.
            DeadlineError: no chunk was computed for too long.
        """

    def take_figures(self) -> dict[str, float]:
        """Metrics of a step, since the last call: `robot/repeated_chunks` and, on a fleet, evictions and crashes."""


class Simulator(Protocol):
    """The process around an engine of physics. It is a worker of the fleet that runs chunks instead of samples.

    Every call raises `WorkerLost` if the process is gone.
    """

    async def load(self, version: PolicyVersion) -> Loaded:
        """Use the weights of a published version."""

    async def submit(self, job: ChunkJob) -> None:
        """Compute a chunk after those submitted before; a report has the result."""

    async def next_report(self, timeout_s: float) -> ChunkReport | None:
        """The next report, or None after `timeout_s` seconds."""

    async def close(self) -> None: ...

    def kill(self) -> None: ...
