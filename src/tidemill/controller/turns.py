"""The turns of an agent's sample: what the engine is asked for, what the environment answered, and the trajectory.

The completion is one buffer. A turn appends the tokens that the policy generated, its observation the tokens of the
environment's answer; an observation that starts a new branch holds the whole context of the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tidemill.core.records import ITEM_BYTES, Call, EpisodeEnd, Observation, Record, Segment, TokenBuffer, Turn, count

Decode = Callable[[Sequence[int]], str]

NO_CALLS: Mapping[int, Call] = MappingProxyType({})


class AgentLimits(Record):
    """Limits of a turn that the controller sends to engines; compared on resume."""

    context_tokens: int  # of prompt and completion, or of one branch
    turn_tokens: int = 0  # generated in one turn; 0: no limit
    opens: bool = False  # the environment acts before the first turn


@dataclass(slots=True, kw_only=True)
class TurnState:
    """A turn that the engine has ended."""

    start: int  # completion positions [start, end)
    end: int
    finish: Literal["stop", "length"]
    state_key: str  # of the state that the policy saw
    text: str | None = None  # decoded when it is first needed
    observation: Observation | None = None  # None until the environment has answered
    observation_end: int = 0
    chosen: bool = True  # whether it is trained: a client may ask for several answers, and continue one
    reward: float | None = None  # instead of the observation's

    def record(self, decode: Decode, tokens: Sequence[int]) -> Turn:
        """The turn with its text; `tokens` is the completion."""
        if self.text is None:
            self.text = decode(tokens[self.start : self.end])
        answer = self.observation or Observation()
        return Turn(
            start=self.start,
            end=self.end,
            text=self.text,
            finish=self.finish,
            observation=answer.text,
            observation_end=self.observation_end,
            final=answer.final,
            reward=answer.reward if self.reward is None else self.reward,
            state_key=self.state_key,
            calls=answer.calls,
            timeouts=answer.timeouts,
        )


@dataclass(slots=True)
class Turns:
    """The turns of one sample. All positions are those of its completion. Without turns it takes little memory."""

    ended: tuple[TurnState, ...] = ()
    opening: Observation | None = None  # the environment's, before the first turn
    start: int = 0  # of the current turn
    state_key: str = ""  # of the state that the current turn sees
    observations: tuple[tuple[int, int], ...] = ()  # ranges [start, end) that were not generated
    observed: int = 0  # tokens in them
    contexts: tuple[tuple[int, int], ...] = ()  # those of them that start a branch
    finished_calls: Mapping[int, Call] = field(default_factory=lambda: NO_CALLS)  # of the acting turn
    started_calls: tuple[int, ...] = ()
    returning: bool = False  # an observation was appended, and no engine has continued it yet
    episode_end: EpisodeEnd = ""

    def generated(self, length: int) -> int:
        """Tokens of a completion of `length` tokens that the policy generated."""
        return length - self.observed

    def base(self) -> tuple[int, int]:
        """(start of the current branch's context, its end); (0, 0) in the first branch, whose context is the prompt."""
        return self.contexts[-1] if self.contexts else (0, 0)

    def context_length(self, length: int, prompt_tokens: int) -> int:
        """Tokens that the policy sees in the current branch."""
        start, _ = self.base()
        return length - start + (0 if self.contexts else prompt_tokens)

    def limit(self, max_new_tokens: int, limits: AgentLimits) -> int:
        """Tokens after the current branch's context at which the current turn ends, however often it is interrupted."""
        room = max_new_tokens - self.generated(self.start)
        if limits.turn_tokens:
            room = min(room, limits.turn_tokens)
        return self.start - self.base()[1] + room

    def end_turn(
        self,
        finish: Literal["stop", "length"],
        *,
        length: int,
        prompt_tokens: int,
        max_new_tokens: int,
        limits: AgentLimits,
    ) -> bool:
        """End the current turn; returns whether the episode ends with it because a limit of the sample is reached."""
        self.ended += (TurnState(start=self.start, end=length, finish=finish, state_key=self.state_key),)
        if finish == "length" and not limits.opens:  # else the environment decides: its client may give a reward
            if self.generated(length) >= max_new_tokens:
                self.episode_end = "tokens"
            elif self.context_length(length, prompt_tokens) >= limits.context_tokens:
                self.episode_end = "context"
        return bool(self.episode_end)

    def observe(
        self, answer: Observation, *, length: int, prompt_tokens: int, max_new_tokens: int, limits: AgentLimits
    ) -> TokenBuffer:
        """Store the environment's answer to the last turn, or its opening; returns the tokens to append. The episode
        may end."""
        turn = self.ended[-1] if self.ended else None
        if turn is None:
            self.opening = answer
        else:
            turn.observation = answer
        self.finished_calls, self.started_calls = NO_CALLS, ()
        self.episode_end = answer.end
        for index in answer.unchosen:
            self.ended[index].chosen = False
        for index, reward in answer.turn_rewards.items():
            self.ended[index].reward = reward
        added = count(answer.token_ids)
        if not self.episode_end:
            context = added if answer.new_branch else self.context_length(length, prompt_tokens) + added
            if self.generated(length) >= max_new_tokens:
                self.episode_end = "tokens"
            elif context >= limits.context_tokens:
                self.episode_end = "context"
        if self.episode_end:
            return b""
        self.start = length + added
        self.state_key = answer.state_key
        self.returning = True
        if turn is not None:
            turn.observation_end = self.start
        if turn is not None or added:
            self.observations += ((length, self.start),)
        self.observed += self.start - length
        if answer.new_branch:
            self.contexts += ((length, self.start),)
        return answer.token_ids

    def segments(self, prompt_tokens: int, length: int) -> tuple[Segment, ...]:
        """Prompt, actions, observations and contexts in order; only actions of chosen turns are trained."""
        segments = [Segment(role="prompt", start=0, end=prompt_tokens, trained=False)]
        unchosen = {turn.start for turn in self.ended if not turn.chosen}
        at = 0
        for start, end in (*self.observations, (length, length)):
            if start > at or not self.observations:
                first = prompt_tokens + at
                last = prompt_tokens + start
                trained = at not in unchosen
                segments.append(Segment(role="action", start=first, end=last, trained=trained))
            if end > start:
                role: Literal["context", "observation"] = "context" if (start, end) in self.contexts else "observation"
                segments.append(Segment(role=role, start=prompt_tokens + start, end=prompt_tokens + end, trained=False))
            at = end
        return tuple(segments)

    def trained(self, buffer: bytes) -> bytes:
        """The items of trained tokens, of a buffer with one item for each completion token (or the first of them)."""
        if not self.observations:
            return buffer
        parts, at = [], 0
        left_out = [(turn.start, turn.end) for turn in self.ended if not turn.chosen]
        for start, end in sorted([*self.observations, *left_out]):
            parts.append(buffer[at * ITEM_BYTES : start * ITEM_BYTES])
            at = end
        return b"".join([*parts, buffer[at * ITEM_BYTES :]])
