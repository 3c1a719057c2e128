"""Rewards that score several samples at once: reward models, user functions that take batches, and HTTP servers.

POST url   {"samples": [{"id", "prompt", "completion", "answer", "metadata"}, ...]}
           answer: null if the row has none
200        {"scores": [1.0, null, ...]}     in the same order; null where there is no score
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec

from tidemill.config.task import RewardConfig
from tidemill.core.credentials import secret_of
from tidemill.core.records import Prompt, SampleId, TokenBuffer, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """The input of a reward."""

    prompt: Prompt
    completion: str  # decoded, including the stop string that ended it
    completion_tokens: int
    sample_id: SampleId
    token_ids: TokenBuffer = b""  # int32 [P + T], prompt and completion as generated
    prompt_tokens: int = 0  # P
    step: int = 0  # 1 + the version of the policy that generated the last token
    turns: tuple[Turn, ...] = ()  # of an agent, whose last turn is the completion

    def answer(self) -> str:
        """The answer of the sample's row.

        Raises:
            ValueError: it has none. An empty text is an answer.
        """
        if self.prompt.answer is None:
            raise ValueError("the row has no answer")
        return self.prompt.answer


class BatchScorer(Protocol):
    """Scores samples together."""

    async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[Any]:
        """Return one score or exception per sample, in order. An exception raised applies to all of them."""

    async def close(self) -> None: ...


class BatchedReward:
    """Collects single requests into batches for a scorer. A batch is sent as soon as the scorer is free; no request
    waits for a batch to fill.

    Args:
        most: maximum number of samples per batch.
        overtake_s: after this time the next batch is sent even if the previous one has not returned; None waits without
            limit.
    """

    def __init__(self, scorer: BatchScorer, *, most: int, overtake_s: float | None = None) -> None:
        self._scorer, self._most, self._overtake_s = scorer, most, overtake_s
        self._waiting: deque[tuple[RewardInput, asyncio.Future[Any]]] = deque()
        self._answering: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, sample: RewardInput) -> Any:
        """Return the sample's score, or raise the exception of its batch."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def close(self) -> None:
        """Cancel the batches being scored and the requests that wait."""
        under_way = {*self._answering, *([self._serving] if self._serving else ())}
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        _fail(self._waiting)
        self._waiting.clear()
        await self._scorer.close()

    async def _serve(self) -> None:
        try:
            await asyncio.sleep(0)  # include samples that finish in the same loop iteration
            while True:
                batch = list[tuple[RewardInput, asyncio.Future[Any]]]()
                while self._waiting and len(batch) < self._most:
                    entry = self._waiting.popleft()
                    if not entry[1].done():  # already timed out
                        batch.append(entry)
                if not batch:
                    break
                answering = asyncio.create_task(self._answer(batch))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                await asyncio.wait({answering}, timeout=self._overtake_s)
        finally:
            self._serving = None

    async def _answer(self, batch: list[tuple[RewardInput, asyncio.Future[Any]]]) -> None:
        results: Sequence[Any]
        try:
            results = await self._scorer.score_batch([sample for sample, _ in batch])
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


def _fail(entries: Iterable[tuple[RewardInput, asyncio.Future[Any]]]) -> None:
    for _, future in entries:
        if not future.done():
            future.set_exception(RuntimeError("closed before the sample was scored"))


PAUSE_S = 0.25  # before the first retry; doubles with each further one
TEMPORARY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_RESPONSE_BYTES = 16 << 20


class RewardServerError(Exception):
    """The server returned no scores; the message names server and reason."""

    def __init__(self, what: str, *, may_cost: bool = False) -> None:
        super().__init__(what)
        self.may_cost = may_cost  # the request was sent, and how the server answered is unknown


class Unavailable(RewardServerError):
    """A retry may succeed."""


class RewardServer:
    """Sends requests to the server of a reward, again if a failure may be temporary.

    Each request has a deadline from connecting to the last byte of the response; a sample's deadline is divided
    evenly among the attempts.

    Raises:
        UserError: the variable that `auth_env` names is not set or is not a valid header value.
    """

    def __init__(self, config: RewardConfig, url: str) -> None:
        secret = _authorization(config)
        self.url, self._tries = url, config.retries + 1
        self._request_s = config.longest_wait_s / self._tries
        self._headers = {"content-type": "application/json", "accept": "application/json", **secret}
        self._secrets = [word for value in secret.values() for word in value.split()]
        # No proxy or credentials from the environment, and no redirect to another server.
        self._client = httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=None)

    async def close(self) -> None:
        await self._client.aclose()

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, which is called again after `Unavailable`."""
        for number in range(self._tries - 1):
            with suppress(Unavailable):
                return await attempt()
            await asyncio.sleep(PAUSE_S * 2**number)
        return await attempt()

    async def post(self, body: bytes) -> bytes:
        """The response to one request. Raises RewardServerError: there is none."""
        try:
            async with (
                asyncio.timeout(self._request_s),
                self._client.stream("POST", self.url, content=body, headers=self._headers) as answer,
            ):
                if answer.status_code in TEMPORARY_STATUS:
                    raise Unavailable(f"{self.url} answered {answer.status_code}")
                parts, size = [], 0
                async for part in answer.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_RESPONSE_BYTES:
                        raise RewardServerError(f"{self.url} answered with more than {MAX_RESPONSE_BYTES:,} bytes")
                content = b"".join(parts)
                if answer.status_code != 200:
                    text = " ".join(content[:200].decode(errors="replace").split())
                    for value in self._secrets:  # some servers repeat it
                        text = text.replace(value, "…")
                    raise RewardServerError(f"{self.url} answered {answer.status_code}: {text}")
                return content
        except TimeoutError:
            what = f"{self.url} did not answer within {self._request_s:g} s"
            raise Unavailable(what, may_cost=True) from None
        except httpx2.HTTPError as error:
            sent = not isinstance(error, httpx2.ConnectError)
            raise Unavailable(f"{self.url}: {type(error).__name__} {error}".rstrip(), may_cost=sent) from error


class HttpScorer:
    """Implements `BatchScorer` with one HTTP request per batch and retries for temporary errors.

    Raises:
        UserError: the variable that `auth_env` names is not set or is not a valid header value.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._url, self._server = config.url, RewardServer(config, config.url)

    async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[float | Exception]:
        """Raises RewardServerError: no response, or a response without one score per sample."""
        fields = []
        for sample in samples:
            of = sample.sample_id
            fields.append(
                {
                    "id": f"{of.purpose}/{of.prompt_id}/{of.epoch}/{of.index}",
                    "prompt": sample.prompt.text,
                    "completion": sample.completion,
                    "answer": sample.prompt.answer,
                    "metadata": sample.prompt.metadata,
                }
            )
        body = msgspec.json.encode({"samples": fields})
        answer = await self._server.retry(lambda: self._server.post(body))
        try:
            scores = msgspec.json.decode(answer)["scores"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RewardServerError(f'{self._url} answered without {{"scores": [...]}}') from error
        if not isinstance(scores, list) or len(scores) != len(samples):
            found = len(scores) if isinstance(scores, list) else "no array of"
            raise RewardServerError(f"{self._url} answered {found} scores for {len(samples)} samples")
        return [
            float(value)
            if isinstance(value, int | float) and not isinstance(value, bool)
            else RewardServerError(f"{self._url} gave no score: {value!r:.60}")
            for value in scores
        ]

    async def close(self) -> None:
        await self._server.close()


def _authorization(config: RewardConfig) -> dict[str, str]:
    """The header with the secret, which is kept in memory only and never part of an error message."""
    if not config.auth_env:
        return {}
    secret = secret_of(config.auth_env, where="scoring.rewards.auth_env")
    if config.kind == "judge" and config.auth_header == "authorization" and " " not in secret:
        secret = f"Bearer {secret}"
    return {config.auth_header: secret}
