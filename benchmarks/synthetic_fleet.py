"""Workers that only send messages, to load the controller.

Each sends a report per second, msgpack-encoded as over a network; the controller decodes it. The time to create the
messages is measured separately.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.core.protocols import CallLog
from tidemill.core.records import (
    Call,
    Episode,
    Finish,
    GenerateRequest,
    Lease,
    LeaseEvent,
    LeaseGranted,
    Loaded,
    LogprobBuffer,
    Message,
    Observation,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    TokenBuffer,
    TokenDelta,
    Trajectory,
    WeightManifest,
    WorkerReport,
    WorkerStatus,
    count,
    pack_logprobs,
    pack_tokens,
)

TICK_S = 1.0
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerReport)


@dataclass
class Apart:
    """CPU seconds and messages outside the controller."""

    cpu_s: float = 0.0
    deltas: int = 0
    tokens: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - began_s


class SyntheticEnvironments:
    """Implements `core.protocols.Environments`: every answer takes one idempotent call and `seconds`.

    Args:
        turns: of every episode.
    """

    def __init__(self, *, turns: int, seconds: float, tokens: int) -> None:
        self._turns, self._seconds, self._token_ids = turns, seconds, pack_tokens(range(2000, 2000 + tokens))
        self.answers = 0

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        await asyncio.sleep(self._seconds)
        call = Call(call_id=f"{episode.sample_id.prompt_id}/{len(episode.turns)}", name="tool", arguments="{}")
        self.answers += 1
        if len(episode.turns) == self._turns:
            return Observation(end="done", calls=(call,))
        return Observation(token_ids=self._token_ids, calls=(call,))

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        pass

    def take_counts(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        pass


class Job(msgspec.Struct, gc=False):
    request: GenerateRequest
    at: int  # completion tokens so far
    end: int  # final number of tokens


@dataclass
class SyntheticWorker:
    """Implements `core.protocols.Worker`: `tokens` more for each of its samples every tick."""

    lease: Lease
    apart: Apart
    slots: int
    tokens: int
    ticks: tuple[int, int]  # lifetime of a sample in ticks, minimum and maximum
    source: random.Random
    version: PolicyVersion | None = None
    jobs: dict[SampleId, Job] = field(default_factory=dict)
    back: list[Job] = field(default_factory=list)  # asked for
    due_s: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = pack_tokens(range(1000, 1000 + self.tokens))
        self._logprobs = pack_logprobs([-0.5] * self.tokens)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        with self.apart.timed():
            for request in requests:
                end = request.turn_start + self.tokens * self.source.randint(*self.ticks)
                self.jobs[request.sample_id] = Job(request, count(request.prefix_ids), end)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        self.back += [self.jobs.pop(sample_id) for sample_id in sample_ids if sample_id in self.jobs]

    async def load(self, version: PolicyVersion) -> Loaded:
        self.version = version
        return Loaded(version=version)

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return b""

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        now_s = asyncio.get_running_loop().time()
        if not self.due_s:
            self.due_s = now_s + self.source.random() * TICK_S
        await asyncio.sleep(max(0.0, self.due_s - now_s))
        self.due_s += TICK_S
        with self.apart.timed():
            blob = _encoder.encode(self.report())
        return _decoder.decode(blob)

    def report(self) -> WorkerReport:
        back, self.back = self.back, []
        running = list(self.jobs.values())[: self.slots]
        deltas = (*(self._delta(job, "aborted") for job in back), *(self._delta(job, None) for job in running))
        self.apart.deltas += len(deltas)
        self.apart.tokens += self.tokens * len(running)
        status = WorkerStatus(
            worker_id=self.lease.worker_id,
            version=self.version.number if self.version else 0,
            running=len(running),
            queued=len(self.jobs) - len(running),
            free_slots=self.slots - len(running),
            tokens_per_s=len(running) * self.tokens / TICK_S,
        )
        return WorkerReport(lease_id=self.lease.lease_id, deltas=deltas, status=status)

    def _delta(self, job: Job, finish: Finish | None) -> TokenDelta:
        start, fresh = job.at, finish is None
        assert self.version is not None, "samples before weights"
        if fresh:
            job.at += self.tokens
            if job.at >= job.end:
                finish = "stop"
                del self.jobs[job.request.sample_id]
        return TokenDelta(
            sample_id=job.request.sample_id,
            lease_id=job.request.lease_id,
            attempt=job.request.attempt,
            start=job.request.offset + start,
            token_ids=self._tokens if fresh else b"",
            logprobs=self._logprobs if fresh else b"",
            version=self.version,
            finish=finish,
        )

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


@dataclass
class SyntheticPool:
    """Provider, host and publisher of workers that are present from the start."""

    workers: int
    slots: int
    tokens: int
    ticks: tuple[int, int]
    apart: Apart = field(default_factory=Apart)
    granted: int = 0

    def request_workers(self, workers: int) -> None:
        pass

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        if self.granted == self.workers:
            await asyncio.sleep(timeout_s)
            return None
        self.granted += 1
        return LeaseGranted(lease=make_lease(self.granted - 1))

    async def release(self, lease_id: str) -> None:
        pass

    def avoid(self, machine: str, seconds: float) -> None:
        pass

    async def start(self, lease: Lease) -> SyntheticWorker:
        return SyntheticWorker(lease, self.apart, self.slots, self.tokens, self.ticks, random.Random(lease.lease_id))

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        return WeightManifest(version=version, digest=version.digest, nbytes=0, tensors=())

    async def close(self) -> None:
        pass


def make_lease(index: int) -> Lease:
    return Lease(
        lease_id=f"lease-{index}",
        worker_id=f"spot-{index}",
        kind="preemptible",
        price_usd_per_hour=1.0,
        start_s=0.0,
    )


class Judge:
    """Implements `core.protocols.Scorer`: every sample is correct."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=1.0)

    async def close(self) -> None:
        pass


class Mute:
    """Implements `core.protocols.Codec`: no text."""

    stop_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return []

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        return "", []

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
