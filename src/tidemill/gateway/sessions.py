"""Training sessions: an agent that asks over HTTP is the environment of a sample.

The run starts groups as always; the environment of each sample acts first, and waits for a client. A request is an
observation, the answer a turn. Requests continue the session's token ids, or start a branch with a context of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from tidemill.core.protocols import CallLog, TurnFormat
from tidemill.core.records import (
    ITEM_BYTES,
    Episode,
    Finish,
    Message,
    Observation,
    Prompt,
    Record,
    SampleId,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from tidemill.gateway.backend import Asked, Piece
from tidemill.gateway.errors import RATE, ApiError, invalid, unsupported
from tidemill.gateway.requests import Question, Said, as_messages
from tidemill.gateway.session_log import Noted, SessionLog
from tidemill.gateway.texts import ChoiceText

ENDED = 1024
"""Sessions that have ended and can still be seen."""
SLOT_WAIT_S = 20.0
"""How long a client waits for a task when no sample needs one."""
RETRY_S = 5


class LiveTurn:
    """The answer to one request while it is generated, and for its repetitions."""

    def __init__(self, digest: str) -> None:
        self.digest, self.pieces, self.done = digest, list[Piece](), False
        self.error: ApiError | None = None
        self._changed = asyncio.Event()

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.done = self.done or piece.finish is not None
        self._wake()

    def fail(self, error: ApiError) -> None:
        if not self.done:
            self.error = error
            self._wake()

    async def read(self) -> AsyncGenerator[Piece, None]:
        """All pieces from the start. Raises ApiError: the session has ended."""
        at = 0
        while True:
            changed = self._changed
            while at < len(self.pieces):
                at += 1
                yield self.pieces[at - 1]
            if self.done:
                return
            if self.error is not None:
                raise self.error
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Request(Record):
    """A request that waits for its session's environment."""

    asked: Asked
    digest: str


class Session:
    """One sample's session."""

    def __init__(self, name: str, key: str, sample_id: SampleId, prompt: Prompt) -> None:
        self.name, self.key, self.sample_id, self.prompt = name, key, sample_id, prompt
        self.attached = self.ending = self.ended = False
        self.expires_s = 0.0  # unix seconds
        self.reward: float | None = None
        self.metadata: dict[str, Any] = {}
        self.live: LiveTurn | None = None
        self.sent = 0  # completion tokens that were handed to `live`, or are before it
        self.request: Request | None = None
        self.asked: tuple[Said, ...] = ()  # messages of the last request
        self.tools = False  # whether it had any
        self.reply: Said | None = None  # its answer
        self.episode: Episode | None = None  # at the last turn
        self.woken = asyncio.Event()

    @property
    def busy(self) -> bool:
        return self.live is not None and not self.live.done and self.live.error is None


class Sessions:
    """Implements `core.protocols.Environments`, and the sessions' side of `gateway.backend.Served`.

    Args:
        secret: keys are derived from it, so that they survive a restart.
        log: attached sessions and rewards of earlier lives.
        idle_s: see `gateway.session_idle_s`.
        turns: see `gateway.session_turns`.
        unix_s: the wall clock.
    """

    def __init__(
        self,
        format: TurnFormat,  # noqa: A002 - as in Served
        log: SessionLog,
        *,
        secret: bytes,
        sampling: SamplingParams,
        idle_s: float,
        turns: int,
        write_calls: Callable[[Sequence[Any]], str],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._format, self._log, self._secret, self._sampling = format, log, secret, sampling
        self._idle_s, self._turns, self._write_calls, self._unix_s = idle_s, turns, write_calls, unix_s
        self._by_sample: dict[SampleId, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._labels: dict[tuple[str, str], tuple[str, int]] = {}  # (task, label of a group) -> (prompt id, epoch)
        self._opened = asyncio.Event()
        self._ended: deque[Session] = deque()
        self._counts = {"sessions": 0, "branches": 0, "expired": 0}

    # Environments.

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        """Answer a turn with the client's next request; before the first turn, wait for a client."""
        session = self._session(episode)
        session.episode = episode
        if episode.turns:
            self._answer(session, episode)
            if len(episode.turns) >= self._turns:
                return self._end(session, Observation(end="turns", outcome=session.reward))
        while True:
            request = await self._next(session)
            if request is None:
                late = not session.ending
                self._counts["expired"] += late
                ended = Observation(end="fault", reason="the client's session expired")
                if not late and episode.turns:
                    cut = episode.turns[-1].finish == "length"
                    ended = Observation(end="tokens" if cut else "done", outcome=session.reward)
                return self._end(session, ended)
            session.request = None
            if episode.turns and request.digest == episode.turns[-1].state_key:
                self._answer(session, episode)  # the same request again, after a restart of the gateway
                continue
            token_ids, new_branch = self._context(session, episode, request)
            self._counts["branches"] += new_branch
            question = request.asked.question
            session.asked = question.messages if question is not None else ()
            session.tools, session.reply = bool(question is not None and question.tools), None
            text = session.asked[-1].text if session.asked else ""
            return Observation(
                text=text, token_ids=pack_tokens(token_ids), new_branch=new_branch, state_key=request.digest
            )

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            if (session := self._by_sample.pop(sample_id, None)) is not None:
                self._close(session)

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    async def close(self) -> None:
        for session in self._by_sample.values():
            if session.live is not None:
                session.live.fail(ApiError(503, "the run stops; ask again", code="unavailable", retry_s=RETRY_S))
        self._log.close()

    # Tokens.

    def receive(self, sample_id: SampleId, start: int, token_ids: bytes, logprobs: bytes, length: int) -> None:
        """New tokens of a sample's turn.

        Args:
            start: completion position at which the turn starts.
            token_ids, logprobs: of the whole completion.
            length: of the completion.
        """
        session = self._by_sample.get(sample_id)
        if session is None or session.live is None or session.live.done:
            return
        first = max(session.sent, start)
        if length > first:
            part = slice(first * ITEM_BYTES, length * ITEM_BYTES)
            session.live.add(Piece(index=0, token_ids=token_ids[part], logprobs=logprobs[part]))
        session.sent = length

    def _answer(self, session: Session, episode: Episode) -> None:
        """Complete the answer to the request before the last turn."""
        turn = episode.turns[-1]
        generated = unpack_tokens(episode.token_ids)[len(episode.token_ids) // ITEM_BYTES - turn.end + turn.start :]
        live = session.live
        if live is not None and not live.done and live.digest == turn.state_key:
            known = sum(len(unpack_tokens(piece.token_ids)) for piece in live.pieces)
            rest = generated[known:]
            finish: Finish = turn.finish
            live.add(Piece(index=0, token_ids=pack_tokens(rest), logprobs=bytes(ITEM_BYTES * len(rest)), finish=finish))
        parse = self._format.parse if session.tools else None
        said = ChoiceText(self._format.decode, stops=self._sampling.stop_strings, parse=parse)
        session.reply = Said(role="assistant", text=said.feed(generated, turn.finish).text)
        session.sent = turn.end

    def _context(self, session: Session, episode: Episode, request: Request) -> tuple[list[int], bool]:
        """The tokens that a request adds to the session's, and whether they are a context of their own."""
        question, whole = request.asked.question, unpack_tokens(request.asked.prompt_ids)
        history = () if session.reply is None or not session.asked else (*session.asked, session.reply)
        if episode.turns and question is not None and history and len(question.messages) > len(history):
            earlier, new = question.messages[: len(history)], question.messages[len(history) :]
            if _same(earlier, history) and all(each.role != "assistant" for each in new):
                messages: list[Message] = as_messages(new, self._write_calls)
                return self._format.answer(episode, messages, tools=question.tools)
        known = unpack_tokens(episode.token_ids)
        if whole[: len(known)] == known and (len(whole) > len(known) or not episode.turns):
            return whole[len(known) :], False
        return whole, True

    # Clients.

    def find(self, key: str) -> Session | None:
        """The session of a key."""
        return self._by_key.get(key)

    def named(self, name: str) -> Session:
        """Raises ApiError: there is no such session."""
        if (session := self._by_name.get(name)) is None:
            raise ApiError(404, "there is no such session", code="session_not_found")
        return session

    async def open(self, task: str | None, group: str | None, metadata: dict[str, Any]) -> Session:
        """Attach a client to a sample that waits for one, of a task if it is given.

        Raises:
            ApiError: no sample of it needs a session now.
        """
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                while (session := next(self._free(task, group), None)) is None:
                    await self._opened.wait()
        except TimeoutError as error:
            what = f"task {task[:100]!r}" if task else "the run"
            message = f"{what} needs no session now; ask again"
            raise ApiError(429, message, kind=RATE, code="no_open_task", retry_s=RETRY_S) from error
        if group is not None:
            place = (session.sample_id.prompt_id, session.sample_id.epoch)
            self._labels.setdefault((session.sample_id.prompt_id, group), place)
        session.attached = True
        self._touch(session)
        session.woken.set()  # from now on its time is limited
        session.metadata = metadata
        self._log.write(Noted(session=session.name, event="attached", metadata=metadata))
        self._counts["sessions"] += 1
        return session

    def reward(self, session: Session, value: float) -> None:
        """The reward of the whole session, instead of the configured ones; the last one counts."""
        self._refuse_ended(session)
        session.reward = value
        self._log.write(Noted(session=session.name, event="reward", value=value))
        self._touch(session)

    def end(self, session: Session) -> None:
        """End the session after the answer that is being generated. Its group learns from it when it is complete."""
        if not session.ending:
            session.ending = True
            self._log.write(Noted(session=session.name, event="ended"))
            session.woken.set()

    def refuse(self, question: Question, session: Session) -> None:
        """Raises ApiError: the run draws otherwise, or the session has ended."""
        self._refuse_ended(session)
        run = self._sampling
        fixed = {
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k,
            "max_tokens": run.max_new_tokens,
            "stop": run.stop_strings,
        }
        for name, value in fixed.items():
            given = getattr(question, name)
            if given not in (None, (), value):
                raise invalid(f"the run draws with `{name}` = {value}; leave it out", name, code="fixed_by_the_run")
        if question.seed is not None:
            raise unsupported("seed", "in a session the run's seed decides")
        if question.n > 1:
            raise unsupported("n", "a session has one answer to each request")
        digest = _digest(question)
        if session.busy and session.live is not None and session.live.digest != digest:
            raise ApiError(409, "the session is answering another request", code="session_busy")

    async def generate(self, session: Session, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The answer to a request; an identical one to the last gets the same answer."""
        assert asked.question is not None
        digest = _digest(asked.question)
        if session.live is None or session.live.digest != digest:
            session.live = LiveTurn(digest)
            session.request = Request(asked=asked, digest=digest)
            session.woken.set()
        self._touch(session)
        async for piece in session.live.read():
            yield piece

    def about(self, session: Session) -> dict[str, Any]:
        """What GET of a session answers."""
        episode = session.episode
        turns = [] if episode is None else episode.turns
        state = "ended" if session.ended else "busy" if session.busy else "open"
        return {
            "id": session.name,
            "object": "tidemill.session",
            "status": state,
            "expires_at": int(session.expires_s),
            "reward": session.reward,
            "metadata": session.metadata,
            "turns": [{"start": turn.start, "end": turn.end, "text": turn.text} for turn in turns],
            "token_ids": [] if episode is None else unpack_tokens(episode.token_ids),
        }

    # Inside.

    def _session(self, episode: Episode) -> Session:
        found = self._by_sample.get(episode.sample_id)
        if found is None:
            name = f"{episode.sample_id.key:016x}-{episode.restarts}"
            key = "tm-" + hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:40]
            found = Session(name, key, episode.sample_id, episode.prompt)
            for noted in self._log.earlier(name):
                found.attached = True
                found.metadata = noted.metadata or found.metadata
                found.reward = noted.value if noted.event == "reward" else found.reward
                found.ending = found.ending or noted.event == "ended"
            self._by_sample[episode.sample_id] = self._by_name[name] = self._by_key[key] = found
            self._touch(found)
        if not found.attached:
            self._opened.set()
            self._opened = asyncio.Event()
        return found

    def _free(self, task: str | None, group: str | None) -> Iterator[Session]:
        for session in self._by_sample.values():
            sample_id = session.sample_id
            label = self._labels.get((sample_id.prompt_id, group)) if group is not None else None
            wanted = task in (None, sample_id.prompt_id) and label in (None, (sample_id.prompt_id, sample_id.epoch))
            if wanted and not session.attached:
                yield session

    async def _next(self, session: Session) -> Request | None:
        """The next request; None if the session is to end, or nobody asked in time."""
        while True:
            if session.request is not None:
                return session.request
            if session.ending:
                return None
            left_s = session.expires_s - self._unix_s() if session.attached else None
            if left_s is not None and left_s <= 0:
                return None
            session.woken.clear()
            try:
                async with asyncio.timeout(left_s):
                    await session.woken.wait()
            except TimeoutError:
                continue

    def _touch(self, session: Session) -> None:
        session.expires_s = self._unix_s() + self._idle_s

    def _end(self, session: Session, answer: Observation) -> Observation:
        self._close(session)
        return answer

    def _close(self, session: Session) -> None:
        if session.ended:
            return
        session.ended, session.request = True, None
        if session.live is not None:
            session.live.fail(_ended())
        session.live = None
        self._ended.append(session)
        if len(self._ended) > ENDED:
            oldest = self._ended.popleft()
            self._by_name.pop(oldest.name, None)
            self._by_key.pop(oldest.key, None)

    def _refuse_ended(self, session: Session) -> None:
        if session.ended or session.ending:
            raise _ended()


def _ended() -> ApiError:
    return ApiError(410, "the session has ended", code="session_ended")


def _digest(question: Question) -> str:
    """Equal for a request and its repetitions, streamed or not."""
    asked = msgspec.structs.replace(question, stream=False, usage=False, logprobs=False, token_ids=False)
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).hexdigest()


def _same(given: Sequence[Said], known: Sequence[Said]) -> bool:
    """Whether messages are those of the session; an answer may come back in other words for its calls."""
    return all(
        one.role == other.role
        and one.text.strip() == other.text.strip()
        and (one.role == "assistant" or one.calls == other.calls)
        for one, other in zip(given, known, strict=True)
    )
