"""Deterministic doubles: an engine, a frozen model, and the thread they compute on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.doubles.samples import VOCABULARY, completion, logprob, number, turn_completion
from tidemill.controller.frozen_scoring import FrozenScoring
from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import (
    Finish,
    GenerateRequest,
    LogprobBuffer,
    ModelScores,
    NewTokens,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
    count,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from tidemill.rollout.sampling import NOISE

T = TypeVar("T")


class FakeCompute:
    """Runs one call at a time, in order; each takes `seconds` of virtual time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self.seconds)
            return function()


class FakeEngine:
    """Decodes `completion`: `per_poll` tokens for each of its `slots` per poll."""

    def __init__(self, version: PolicyVersion, *, slots: int = 3, per_poll: int = 2, keeps_jobs: bool = False) -> None:
        self.version, self.slots, self.per_poll = version, slots, per_poll
        self.logprobs = True  # whether it returns logprobs
        self.keeps_jobs = keeps_jobs  # samples in flight continue under new weights
        self.jobs: dict[SampleId, tuple[GenerateRequest, int]] = {}  # request, tokens so far
        self.generated = 0
        self.submitted: list[SampleId] = []
        self.handed_back: dict[SampleId, int] = {}  # tokens by recalled sample
        self.on_poll: Callable[[], None] = lambda: None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="fake", batch_invariant=True, logprobs=self.logprobs, keeps_kv=False, lora=False, draws=NOISE
        )

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if request.exact_version is not None:
                assert request.exact_version == self.version.number, "request needs other weights"
            assert request.min_version <= self.version.number, "request needs other weights"
            assert request.sample_id not in self.jobs, "submitted twice"
            self.jobs[request.sample_id] = (request, count(request.prefix_ids))
            self.submitted.append(request.sample_id)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        self.on_poll()
        return [self._decode(sample_id) for sample_id in list(self.jobs)[: self.slots]]

    def _decode(self, sample_id: SampleId) -> TokenDelta:
        request, at = self.jobs[sample_id]
        if request.resumes:
            tokens, ending = turn_completion(request, self.version)
        else:
            tokens, ending = completion(sample_id, self.version, request.sampling.max_new_tokens)
        end = max(at, min(at + self.per_poll, len(tokens)))  # the completion under other weights may be longer
        self.jobs[sample_id] = (request, end)
        finish = ending if end >= len(tokens) else None
        if finish:
            del self.jobs[sample_id]
        self.generated += end - at
        return self.delta(request, at, tokens[at:end], finish)

    def delta(self, request: GenerateRequest, at: int, tokens: Sequence[int], finish: Finish | None) -> TokenDelta:
        return TokenDelta(
            sample_id=request.sample_id,
            lease_id=request.lease_id,
            attempt=request.attempt,
            start=request.offset + at,
            token_ids=pack_tokens(tokens),
            logprobs=pack_logprobs(logprob(token) for token in tokens),
            version=self.version,
            finish=finish,
        )

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        known = [self.jobs.pop(sample_id) for sample_id in sample_ids if sample_id in self.jobs]
        self.handed_back |= {request.sample_id: at for request, at in known}
        return [self.delta(request, at, [], "aborted") for request, at in known]

    def load(self, version: PolicyVersion) -> None:
        assert self.keeps_jobs or not self.jobs, "weights changed under a running sample"
        self.version = version

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """Logprobs as a function of the weights."""
        tokens = unpack_tokens(token_ids)[1:]
        return pack_logprobs(logprob(number(self.version.digest, token) % VOCABULARY) for token in tokens)

    def status(self) -> EngineStatus:
        running = min(self.slots, len(self.jobs))
        return EngineStatus(
            version=self.version,
            running=running,
            queued=len(self.jobs) - running,
            free_slots=self.slots - running,
            tokens_generated=self.generated,
            prompt_tokens_computed=2 * len(self.submitted),
            prompt_tokens_reused=0,
        )


class FakeFrozenScorer:
    """Implements `FrozenScorer`; its number for a token depends on all earlier tokens. None may be missing."""

    def __init__(self, *, chunk_tokens: int = 4) -> None:
        self.chunk_tokens = chunk_tokens
        self.known: dict[SampleId, bytes] = {}
        self.received: list[NewTokens] = []
        self.scored: list[SampleId] = []
        self.forgotten: list[SampleId] = []
        self.failure: Exception | None = None

    def scoring(self) -> FrozenScoring:
        return FrozenScoring([self], reference=self, chunk_tokens=self.chunk_tokens)

    def receive(self, new_tokens: Sequence[NewTokens]) -> None:
        for added in new_tokens:
            before = self.known.get(added.sample_id, b"") if added.start else b""
            assert count(before) == added.start, "missing tokens"
            self.known[added.sample_id] = before + added.token_ids
        self.received += new_tokens

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        await asyncio.sleep(0.05)
        if self.failure is not None:
            raise self.failure
        ahead = self.known.pop(sample_id, b"")
        assert token_ids.startswith(ahead), "other tokens than announced"
        self.scored.append(sample_id)
        tokens = unpack_tokens(token_ids)
        said = [logprob(number(tokens[: at + 1]) % VOCABULARY) for at in range(prompt_tokens, len(tokens))]
        return ModelScores(values=pack_logprobs(said))

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.forgotten += sample_ids
        for sample_id in sample_ids:
            self.known.pop(sample_id)

    def take_counts(self) -> tuple[int, int]:
        return 3, 5

    async def close(self) -> None: ...
