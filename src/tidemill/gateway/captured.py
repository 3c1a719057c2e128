"""The token ids of a session by turn and branch, as the controller has them."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.records import ITEM_BYTES, Episode, Turn, unpack_tokens


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

    def turn_ids(self, index: int) -> list[int]:
        """What the policy generated in a turn."""
        return unpack_tokens(self._part(self._episode.completion_ids, index))

    def turn_tokens(self, index: int) -> tuple[bytes, bytes]:
        """The same as int32 [T], and its logprobs, float32 [T]."""
        episode = self._episode
        return self._part(episode.completion_ids, index), self._part(episode.completion_logprobs, index)

    def at(self, index: int) -> Episode:
        """The episode as if the turn `index`, of the last choices, were the only one of them."""
        packed, _ = self.turn_tokens(index)
        before = self._episode.token_ids[: len(self.context) * ITEM_BYTES]
        kept = (*self.turns[: self.choices[0]], self.turns[index])
        return Episode(
            sample_id=self._episode.sample_id, prompt=self._episode.prompt, turns=kept, token_ids=before + packed
        )

    def _part(self, buffer: bytes, index: int) -> bytes:
        turn = self.turns[index]
        return buffer[turn.start * ITEM_BYTES : turn.end * ITEM_BYTES]
