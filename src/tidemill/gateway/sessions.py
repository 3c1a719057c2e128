"""Training sessions: an agent that asks over HTTP is the environment of a sample.

The run starts groups as always; the environment of each sample acts first, and waits for a client. A request is an
observation, the answer a turn. Requests continue the session's token ids, or start a branch with a context of its own.
Several answers to one request (`n`) are branches too: the next request shows which one the client went on with, and
the others are not trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from tidemill.core.protocols import CallLog, TurnFormat
from tidemill.core.records import (
    ITEM_BYTES,
    Episode,
    Observation,
    SampleId,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from tidemill.gateway.backend import CompletionRequest, TokenChunk
from tidemill.gateway.errors import RATE, SERVER, ApiError, invalid, unsupported
from tidemill.gateway.matching import Captured, Matching, hash_of, state_key_of
from tidemill.gateway.requests import CompletionParams
from tidemill.gateway.session import LiveAnswer, Session, SessionEvent, SessionLog

KEYS = {"max_tokens": "max_new_tokens"}
"""Names of parameters in [sampling], where they differ."""
ENDED = 1024
"""Sessions that have ended and can still be seen."""
SLOT_WAIT_S = 20.0
"""How long a client waits for a task when no sample needs one."""
RETRY_S = 5


class Sessions:
    """Implements `core.protocols.Environments`, and the sessions' side of `gateway.backend.Served`.

    Args:
        secret: keys are derived from it, so that they survive a restart.
        log: what clients did before a restart.
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
        self._matching = Matching(format, sampling.stop_strings, write_calls)
        self._log, self._secret, self._sampling = log, secret, sampling
        self._idle_s, self._turns, self._unix_s = idle_s, turns, unix_s
        self._by_sample: dict[SampleId, Session] = {}
        self._by_name: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._earlier = {self._key(name): name for name in log.earlier}  # of before a restart, not seen again yet
        self._wait_until_s = unix_s() + idle_s  # for those that had not ended
        self._members = Counter[tuple[str, int]]()  # sessions of each group: by prompt id and epoch
        self._group_until_s: dict[tuple[str, int], float] = {}  # by prompt id and epoch
        self._over: set[str] = set()  # names of those that are only known to have ended
        self._opened, self._closing, self._finished = asyncio.Event(), False, False
        self._ended: deque[Session] = deque()
        self._counts = {"sessions": 0, "branches": 0, "expired": 0}

    # Environments.

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        """Answer a turn with the client's next request; before the first turn, wait for a client."""
        session = self._session(episode)
        session.captured = captured = Captured(episode)
        if captured.turns:
            self._answer(session, captured)
        while (request := await self._next(session)) is not None:
            live = session.live
            assert live is not None, "set with the request"
            if (reason := self._used_up(captured)) is not None:
                live.fail(ApiError(400, f"{reason}; end the session", code="context_length_exceeded"))
                session.request = session.live = None
                continue
            again = bool(captured.turns) and captured.turns[-1].state_key == live.state_key
            session.choice = len(captured.choices) if again else 0
            if session.choice:
                token_ids, new_branch, unchosen = captured.context, True, tuple[int, ...]()
            else:
                token_ids, new_branch, unchosen = self._matching.continued(
                    captured, request.params, unpack_tokens(request.prompt_ids)
                )
            self._counts["branches"] += new_branch
            said = request.params.messages
            return Observation(
                text=said[-1].text if said else "",
                token_ids=pack_tokens(token_ids),
                new_branch=new_branch,
                state_key=live.state_key,
                unchosen=unchosen,
            )
        reason = ""
        if not session.ending:
            self._counts["expired"] += 1
            reason = "the client's session expired"
        elif session.failed:
            reason = "the client's agent failed"
        elif not captured.turns:
            reason = "the client ended its session without a request"
        self._close(session)
        if reason:
            return Observation(end="fault", reason=reason)
        rewards = session.turn_rewards
        return Observation(
            end="tokens" if captured.turns[-1].finish == "length" else "done",
            outcome=session.reward,
            turn_rewards={
                answer: rewards[place]
                for place, answers in enumerate(captured.requests)
                for answer in answers
                if place in rewards
            },
            unchosen=tuple(captured.choices[1:]),
        )

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            if (session := self._by_sample.pop(sample_id, None)) is not None:
                self._close(session)
                place = session.place
                self._members[place] -= 1
                if not self._members[place]:
                    del self._members[place]
                    self._group_until_s.pop(place, None)

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    def finish(self) -> None:
        """The run needs no session any more."""
        self._finished = True
        self._opened.set()

    async def close(self) -> None:
        """Answer the clients that wait; sessions go on when the run is resumed."""
        self._closing = True
        self._opened.set()
        for session in self._by_sample.values():
            if session.live is not None:
                session.live.fail(_stopping())

    # Tokens.

    def receive(self, sample_id: SampleId, start: int, token_ids: bytes, logprobs: bytes, length: int) -> None:
        """New tokens of a sample's turn.

        Args:
            start: completion position at which the turn starts.
            token_ids, logprobs: of the whole completion.
            length: of the completion.
        """
        session = self._by_sample.get(sample_id)
        if session is None or session.live is None or session.request is None:
            return
        live, index = session.live, session.choice
        if length > (first := start + live.received[index]):
            part = slice(first * ITEM_BYTES, length * ITEM_BYTES)
            live.add(TokenChunk(index=index, token_ids=token_ids[part], logprobs=logprobs[part]))

    def _answer(self, session: Session, captured: Captured) -> None:
        """Complete those answers to the last request that were generated."""
        live = session.live
        if live is None or live.state_key != captured.turns[-1].state_key:
            return
        live.complete(captured, captured.choices)
        if not live.open:
            session.request = None
            self._touch(session)  # from now on the client is silent

    def _used_up(self, captured: Captured) -> str | None:
        """Why there is no answer to a further request."""
        if len(captured.turns) >= self._turns:
            return f"the session has had its {self._turns} answers (`gateway.session_turns`)"
        if sum(turn.end - turn.start for turn in captured.turns) >= self._sampling.max_new_tokens:
            return f"the session has used its {self._sampling.max_new_tokens} tokens (`sampling.max_new_tokens`)"
        return None

    # Clients.

    def find(self, key: str) -> Session | None:
        """The session of a key. Raises ApiError: see `named`."""
        session = self._by_key.get(key)
        if session is None and key in self._earlier:
            raise self._absent(self._earlier[key])
        return session

    def named(self, name: str) -> Session:
        """Raises ApiError: there is no such session, it has ended, or a resumed run has not come to it yet."""
        if (session := self._by_name.get(name)) is None:
            if name in self._earlier.values():
                raise self._absent(name)
            raise ApiError(404, "there is no such session", code="session_not_found")
        return session

    def _absent(self, name: str) -> ApiError:
        """The error for a session of before a restart."""
        if not self._returns(name):
            return _ended()
        message = "the run has been resumed, and has not come to the session yet; ask again"
        return ApiError(503, message, kind=SERVER, code="unavailable", retry_s=1)

    def _returns(self, name: str | None) -> bool:
        """Whether a resumed run may still come to a session of before the restart."""
        if name is None:
            return False
        ended = any(noted.event in ("ended", "failed") for noted in self._log.earlier.get(name, ()))
        return (
            not ended and name not in self._over and name not in self._by_name and self._unix_s() < self._wait_until_s
        )

    async def open(self, task: str | None, group: str | None, metadata: dict[str, Any], retry_key: str = "") -> Session:
        """Attach a client to a sample that waits for one, of a task if it is given.

        Args:
            group: sessions of a task with the same name are of the same group, those with another of another.
            retry_key: with the same one a client gets the same session.

        Raises:
            ApiError: no sample of it needs a session now, or the key was used for another session.
        """
        body = msgspec.json.encode([task, group, metadata], order="deterministic")
        key = hash_of(retry_key.encode()) if retry_key else ""
        opened_by = f"{key}-{hash_of(body)}" if key else ""
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                while True:
                    if self._finished:
                        raise ApiError(410, "the run has finished", code="run_finished")
                    if self._closing:
                        raise _stopping()
                    same = (each for each in self._by_name.values() if key and each.opened_by.startswith(key))
                    if (earlier := next(same, None)) is not None:
                        if earlier.opened_by != opened_by:
                            raise _reused()
                        return earlier
                    waits = self._returns(self._log.opened_by.get(opened_by))
                    session = None if waits else next(self._free(task, group), None)
                    if session is not None:
                        break
                    await self._opened.wait()
        except TimeoutError as error:
            what = f"task {task[:100]!r}" if task else "the run"
            message = f"{what} needs no session now; ask again"
            raise ApiError(429, message, kind=RATE, code="no_open_task", retry_s=RETRY_S) from error
        session.attached = True
        self._touch(session)
        session.woken.set()  # from now on its time is limited
        session.metadata, session.group, session.opened_by = metadata, group or "", opened_by
        about: dict[str, Any] = {"metadata": metadata, "group": session.group, "opened_by": opened_by}
        self._log.write(SessionEvent(session=session.name, event="attached", **about))
        self._counts["sessions"] += 1
        return session

    def give_reward(self, session: Session, value: float, turn: int | None) -> None:
        """The reward of a turn, or of the whole session instead of the configured ones; the last one counts.

        Args:
            turn: number of the request; of several answers the one that is trained gets the reward.
        """
        if session.ended or session.ending:
            raise _ended()
        known = len(session.captured.requests) if session.captured is not None else 0
        if turn is not None and turn >= known:
            raise invalid(f"{known} requests of the session were answered, and the first is 0", "turn")
        noted = SessionEvent(session=session.name, event="reward", value=value, turn=turn)
        self._log.write(noted)
        session.recall(noted)
        self._touch(session)

    def end(self, session: Session, *, failed: bool) -> None:
        """End the session after the answer that is being generated. Its group learns from it when it is complete.

        Args:
            failed: not by the model's fault: the session is left out of its group.
        """
        if not session.ending:
            noted = SessionEvent(session=session.name, event="failed" if failed else "ended")
            self._log.write(noted)
            session.recall(noted)
            session.woken.set()

    def refuse(self, params: CompletionParams, session: Session) -> None:
        """Raises ApiError: the run samples otherwise, or the session has ended, or the run stops."""
        if session.ended or session.ending:
            raise _ended()
        if self._closing:
            raise _stopping()
        run = self._sampling
        fixed = {
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k,
            "max_tokens": run.max_new_tokens,
            "stop": run.stop_strings,
        }
        for name, value in fixed.items():
            given = getattr(params, name)
            if given not in (None, (), value):
                why = f"the run samples with {name} = {value} (`sampling.{KEYS.get(name, name)}`); leave it out"
                raise invalid(why, name, code="fixed_by_the_run")
        if params.seed is not None:
            raise unsupported("seed", "in a session the run's seed decides")
        if len(params.prompts) > 1:
            raise unsupported("prompt", "a session takes one prompt at a time")
        state_key, captured = state_key_of(params), session.captured
        live = [] if session.live is None else [session.live.state_key]
        if params.retry_key:
            own = state_key.rpartition("-")[2]
            for known in (*live, *(turn.state_key for turn in (captured.turns if captured else ()))):
                if known.rpartition("-")[2] == own and known != state_key:
                    raise _reused()
        if session.live is not None and session.live.open and live != [state_key]:
            raise ApiError(409, "the session is answering another request", code="session_busy")

    async def generate(self, session: Session, requested: CompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answers to a request; one that is sent again gets the same answers: the last one, or any with the same
        `Idempotency-Key`."""
        params = requested.params
        state_key = state_key_of(params)
        if session.live is None or session.live.state_key != state_key:
            live = LiveAnswer(state_key, params.n)
            if (captured := session.captured) is not None:
                last = bool(captured.turns) and captured.turns[-1].state_key == state_key
                answers = [at for at, turn in enumerate(captured.turns) if turn.state_key == state_key]
                live.complete(captured, captured.choices if last else answers if params.retry_key else ())
            if live.open:
                session.live = live
                session.request = requested
                session.woken.set()
        else:
            live = session.live
        self._touch(session)
        async for chunk in live.read():
            yield chunk

    def about(self, session: Session) -> dict[str, Any]:
        """What GET of a session answers."""
        captured = session.captured
        requests = () if captured is None else captured.requests
        busy = session.live is not None and session.live.open
        return {
            "id": session.name,
            "object": "tidemill.session",
            "status": "ended" if session.ended or session.ending else "busy" if busy else "open",
            "expires_at": int(session.expires_s),
            "reward": session.reward,
            "group": session.group or None,
            "metadata": session.metadata,
            "turns": [
                {
                    "answers": [
                        {"text": captured.turns[at].text, "token_ids": captured.turn_ids(at)} for at in answers
                    ],
                    "reward": session.turn_rewards.get(place),
                }
                for place, answers in enumerate(requests)
                if captured is not None
            ],
            "token_ids": [] if captured is None else captured.ids,
            "branches": [] if captured is None else captured.branches,
        }

    # Inside.

    def _key(self, name: str) -> str:
        return "tm-" + hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:40]

    def _session(self, episode: Episode) -> Session:
        found = self._by_sample.get(episode.sample_id)
        if found is None:
            name = f"{episode.sample_id.key:016x}-{episode.restarts}"
            key = self._key(name)
            found = Session(name, key, episode.sample_id, episode.prompt)
            for noted in self._log.earlier.get(name, ()):
                found.recall(noted)
            self._by_sample[episode.sample_id] = self._by_name[name] = self._by_key[key] = found
            self._earlier.pop(key, None)
            self._members[found.place] += 1
            self._touch(found)
            self._opened.set()  # a client may wait for a free session, or for this one
            self._opened = asyncio.Event()
        return found

    def _free(self, task: str | None, group: str | None) -> Iterator[Session]:
        """Sessions that no client has, of a task and of the group with a name."""
        names = dict[tuple[str, int], str]()  # of groups that have one, by prompt id and epoch
        for session in self._by_sample.values():
            if session.group:
                names[session.place] = session.group
        for session in self._by_sample.values():
            place = session.place
            if session.attached or task not in (None, place[0]):
                continue
            taken = any(name == group and other[0] == place[0] for other, name in names.items())
            if group is None or names.get(place) == group or (place not in names and not taken):
                yield session

    async def _next(self, session: Session) -> CompletionRequest | None:
        """The next request; None if the session is to end, or no client asked in time."""
        while True:
            if session.request is not None:
                return session.request
            if session.ending:
                return None
            # It is given up if its client is silent, or if its group has clients and it has none.
            until_s = session.expires_s if session.attached else self._group_until_s.get(session.place)
            left_s = None if until_s is None else until_s - self._unix_s()
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
        if session.attached:
            begun = session.place in self._group_until_s
            self._group_until_s[session.place] = session.expires_s
            for other in self._by_sample.values() if not begun else ():
                other.woken.set()  # from now on the time of its group's other sessions is limited

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
            self._earlier[oldest.key] = oldest.name
            self._over.add(oldest.name)


def _ended() -> ApiError:
    return ApiError(410, "the session has ended", code="session_ended")


def _stopping() -> ApiError:
    return ApiError(503, "the run stops; ask again", kind=SERVER, code="unavailable", retry_s=RETRY_S)


def _reused() -> ApiError:
    return ApiError(409, "this Idempotency-Key was used with another request", code="idempotency_key_reused")
