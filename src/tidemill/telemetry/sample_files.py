"""Samples files of the run directory: the lines that are written, and reading them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tidemill.core.records import (
    LogprobBuffer,
    Message,
    Prompt,
    Record,
    Trajectory,
    Turn,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.telemetry.jsonl import SharedLines, disk_error, encode, read_lines, write_atomically
from tidemill.telemetry.run_dir import SAMPLES_INDEX, TRAINING_PURPOSE

Decode: TypeAlias = Callable[[Sequence[int]], str]
UNDECODABLE = "\ufffd"
TOKEN_FIGURES = ("token_advantages", "trainer_logprobs", "entropies")
"""Fields of a `SampleUpdate` with a value per trained token."""


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
    """One line of a samples file; docs/reference/metrics.md explains the keys."""
    token_ids = unpack_tokens(trajectory.completion_ids)
    reward, update = trajectory.reward, trajectory.update
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
        "logprobs": _aligned(trajectory, trajectory.rollout_logprobs),
        "reward": reward.value if reward else None,
        "components": reward.components if reward else {},
        "valid": reward.valid if reward else False,
        "reason": reward.reason if reward else "not scored",
        "finish": trajectory.finish,
        "weight": trajectory.weight,
        "versions": [[run.version.number, run.version.digest, run.start, run.end] for run in trajectory.versions],
        "sources": [
            [part.worker, part.lease, part.version, part.start, part.end]
            for part in segments_of(trajectory, 0, len(token_ids))
        ],
        "advantage": round(update.advantage, 6) if update else None,
    }
    if update:
        per_token = {name: getattr(update, name) for name in TOKEN_FIGURES}
        line["signal"] = update.signal
        line |= {name: _aligned(trajectory, values) for name, values in per_token.items() if values}
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


def segments_of(trajectory: Trajectory, start: int, end: int) -> list[SampleSegment]:
    """The completion tokens [start, end) by worker and version, in order; empty if the workers are not known."""
    return [
        SampleSegment(start=first, end=last, worker=source.source, lease=source.lease, version=version.version.number)
        for source in trajectory.sources
        for version in trajectory.versions
        if (first := max(start, source.start, version.start)) < (last := min(end, source.end, version.end))
    ]


def turn_lines(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The turns, each with the tokens of every worker and version that generated it; see `SampleTurn`."""
    return [
        {
            **msgspec.to_builtins(turn),
            "segments": msgspec.to_builtins(segments_of(trajectory, turn.start, turn.end)),
        }
        for turn in trajectory.turns
    ]


def _aligned(trajectory: Trajectory, values: LogprobBuffer) -> list[float | None]:
    """One entry per completion token, None for tokens the model did not generate, rounded to float32's precision; empty
    without values of the trained tokens."""
    if not values:
        return []
    rounded = [round(value, 6) for value in unpack_logprobs(values)]
    aligned: list[float | None] = [None] * trajectory.completion_length
    taken = 0
    for segment in trajectory.segments:
        if segment.trained:
            length = segment.end - segment.start
            start = segment.start - trajectory.prompt_length
            aligned[start : start + length] = rounded[taken : taken + length]
            taken += length
    return aligned


def chosen(count: int, limit: int) -> list[int]:
    """Indices of at most `limit` of `count` samples, spread evenly over the groups; 0 is no limit."""
    if limit == 0 or limit >= count:
        return list(range(count))
    return [index * count // limit for index in range(limit)]


def write_samples(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write all lines atomically, and index the file. A kill in between leaves a file without a line in the index, or
    with that of another size, which readers index themselves.

    Raises:
        UserError: the disk is full or the directory is not writable.
    """
    encoded = [encode(line) + b"\n" for line in lines]
    index = SharedLines(path.parent.with_name(SAMPLES_INDEX))
    write_atomically(path, b"".join(encoded))
    try:
        index.append(index_line(path.name, encoded))
    except OSError as error:
        raise disk_error(error, index.path) from error


def index_line(file: str, lines: Iterable[bytes]) -> dict[str, Any]:
    """The line of a samples file in the index: `file`, `step`, `purpose` and `rows`, one for each readable line.

    A row has: offset and length in bytes, prompt_id, epoch, index, reward (None: none valid), tokens, truncated, valid,
    signal, advantage, workers, [oldest, newest version], version of the first token (-1: unknown), detailed.
    """
    heads, offset = list[tuple[int, int, SampleHead]](), 0
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            heads.append((offset, len(line), msgspec.json.decode(line, type=SampleHead)))
        offset += len(line)
    rewards: dict[tuple[str, int], list[float]] = {}
    for _, _, head in heads:
        if head.valid and head.reward is not None:
            rewards.setdefault((head.prompt_id, head.epoch), []).append(head.reward)
    rows = list[list[Any]]()
    for start, length, head in heads:
        of_group = rewards.get((head.prompt_id, head.epoch), [])
        varies = head.purpose not in ("", TRAINING_PURPOSE) or len(of_group) < 2 or len(set(of_group)) > 1
        numbers = [number for number, *_ in head.versions] or [-1]
        row = [start, length, head.prompt_id, head.epoch, head.index, head.reward if head.valid else None, head.length]
        row += [head.finish == "length", head.valid, varies if head.signal is None else head.signal, head.advantage]
        row += [list(dict.fromkeys(worker for worker, *_ in head.sources)), [min(numbers), max(numbers)], numbers[0]]
        rows.append([*row, bool(head.entropies)])
    first = heads[0][2] if heads else SampleHead()
    return {"file": file, "step": first.step, "purpose": first.purpose, "rows": rows}


class SampleSegment(Record):
    """Tokens, completion positions [start, end): their worker ("vllm/spot-3"), its lease and the policy version."""

    start: int
    end: int
    worker: str = ""
    lease: str = ""
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


class SampleHead(Record):
    """The figures of a sample; missing fields have their defaults."""

    step: int = 0
    purpose: str = ""  # "train", "eval:held_out", ...
    prompt_id: str = ""
    epoch: int = 0
    index: int = 0  # in its group
    token_ids: tuple[int, ...] = ()  # of the completion
    logprobs: tuple[float | None, ...] = ()
    reward: float | None = None
    valid: bool = False
    finish: str = ""
    versions: tuple[tuple[int, str, int, int], ...] = ()  # (version, digest, start, end) of its tokens
    sources: tuple[tuple[str, str, int, int, int], ...] = ()  # (worker, lease, version, start, end) of its tokens
    advantage: float | None = None  # as trained; mean of `token_advantages`; None if it was not trained on
    signal: bool | None = None  # whether the rewards of its group differ; None if it was not trained on
    entropies: tuple[float | None, ...] = ()  # of `telemetry.token_details` samples per step, in nats

    @property
    def length(self) -> int:
        """Generated tokens, which have logprobs; without logprobs, all tokens of the completion."""
        return sum(logprob is not None for logprob in self.logprobs) or len(self.token_ids)

    @property
    def segments(self) -> list[SampleSegment]:
        """`sources` as records."""
        return [
            SampleSegment(start=start, end=end, worker=worker, lease=lease, version=version)
            for worker, lease, version, start, end in self.sources
        ]


class Sample(SampleHead):
    """One line of a samples file; missing fields have their defaults."""

    prompt: str = ""
    completion: str = ""
    answer: str | None = None  # None: the row has none
    messages: tuple[Message, ...] = ()  # of the prompt, before the chat template; empty without one
    tokens: tuple[str, ...] = ()
    components: dict[str, float] = {}
    correct: bool | None = None  # None if the reward does not tell
    reason: str = ""
    weight: float = 1.0  # in the loss
    token_advantages: tuple[float | None, ...] = ()  # if they differ between tokens
    trainer_logprobs: tuple[float | None, ...] = ()  # of the samples with `entropies`
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


def read_samples(path: Path) -> list[Sample]:
    """Every complete line of a samples file that is a sample; damaged lines are skipped."""
    found = []
    for _, line in read_lines(path):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.convert(line, Sample))
    return found
