"""What a model has answered so far, kept as it comes: a stage that was stopped goes on from there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tidemill.core.decoding import decode_json
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt, Record, Trajectory
from tidemill.telemetry.jsonl import JsonlWriter


class Answered(Record):
    """A line of the file: some prompts, whole."""

    key: str  # what was asked, and of whom
    duration_s: float
    samples: tuple[Trajectory, ...]


class Answers:
    """A file of answered prompts; without a path nothing is kept. A context manager that closes.

    Raises:
        UserError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self._writer = JsonlWriter(path) if path else None  # which cuts a torn last line
        self._known = {one.key: one for one in _lines(path)} if path else {}

    def find(self, key: str) -> Answered | None:
        return self._known.get(key)

    def add(self, answered: Answered) -> None:
        """
        Raises:
            UserError: the disk is full.
        """
        self._known[answered.key] = answered
        if self._writer:
            self._writer.write(answered)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()


def key_of(asked: Sequence[object], prompts: Iterable[Prompt]) -> str:
    """Names these prompts, in this order, asked in this way.

    Args:
        asked: everything else that decides the answers: the weights' digest, the seed, how samples are drawn.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode([asked, [prompt.prompt_id for prompt in prompts]]))
    return digest.hexdigest()


def _lines(path: Path) -> Iterable[Answered]:
    """Every line that can be read; one that cannot is answered again."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot be read: {error}", where=str(path), cure="delete it") from error
    for line in lines:
        try:
            yield decode_json(line, Answered)
        except msgspec.DecodeError:
            continue
