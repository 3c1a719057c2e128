"""What the model writes and the environment answers in a simulated episode: functions of everything that they see.

A turn depends on its whole context, so a lost, repeated or misplaced observation changes every later token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from tidemill.controller.turns import AgentLimits
from tidemill.core.records import (
    ITEM_BYTES,
    Call,
    EpisodeEnd,
    EpisodeLimit,
    Finish,
    LogprobBuffer,
    Observation,
    Record,
    SampleId,
    Segment,
    TokenBuffer,
    Trajectory,
    VersionRun,
    count,
)

FAULTS = ("the environment is dead", "a call was interrupted")

FINISHES: dict[str, Finish | EpisodeLimit] = {"tokens": "length", "context": "length", "turns": "turns"}
"""Of a sample, by the end of its episode."""

Stage: TypeAlias = Literal["generating", "acting", "ended"]


class AgentPlan(Record):
    """An agent of a scenario: its limits, and how often its environments misbehave."""

    limits: AgentLimits
    longest_turn: int
    most_turns: int
    slow_s: float  # of calls and answers, at most
    dead: float  # shares: no answer, then a fault
    dies: float  # a call's process dies
    late: float  # it goes on after its sample was restarted or dropped
    raises: float  # of turns, in lives that a fault may end


class ToldTurn(Record):
    """A turn as the controller describes it."""

    start: int
    end: int
    finish: str
    observation_end: int = 0
    reward: float = 0.0
    calls: tuple[Call, ...] = ()
    answered: bool = True


class Told(Record):
    """A whole or partial episode as the controller describes it."""

    token_ids: TokenBuffer
    logprobs: LogprobBuffer  # of generated tokens
    versions: tuple[VersionRun, ...]
    turns: tuple[ToldTurn, ...]  # that ended
    end: EpisodeEnd = ""
    fault: str = ""


class Walked(Record):
    """What an episode must be."""

    stage: Stage
    finish: Finish | EpisodeLimit | None
    segments: tuple[Segment, ...]


class WrongEpisode(ValueError):
    """An episode is not what its model and environment define."""


def told_of(trajectory: Trajectory) -> Told:
    turns = tuple(
        ToldTurn(
            start=turn.start,
            end=turn.end,
            finish=turn.finish,
            observation_end=turn.observation_end,
            reward=turn.reward,
            calls=turn.calls,
        )
        for turn in trajectory.turns
    )
    return Told(
        token_ids=trajectory.completion_ids,
        logprobs=trajectory.rollout_logprobs,
        versions=trajectory.versions,
        turns=turns,
        end=trajectory.episode_end,
        fault=trajectory.fault,
    )


@lru_cache(maxsize=65536)
def turn_key(sample_id: SampleId, what: str, context: TokenBuffer) -> int:
    name = f"{sample_id.purpose} {sample_id.prompt_id} {sample_id.epoch} {sample_id.index} {what} ".encode()
    return int.from_bytes(hashlib.blake2b(name + context, digest_size=8).digest(), "little")


@lru_cache(maxsize=65536)
def _drawn(key: int, digest: str, length: int) -> tuple[TokenBuffer, LogprobBuffer]:
    rng = random.Random(f"{key} {digest}")
    return rng.randbytes(length * ITEM_BYTES), rng.randbytes(length * ITEM_BYTES)


class Episodes:
    """The model and the environment of an agent."""

    def __init__(self, plan: AgentPlan) -> None:
        self.plan = plan

    def ending(self, sample_id: SampleId, branch: int, context: TokenBuffer, most: int) -> tuple[int, Finish]:
        """Tokens of a turn after `context`, at most `most`, and why it ends."""
        length = 1 + turn_key(sample_id, f"turn {branch}", context) % self.plan.longest_turn
        most = min(most, self.plan.limits.context_tokens - count(context))
        return min(length, most), "stop" if length <= most else "length"

    def drawn(
        self, sample_id: SampleId, branch: int, context: TokenBuffer, digest: str, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        """Tokens [start, end) of the turn after `context` under the weights `digest`, and their logprobs."""
        key = turn_key(sample_id, f"turn {branch}", context)
        tokens, logprobs = _drawn(key, digest, self.plan.longest_turn)
        piece = slice(start * ITEM_BYTES, end * ITEM_BYTES)
        return tokens[piece], logprobs[piece]

    def calls(self, sample_id: SampleId, turn: int, context: TokenBuffer) -> tuple[Call, ...]:
        """The calls of a turn; every second of them must not be repeated."""
        key = turn_key(sample_id, f"calls {turn}", context)
        return tuple(
            Call(call_id=f"{sample_id.key}/{turn}/{index}", name="tool", arguments="{}", result=f"{key} {index}")
            for index in range(key % 5)
        )

    def answer(self, sample_id: SampleId, turn: int, prompt_ids: TokenBuffer, context: TokenBuffer) -> Observation:
        """The environment's answer to a turn that ends `context`."""
        key = turn_key(sample_id, f"answer {turn}", context)
        end: EpisodeEnd = "done" if key % 7 == 0 else "failure" if key % 23 == 0 else ""
        if not end and turn + 1 >= self.plan.most_turns:
            end = "turns"
        added, _ = _drawn(key, "answer", (key >> 8) % 6)
        branch = not end and (key >> 16) % 4 == 1
        return Observation(
            token_ids=b"" if end else prompt_ids + added if branch else added,
            new_branch=branch,
            reward=float((key >> 24) % 3) / 2,
            end=end,
            outcome=0.0 if end == "failure" else 1.0 if end == "done" and key % 2 else None,
            state_key=str(key % 3),
            calls=self.calls(sample_id, turn, context),
        )

    def walk(self, sample_id: SampleId, prompt_ids: TokenBuffer, told: Told, most: int) -> Walked:
        """Compare an episode with its definition.

        Args:
            most: generated tokens.

        Raises:
            WrongEpisode: it differs.
        """
        at = branch = generated = 0
        context, prompt = prompt_ids, count(prompt_ids)
        segments = [Segment(role="prompt", start=0, end=prompt, trained=False)]
        total = count(told.token_ids)

        def walked(stage: Stage, finish: Finish | EpisodeLimit | None = None) -> Walked:
            _agree(at, total, f"{sample_id} has {total} tokens, expected {at}")
            return Walked(stage=stage, finish=finish, segments=tuple(segments))

        for turn in range(len(told.turns) + 1):
            room = most - generated
            if self.plan.limits.turn_tokens:
                room = min(room, self.plan.limits.turn_tokens)
            length, finish = self.ending(sample_id, branch, context, room)
            ended = turn < len(told.turns)
            have = length if ended else min(length, total - at)
            self._check_drawn(sample_id, branch, context, told, at, have, generated)
            if have:
                segments.append(Segment(role="action", start=prompt + at, end=prompt + at + have, trained=True))
            context += told.token_ids[at * ITEM_BYTES : (at + have) * ITEM_BYTES]
            start, at, generated = at, at + have, generated + have
            if not ended:
                return walked("generating")
            said = told.turns[turn]
            _agree((said.start, said.end, said.finish), (start, at, finish), f"{sample_id} has a wrong turn {turn}")
            last = turn + 1 == len(told.turns)
            if finish == "length" and (generated >= most or count(context) >= self.plan.limits.context_tokens):
                _agree(last, True, f"{sample_id} goes on after a limit")
                _agree(told.end, "tokens" if generated >= most else "context", f"{sample_id} ended wrongly")
                return walked("ended", "length")
            if last and not said.answered:
                return walked("acting")
            if last and told.end == "fault":
                _agree(told.fault in FAULTS, True, f"{sample_id} has the fault {told.fault!r}")
                return walked("ended", "stop")
            answer = self.answer(sample_id, turn, prompt_ids, context)
            given = (answer.reward, answer.calls)
            _agree((said.reward, said.calls), given, f"{sample_id} has a wrong answer to turn {turn}")
            after = count(answer.token_ids) + (0 if answer.new_branch else count(context))
            full = generated >= most or after >= self.plan.limits.context_tokens
            if answer.end or full:
                end = answer.end or ("tokens" if generated >= most else "context")
                _agree((last, told.end), (True, end), f"{sample_id} ended wrongly")
                return walked("ended", FINISHES.get(end, "stop"))
            observed = told.token_ids[at * ITEM_BYTES : said.observation_end * ITEM_BYTES]
            _agree(observed, answer.token_ids, f"{sample_id} has a wrong observation {turn}")
            if answer.token_ids:
                role: Literal["context", "observation"] = "context" if answer.new_branch else "observation"
                segments.append(Segment(role=role, start=prompt + at, end=prompt + said.observation_end, trained=False))
            at = said.observation_end
            context, branch = (answer.token_ids, branch + 1) if answer.new_branch else (context + observed, branch)
        raise AssertionError("a walk ends in the loop")

    def _check_drawn(
        self, sample_id: SampleId, branch: int, context: TokenBuffer, told: Told, at: int, have: int, generated: int
    ) -> None:
        """Check `have` tokens from completion position `at`; `generated` were generated before."""
        for run in told.versions:
            begin, end = max(at, run.start), min(at + have, run.end)
            if begin >= end:
                continue
            right = self.drawn(sample_id, branch, context, run.version.digest, begin - at, end - at)
            first = generated + begin - at
            logprobs = told.logprobs[first * ITEM_BYTES : (first + end - begin) * ITEM_BYTES]
            said = told.token_ids[begin * ITEM_BYTES : end * ITEM_BYTES], logprobs
            _agree(said, right, f"{sample_id} has wrong tokens or logprobs in [{begin}, {end}) of {run.version}")


def _agree(said: object, right: object, what: str) -> None:
    if said != right:
        raise WrongEpisode(f"{what}: {said!r:.200}, expected {right!r:.200}")


def compact(buffer: bytes, left_out: Sequence[tuple[int, int]]) -> bytes:
    """The items of a buffer (4 bytes each) outside the ranges [start, end)."""
    outside = [at for at in range(len(buffer) // ITEM_BYTES) if not any(start <= at < end for start, end in left_out)]
    return b"".join(buffer[at * ITEM_BYTES : (at + 1) * ITEM_BYTES] for at in outside)
