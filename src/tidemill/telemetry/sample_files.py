"""Samples as they are written to and read from the run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.core.records import Prompt, Record, Trajectory, unpack_logprobs, unpack_tokens
from tidemill.telemetry.jsonl import encode, finite_number, read_lines, write_atomically

Decode: TypeAlias = Callable[[Sequence[int]], str]
UNDECODABLE = "\ufffd"


class TokenTexts:
    """The text of single tokens, each decoded once in the life of a run."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def split(self, token_ids: Sequence[int], text: str) -> list[str]:
        """Cut `text` at token borders: one piece per token, together exactly `text`.

        Tokens that share one character (parts of its bytes) leave it to the first of them; the rest are empty. When
        `text` is not what the tokens say (a scorer may have trimmed it), the tokens' own texts are returned.
        """
        own = [self._text(token_id) for token_id in token_ids]
        return _align(own, text) or own

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._decode([token_id])
        return self._texts[token_id]


def _align(own: Sequence[str], text: str) -> list[str] | None:
    """Lay each token's own text over `text`; None when they do not fit."""
    pieces: list[str] = []
    position = 0
    open_piece: int | None = None  # the first of a run of tokens that made an incomplete character
    for piece in own:
        if UNDECODABLE in piece:
            open_piece = len(pieces) if open_piece is None else open_piece
            pieces.append("")
            continue
        # Some tokenizers show a leading space only inside a text.
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
    """One line of a samples file; docs/metrics.md says what the keys mean."""
    token_ids = unpack_tokens(trajectory.completion_ids)
    reward = trajectory.reward
    return {
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


def _aligned_logprobs(trajectory: Trajectory, tokens: int) -> list[float | None]:
    """One entry per completion token, None where the model did not make it. float32 carries seven digits at most."""
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
    """Indices of at most `limit` of `count` samples, spread evenly so that every group has its share; 0 is no limit."""
    if limit == 0 or limit >= count:
        return list(range(count))
    return [index * count // limit for index in range(limit)]


def write_samples(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """All lines at once: the file is whole or absent."""
    write_atomically(path, b"".join(encode(line) + b"\n" for line in lines))


class Sample(Record):
    """One line of a samples file, read back; whatever is missing or of the wrong kind has its default."""

    step: int
    prompt: str = ""
    completion: str = ""
    answer: str = ""
    prompt_id: str = ""
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    token_ids: tuple[int, ...] = ()  # of the completion
    reward: float | None = None
    components: dict[str, float] = {}
    valid: bool = False
    reason: str = ""
    finish: str = ""

    @property
    def length(self) -> int:
        """Completion tokens."""
        return len(self.token_ids)


def read_samples(path: Path) -> list[Sample]:
    """Every whole line of a samples file."""
    return [_sample(line) for _, line in read_lines(path)]


def _sample(line: dict[str, Any]) -> Sample:
    def text(key: str) -> str:
        value = line.get(key)
        return value if isinstance(value, str) else ""

    def items(key: str) -> list[Any]:
        value = line.get(key)
        return value if isinstance(value, list) else []

    components = line.get("components")
    return Sample(
        step=int(finite_number(line.get("step")) or 0),
        prompt=text("prompt"),
        completion=text("completion"),
        answer=text("answer"),
        prompt_id=text("prompt_id"),
        tokens=tuple(str(item) for item in items("tokens")),
        logprobs=tuple(map(finite_number, items("logprobs"))),
        token_ids=tuple(item for item in items("token_ids") if isinstance(item, int)),
        reward=finite_number(line.get("reward")),
        components={name: value for name, given in components.items() if (value := finite_number(given)) is not None}
        if isinstance(components, dict)
        else {},
        valid=line.get("valid") is True,
        reason=text("reason"),
        finish=text("finish"),
    )
