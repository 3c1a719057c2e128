"""Samples files of the run directory: the lines that are written, and reading them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tidemill.core.records import Message, Prompt, Record, Trajectory, Turn, unpack_logprobs, unpack_tokens
from tidemill.telemetry.jsonl import encode, read_lines, write_atomically

Decode: TypeAlias = Callable[[Sequence[int]], str]
UNDECODABLE = "\ufffd"


class TokenTexts:
    """The text of single tokens, each decoded once per session."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def split(self, token_ids: Sequence[int], text: str) -> list[str]:
        """Cut `text` at token borders: one piece per token, whose concatenation is `text`.

        If several tokens encode the bytes of one character, the first gets the character and the others are empty. If
        `text` does not match the tokens (a scorer may have trimmed it), the tokens' decoded texts are returned.
        """
        for token_id in token_ids:
            if token_id not in self._texts:
                self._texts[token_id] = self._decode([token_id])
        decoded = [self._texts[token_id] for token_id in token_ids]
        return _align(decoded, text) or decoded


def _align(decoded: Sequence[str], text: str) -> list[str] | None:
    """Match each token's decoded text to its place in `text`; None if they do not match."""
    pieces: list[str] = []
    position = 0
    open_piece: int | None = None  # the first token of an incomplete character
    for piece in decoded:
        if UNDECODABLE in piece:
            open_piece = len(pieces) if open_piece is None else open_piece
            pieces.append("")
            continue
        # Some tokenizers decode a leading space only inside a text.
        found = text.find(piece, position) if piece else position
        if found < 0 or (open_piece is None and text[position:found].strip(" ")):
            return None
        if open_piece is not None and piece:
            pieces[open_piece] = text[position:found]
            position, open_piece = found, None
        pieces.append(text[position : found + len(piece)])
        position = found + len(piece)
    if open_piece is not None:
        pieces[open_piece] = text[position:]
        position = len(text)
    return pieces if position == len(text) else None


def sample_line(step: int, trajectory: Trajectory, prompt: Prompt, texts: TokenTexts | None) -> dict[str, Any]:
    """One line of a samples file; docs/metrics.md explains the keys."""
    token_ids = unpack_tokens(trajectory.completion_ids)
    reward = trajectory.reward
    line = {
        "step": step,
        "purpose": trajectory.sample_id.purpose,
        "prompt_id": prompt.prompt_id,
        "epoch": trajectory.sample_id.epoch,
        "index": trajectory.sample_id.index,
        "prompt": prompt.text,
        "completion": trajectory.text,
        "answer": prompt.answer,
        "token_ids": token_ids,
        "tokens": texts.split(token_ids, trajectory.text) if texts else [],
        "logprobs": _aligned_logprobs(trajectory, len(token_ids)),
        "reward": reward.value if reward else None,
        "components": reward.components if reward else {},
        "valid": reward.valid if reward else False,
        "reason": reward.reason if reward else "not scored",
        "finish": trajectory.finish,
        "weight": trajectory.weight,
        "versions": [[run.version.number, run.version.digest, run.start, run.end] for run in trajectory.versions],
    }
    if reward and reward.correct is not None:
        line["correct"] = reward.correct
    line |= message_lines(prompt)
    if trajectory.turns:
        line |= {
            "turns": turn_lines(trajectory),
            "episode_end": trajectory.episode_end,
            "fault": trajectory.fault,
        }
    return line


def message_lines(prompt: Prompt) -> dict[str, Any]:
    """The messages before the chat template; empty without one."""
    return {"messages": msgspec.to_builtins(prompt.messages)} if prompt.messages else {}


def turn_lines(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The turns, each with the tokens of every worker and version that generated it; see `SampleTurn`."""
    lines = []
    for turn in trajectory.turns:
        segments = [
            SampleSegment(start=start, end=end, worker=source.source, version=version.version.number)
            for source in trajectory.sources
            for version in trajectory.versions
            if (start := max(turn.start, source.start, version.start)) < (end := min(turn.end, source.end, version.end))
        ]
        lines.append({**msgspec.to_builtins(turn), "segments": msgspec.to_builtins(segments)})
    return lines


def _aligned_logprobs(trajectory: Trajectory, tokens: int) -> list[float | None]:
    """One entry per completion token, None for tokens the model did not generate, rounded to float32's precision; empty
    if the engine returned none."""
    if not trajectory.rollout_logprobs:
        return []
    logprobs = [round(value, 6) for value in unpack_logprobs(trajectory.rollout_logprobs)]
    aligned: list[float | None] = [None] * tokens
    taken = 0
    for segment in trajectory.segments:
        if segment.trained:
            length = segment.end - segment.start
            start = segment.start - trajectory.prompt_length
            aligned[start : start + length] = logprobs[taken : taken + length]
            taken += length
    return aligned


def chosen(count: int, limit: int) -> list[int]:
    """Indices of at most `limit` of `count` samples, spread evenly over the groups; 0 is no limit."""
    if limit == 0 or limit >= count:
        return list(range(count))
    return [index * count // limit for index in range(limit)]


def write_samples(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write all lines atomically."""
    write_atomically(path, b"".join(encode(line) + b"\n" for line in lines))


class SampleSegment(Record):
    """Tokens of a turn, completion positions [start, end): their worker ("vllm/spot-3") and policy version."""

    start: int
    end: int
    worker: str = ""
    version: int = 0

    @property
    def name(self) -> str:
        """`spot-3 v4`; empty if the worker is not known."""
        return f"{self.worker.rpartition('/')[2]} v{self.version}" if self.worker else ""


class SampleTurn(Turn):
    """A turn of a sample."""

    segments: tuple[SampleSegment, ...] = ()  # in order; empty if the workers are not known

    @property
    def workers(self) -> str:
        """`spot-3 v4, spot-1 v5`: who generated it, in order."""
        return ", ".join(segment.name for segment in self.segments)


class Sample(Record):
    """One line of a samples file; missing fields have their defaults."""

    step: int = 0
    prompt: str = ""
    completion: str = ""
    answer: str | None = None  # None: the row has none
    messages: tuple[Message, ...] = ()  # of the prompt, before the chat template; empty without one
    prompt_id: str = ""
    index: int = 0  # in its group
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    token_ids: tuple[int, ...] = ()  # of the completion
    reward: float | None = None
    components: dict[str, float] = {}
    valid: bool = False
    correct: bool | None = None  # None if the reward does not tell
    reason: str = ""
    finish: str = ""
    turns: tuple[SampleTurn, ...] = ()  # of an agent
    episode_end: str = ""
    fault: str = ""

    @property
    def transcript(self) -> str:
        """Prompt, turns and answers for a terminal, each after its author; of a single completion its text."""
        if not self.turns:
            return f"{self.prompt}{self.completion}"
        parts = [("prompt", self.prompt)]
        for number, turn in enumerate(self.turns, 1):
            parts.append((f"turn {number}, {turn.workers}, reward {turn.reward:g}", turn.text))
            parts += [(f"{call.name}({call.arguments})", call.result) for call in turn.calls]
            if turn.observation and not turn.calls:
                parts.append(("environment", turn.observation))
        reward = "no valid reward" if self.reward is None or not self.valid else f"reward {self.reward:g}"
        parts.append(("end", f"{self.episode_end}, {self.fault or reward}"))
        return "\n".join(f"[{author}] {text.strip()}" for author, text in parts)

    @property
    def length(self) -> int:
        """Generated tokens, which have logprobs; without logprobs, all tokens of the completion."""
        return sum(logprob is not None for logprob in self.logprobs) or len(self.token_ids)


def read_samples(path: Path) -> list[Sample]:
    """Every complete line of a samples file that is a sample; damaged lines are skipped."""
    found = []
    for _, line in read_lines(path):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.convert(line, Sample))
    return found
