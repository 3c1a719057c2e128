"""Rewards that score several samples at once, in this process or over HTTP.

POST url   {"samples": [{"id", "prompt", "completion", "answer", "metadata"}, ...]}
200        {"scores": [1.0, null, ...]}     in the same order; null where there is no score
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2
import msgspec

from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, SampleId, TokenBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward sees."""

    prompt: Prompt
    completion: str  # decoded, with the stop string that ended it
    completion_tokens: int
    sample_id: SampleId
    token_ids: TokenBuffer = b""  # int32 [P + T], prompt and completion as they were generated


class BatchScorer(Protocol):
    """Scores samples together."""

    async def judge(self, samples: Sequence[Sample]) -> Sequence[float | Exception]:
        """One score or fault a sample, in order; an exception raised is the fault of all of them."""

    async def close(self) -> None: ...


class Batches:
    """One sample's score at a time for whoever asks, batches for the judge. Each sample is scored as soon as the judge
    is free: nothing waits for a batch to fill.

    Args:
        most: samples of one batch, at most.
        overtake_s: a batch that takes longer no longer holds up the next, which is judged beside it; None holds it up
            for as long as it takes.
    """

    def __init__(self, judge: BatchScorer, *, most: int, overtake_s: float | None = None) -> None:
        self._judge, self._most, self._overtake_s = judge, most, overtake_s
        self._waiting: deque[tuple[Sample, asyncio.Future[float]]] = deque()
        self._answering: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, sample: Sample) -> float:
        """The sample's score, or the exception that is its fault."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def close(self) -> None:
        """Give up what is being judged, and what waits."""
        under_way = {*self._answering, *([self._serving] if self._serving else ())}
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        _fail(self._waiting)
        self._waiting.clear()
        await self._judge.close()

    async def _serve(self) -> None:
        try:
            await asyncio.sleep(0)  # samples that finished in the same moment come along
            while batch := self._next_batch():
                answering = asyncio.create_task(self._answer(batch))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                await asyncio.wait({answering}, timeout=self._overtake_s)
        finally:
            self._serving = None

    def _next_batch(self) -> list[tuple[Sample, asyncio.Future[float]]]:
        batch: list[tuple[Sample, asyncio.Future[float]]] = []
        while self._waiting and len(batch) < self._most:
            entry = self._waiting.popleft()
            if not entry[1].done():  # nobody waits any more for one past its deadline
                batch.append(entry)
        return batch

    async def _answer(self, batch: list[tuple[Sample, asyncio.Future[float]]]) -> None:
        results: Sequence[float | Exception]
        try:
            results = await self._judge.judge([sample for sample, _ in batch])
            if len(results) != len(batch):
                raise ValueError(f"{len(results)} scores for {len(batch)} samples")
        except asyncio.CancelledError:
            _fail(batch)
            raise
        except Exception as error:  # noqa: BLE001 -- the fault of these samples, not of the run
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def _fail(entries: Iterable[tuple[Sample, asyncio.Future[float]]]) -> None:
    for _, future in entries:
        if not future.done():
            future.set_exception(RuntimeError("closed before there was a score"))


PAUSE_S = 0.25  # before the first retry; doubled for each further one
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_ANSWER_BYTES = 16 << 20


class RemoteError(Exception):
    """The server did not give scores; says which server and why."""


class _TemporaryError(RemoteError):
    """Another try may succeed."""


class HttpScorer:
    """Implements `batches.Judge`: one request a batch, sent again while there is hope.

    Each request has a deadline as a whole, from connecting to the last byte of the answer; a sample's deadline is
    divided among the tries.

    Args:
        pause_s: before the first retry.

    Raises:
        UserError: the variable that `auth_env` names is not set, or holds what no header can.
    """

    def __init__(self, config: RewardConfig, *, pause_s: float = PAUSE_S) -> None:
        self._url, self._tries, self._pause_s = config.url, config.retries + 1, pause_s
        self._request_s = config.longest_wait_s / self._tries
        self._headers = {"content-type": "application/json", "accept": "application/json", **_authorization(config)}
        # No proxy or other credentials from the environment, and no redirect to a server nobody named.
        self._client = httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=None)

    async def judge(self, samples: Sequence[Sample]) -> Sequence[float | Exception]:
        """
        Raises:
            RemoteError: no answer, or one that is not a score for every sample.
        """
        body = msgspec.json.encode({"samples": [_told(sample) for sample in samples]})
        for number in range(self._tries):
            try:
                return self._scores(await self._ask(body), len(samples))
            except _TemporaryError:
                if number + 1 == self._tries:
                    raise
                await asyncio.sleep(self._pause_s * 2**number)
        raise AssertionError("there is at least one try")

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, body: bytes) -> bytes:
        try:
            async with (
                asyncio.timeout(self._request_s),
                self._client.stream("POST", self._url, content=body, headers=self._headers) as answer,
            ):
                if answer.status_code in TRY_AGAIN:
                    raise _TemporaryError(f"{self._url} answered {answer.status_code}")
                if answer.status_code != 200:
                    raise RemoteError(f"{self._url} answered {answer.status_code}")
                parts, size = [], 0
                async for part in answer.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > LONGEST_ANSWER_BYTES:
                        raise RemoteError(f"{self._url} answered with more than {LONGEST_ANSWER_BYTES:,} bytes")
                return b"".join(parts)
        except TimeoutError:
            raise _TemporaryError(f"{self._url} gave no whole answer within {self._request_s:g} s") from None
        except httpx2.HTTPError as error:
            raise _TemporaryError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error

    def _scores(self, answer: bytes, count: int) -> list[float | Exception]:
        try:
            scores = msgspec.json.decode(answer)["scores"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RemoteError(f'{self._url} answered without {{"scores": [...]}}') from error
        if not isinstance(scores, list) or len(scores) != count:
            found = len(scores) if isinstance(scores, list) else "no array of"
            raise RemoteError(f"{self._url} answered {found} scores for {count} samples")
        return [self._score(value) for value in scores]

    def _score(self, value: object) -> float | Exception:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return RemoteError(f"{self._url} gave no score: {value!r:.60}")


def _authorization(config: RewardConfig) -> dict[str, str]:
    """The header with the secret; it is in memory only, and no error has it in its words."""
    if not config.auth_env:
        return {}
    where, secret = "scoring.rewards.auth_env", os.environ.get(config.auth_env, "").strip()
    if not secret:
        hint = f"export {config.auth_env} before starting, or leave auth_env out"
        raise UserError(f"the environment variable {config.auth_env} is not set", where=where, hint=hint)
    if not (secret.isascii() and secret.isprintable()):
        what = f"the value of {config.auth_env} has characters that no header can carry"
        raise UserError(what, where=where, hint="set it to one line of plain ASCII")
    return {config.auth_header: secret}


def _told(sample: Sample) -> dict[str, Any]:
    named = sample.sample_id
    return {
        "id": f"{named.purpose}/{named.prompt_id}/{named.epoch}/{named.index}",
        "prompt": sample.prompt.text,
        "completion": sample.completion,
        "answer": sample.prompt.answer,
        "metadata": sample.prompt.metadata,
    }
