"""A session's tokens by turn and branch, and how a request continues them: what it adds, and to which answer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import ITEM_BYTES, Episode, Turn, unpack_tokens
from tidemill.gateway.requests import ChatMessage, CompletionParams, as_messages
from tidemill.gateway.texts import ChoiceText


class Captured:
    """An episode at the end of its last turn.

    Attributes:
        turns: of the episode.
        ids: the context of the last turn, and the turn.
    """

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.turns: Sequence[Turn] = episode.turns
        self.ids = unpack_tokens(episode.token_ids)

    @property
    def choices(self) -> Sequence[int]:
        """The turns that answer the last request, oldest first: several if it asked for `n` of them."""
        return self.requests[-1] if self.turns else ()

    @property
    def context(self) -> list[int]:
        """What the policy saw before the last turn."""
        return self.ids[: len(self.ids) - len(self.turn_ids(len(self.turns) - 1))] if self.turns else self.ids

    @property
    def requests(self) -> list[list[int]]:
        """The turns that answer each request."""
        found = list[list[int]]()
        for place, turn in enumerate(self.turns):
            if place and turn.state_key == self.turns[place - 1].state_key:
                found[-1].append(place)
            else:
                found.append([place])
        return found

    @property
    def branches(self) -> list[list[int]]:
        """The ids of each branch: its context, and what came after it."""
        prompt, completion = unpack_tokens(self._episode.prompt.token_ids), unpack_tokens(self._episode.completion_ids)
        starts = self._episode.branch_starts
        parts = [completion[a:b] for a, b in zip((0, *starts), (*starts, len(completion)), strict=True)]
        first = prompt + parts[0] if parts[0] or not starts else []
        return [part for part in (first, *parts[1:]) if part]

    def turn_tokens(self, index: int) -> tuple[bytes, bytes]:
        """What the policy generated in a turn, int32 [T], and its logprobs, float32 [T]."""
        part = slice(self.turns[index].start * ITEM_BYTES, self.turns[index].end * ITEM_BYTES)
        return self._episode.completion_ids[part], self._episode.completion_logprobs[part]

    def turn_ids(self, index: int) -> list[int]:
        return unpack_tokens(self.turn_tokens(index)[0])

    def at(self, index: int) -> Episode:
        """The episode as if the turn `index`, of the last choices, were the only one of them."""
        packed, _ = self.turn_tokens(index)
        before = self._episode.token_ids[: len(self.context) * ITEM_BYTES]
        kept = (*self.turns[: self.choices[0]], self.turns[index])
        return Episode(
            sample_id=self._episode.sample_id, prompt=self._episode.prompt, turns=kept, token_ids=before + packed
        )


class Matching:
    """Compares requests with what a session has.

    Args:
        stops: stop strings of the run, which answers do not show.
        write_calls: tool calls as the model writes them.
    """

    def __init__(self, format: TurnFormat, stops: Sequence[str], write_calls: Callable[[Sequence[Any]], str]) -> None:  # noqa: A002 - as in Served
        self._format, self._stops, self._write_calls = format, stops, write_calls

    def continued(
        self, captured: Captured, params: CompletionParams, whole: Sequence[int]
    ) -> tuple[list[int], bool, tuple[int, ...]]:
        """The tokens that a request adds to the session's, whether they are a context of their own, and the answers
        to the last request that it does not continue.

        Args:
            whole: the request's prompt as token ids.
        """
        if not captured.turns:
            known = captured.ids
            continues = list(whole[: len(known)]) == known
            return (list(whole[len(known) :]), False, ()) if continues else (list(whole), True, ())
        choices = captured.choices
        chosen, messages = self._chosen(captured, params, whole)
        unchosen = tuple(turn for turn in choices if turn != chosen)
        ids = captured.context + captured.turn_ids(chosen)
        added, rendered = list[int](), True
        if messages:
            spoken = as_messages(messages, self._write_calls)
            with contextlib.suppress(UserError):  # the template changes earlier turns: a context of its own
                added, rendered = self._format.answer(captured.at(chosen), spoken, tools=params.tools)
        elif list(whole[: len(ids)]) == ids and len(whole) > len(ids):
            added, rendered = list(whole[len(ids) :]), False
        if rendered:
            return list(whole), True, unchosen
        return (added, False, unchosen) if chosen == choices[-1] else (ids + added, True, unchosen)

    def _chosen(
        self, captured: Captured, params: CompletionParams, whole: Sequence[int]
    ) -> tuple[int, Sequence[ChatMessage]]:
        """The answer to the last request that a request continues, and its messages after it; the first answer and no
        messages if it is not seen to continue any."""
        said, choices = params.messages, captured.choices
        for turn in choices:
            ids = captured.context + captured.turn_ids(turn)
            if not said and list(whole[: len(ids)]) == ids:
                return turn, ()
        asked = captured.turns[-1].state_key.partition("-")[0]
        place = next(
            (at for at, one in enumerate(said) if one.role == "assistant" and conversation_digest(said[:at]) == asked),
            None,
        )
        if place is None or any(one.role == "assistant" for one in said[place + 1 :]) or place + 1 == len(said):
            return choices[0], ()
        given, context = said[place], captured.context
        equal = list[tuple[bool, int]]()
        for turn in choices:
            text = ChoiceText.answering(params, context, format=self._format, stops=self._stops)
            news = text.feed(captured.turn_ids(turn), captured.turns[turn].finish)
            if news.text.strip() == given.text.strip():
                calls = [(call.name, call.arguments) for call in news.calls]
                equal.append((calls != [(call.name, call.arguments) for call in given.calls], turn))
        # An answer may come back in other words for its calls; then its text decides.
        return (min(equal)[1], said[place + 1 :]) if equal else (choices[0], ())


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def conversation_digest(said: Sequence[ChatMessage]) -> str:
    """Of a conversation. An answer may come back in other words for its calls, and with other white space around it."""
    same = [(one.role, one.text.strip(), () if one.role == "assistant" else one.calls) for one in said]
    return hash_of(msgspec.msgpack.encode(same))


def state_key_of(params: CompletionParams) -> str:
    """Equal for a request and its repetitions, streamed or not: digests of its conversation, of all of it, and of its
    retry key."""
    same = msgspec.structs.replace(params, stream=False, usage=False, logprobs=False, token_ids=False, retry_key="")
    retry_key = hash_of(params.retry_key.encode()) if params.retry_key else ""
    return f"{conversation_digest(params.messages)}-{hash_of(msgspec.msgpack.encode(same))}-{retry_key}"
