"""The samples of a run, found without reading their texts: figures and byte offsets of every sample in memory.

The index file has a line per samples file (`sample_files.index_line`). A samples file without a line, or that differs
from its line, is read: older runs have no index, and a kill can come between the file and its line.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlencode

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.telemetry.binning import Bins, bin_edges
from tidemill.telemetry.run_dir import SAMPLES_INDEX, TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.sample_files import Sample, index_line

COLUMNS = np.dtype(
    [
        *((name, "i8") for name in ("offset", "length")),
        *((name, "i4") for name in ("step", "file", "prompt", "epoch", "index", "tokens")),
        *((name, "i4") for name in ("workers", "oldest", "newest", "start")),
        ("reward", "f8"),
        ("advantage", "f4"),
        *((name, "?") for name in ("truncated", "valid", "signal", "detailed")),
    ]
)
"""A sample in memory; `file`, `prompt` and `workers` are numbers in tables of the index."""
SORTS = ("step", "reward", "advantage", "tokens", "index", "newest")
PAGE_ROWS = 50
SEARCH_S = 1.5
"""Time of one request in which texts are searched."""
UNKNOWN, NO, YES = -1, 0, 1

Rows: TypeAlias = npt.NDArray[Any]  # of COLUMNS
Mask: TypeAlias = npt.NDArray[np.bool_]
_Row: TypeAlias = tuple[
    int, int, str, int, int, float | None, int, bool, bool, bool, float | None, list[str], tuple[int, int], int, bool
]


class _IndexLine(Record):
    file: str
    step: int = 0
    purpose: str = ""
    rows: list[_Row] | None = None


class _Texts(Record):
    prompt: str = ""
    completion: str = ""
    reason: str = ""


class SampleQuery(Record, omit_defaults=True):
    """Filters, order and page of a table of samples; the fields are also the parameters of its URL."""

    step_min: int | None = None
    step_max: int | None = None
    purpose: str = TRAINING_PURPOSE  # "all": every purpose
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    truncated: bool = False
    invalid: bool = False
    no_signal: bool = False
    detailed: bool = False
    worker: str = ""  # "vllm/spot-3" or "spot-3"
    version: int | None = None
    text: str = ""  # in prompt, completion or reason, in any case
    sort: str = "step"
    ascending: bool = False
    page: int = 1

    @classmethod
    def of_url(cls, parameters: Mapping[str, str]) -> SampleQuery:
        """The query of a URL; a parameter that is empty, unknown or not of its type is left out."""
        values = dict[str, Any]()
        for name in cls.__struct_fields__:
            with suppress(msgspec.ValidationError):
                one = msgspec.convert({name: parameters.get(name, "").strip() or None}, cls, strict=False)
                value = getattr(one, name)
                if not isinstance(value, float) or math.isfinite(value):
                    values[name] = value
        return cls(**values)

    def url(self, **changes: Any) -> str:
        """The parameters of a URL, with changes."""
        changed: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, **changes))
        return urlencode({name: int(value) if value is True else value for name, value in changed.items()})


class SampleRow(Record):
    """A sample of the index, without its texts."""

    file: str
    offset: int
    length: int  # bytes
    step: int
    purpose: str
    prompt_id: str
    epoch: int
    index: int
    reward: float | None  # None: no valid one
    tokens: int
    truncated: bool
    valid: bool
    signal: bool  # False: all samples of its group had the same reward
    advantage: float | None  # None: not trained on
    workers: tuple[str, ...]
    versions: tuple[int, int] | None  # oldest and newest; None: unknown
    detailed: bool


class SamplePage(Record):
    """The rows of one page that match a query."""

    rows: tuple[SampleRow, ...]
    matches: int
    page: int
    pages: int
    unsearched: int = 0  # samples whose text was not searched in time; the same query again searches on
    searched_to: int = 0  # the oldest step that was searched


@dataclass(slots=True)
class _File:
    """The rows of one samples file."""

    step: int
    purpose: str
    rows: Rows
    size: int  # bytes
    identity: tuple[int, ...] | None = None  # `_stamp` when the rows were taken
    found: dict[str, npt.NDArray[np.int8]] = field(default_factory=dict)  # UNKNOWN, NO or YES, by searched text


class SampleIndex:
    """Finds the samples of a run that may be in progress; it reads only what is new."""

    def __init__(self, run: RunDirectory, *, now: Callable[[], float] = time.monotonic) -> None:
        self.run, self._now = run, now
        self._stamps: tuple[tuple[int, ...], ...] = ()  # of the folder and the index file
        self._followed = (0, 0)  # inode and offset in the index file
        self._files: dict[str, _File] = {}
        self._names: list[str] = []  # by step; positions are the column `file`
        self._prompts: dict[str, int] = {}
        self._workers: dict[tuple[str, ...], int] = {}
        self._searched: list[str] = []  # texts, newest last
        self._rows: Rows = np.empty(0, COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    def refresh(self) -> bool:
        """Read what changed; returns whether anything did."""
        stamps = tuple(_stamp(path) for path in (self.run.samples, self.run.samples / SAMPLES_INDEX))
        if stamps == self._stamps:
            return False
        self._stamps, before = stamps, {name: id(file) for name, file in self._files.items()}
        for line in self._new_lines():
            self._files.pop(line.file, None)
            if line.rows is not None:
                self._add(line)
        present = {path.name: (step, purpose, path) for step, purpose, path in self.run.sample_files()}
        for name in self._files.keys() - present.keys():
            del self._files[name]
        for name, (step, purpose, path) in present.items():
            with suppress(FileNotFoundError, IndexError):  # it was deleted meanwhile
                identity, file = _stamp(path), self._files.get(name)
                if file and file.identity is None and file.size == identity[-1]:
                    file.identity = identity
                elif file is None or file.identity != identity:
                    with path.open("rb") as lines:
                        read = index_line(name, (line for line in lines if line.endswith(b"\n")))
                    self._files.pop(name, None)
                    read |= {"step": step, "purpose": read["purpose"] or purpose}
                    self._add(msgspec.convert(read, _IndexLine), identity)
        if {name: id(file) for name, file in self._files.items()} == before:
            return False
        self._names = sorted(self._files, key=lambda name: (self._files[name].step, name))
        self._rows = np.concatenate([np.empty(0, COLUMNS), *(self._files[name].rows for name in self._names)])
        end = 0
        for number, name in enumerate(self._names):  # the table is kept once
            start, end = end, end + len(self._files[name].rows)
            self._files[name].rows = self._rows[start:end]
            self._files[name].rows["file"] = number
        return True

    def _new_lines(self) -> Iterator[_IndexLine]:
        inode, offset = self._followed
        try:
            file = (self.run.samples / SAMPLES_INDEX).open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < offset:  # a rewind replaces it
                offset = 0
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    yield msgspec.json.decode(line, type=_IndexLine)
            self._followed = (status.st_ino, offset)

    def _add(self, line: _IndexLine, identity: tuple[int, ...] | None = None) -> None:
        rows = np.zeros(len(line.rows or ()), COLUMNS)
        for at, row in enumerate(line.rows or ()):
            offset, length, prompt, epoch, index, reward, tokens, truncated, valid, signal, advantage, *rest = row
            workers, (oldest, newest), start, detailed = rest
            numbers = (
                self._prompts.setdefault(prompt, len(self._prompts)),
                epoch,
                index,
                tokens,
                self._workers.setdefault(tuple(workers), len(self._workers)),
                oldest,
                newest,
                start,
            )
            figures = (math.nan if reward is None else reward, math.nan if advantage is None else advantage)
            with suppress(OverflowError):
                rows[at] = (offset, length, line.step, 0, *numbers, *figures, truncated, valid, signal, detailed)
        size = int(rows["offset"][-1] + rows["length"][-1]) if len(rows) else 0
        self._files[line.file] = _File(step=line.step, purpose=line.purpose, rows=rows, size=size, identity=identity)

    @property
    def purposes(self) -> list[str]:
        return sorted(
            {file.purpose for file in self._files.values()}, key=lambda name: (name != TRAINING_PURPOSE, name)
        )

    @property
    def workers(self) -> list[str]:
        return sorted({name for workers in self._workers for name in workers})

    def _mask(self, query: SampleQuery, *, rewards: bool = True) -> Mask:
        """bool [S]: which samples the filters keep, without the text."""
        rows, keep = self._rows, np.ones(len(self._rows), bool)
        ranges = [("step", query.step_min, query.step_max), ("tokens", query.tokens_min, query.tokens_max)]
        ranges += [("newest", query.version, None), ("oldest", None, query.version)]
        ranges += [("reward", query.reward_min, query.reward_max)] if rewards else []
        for column, low, high in ranges:
            if low is not None:
                keep &= rows[column] >= low
            if high is not None:
                keep &= rows[column] <= high
        if query.purpose != "all":
            numbers = [at for at, name in enumerate(self._names) if self._files[name].purpose == query.purpose]
            keep &= np.isin(rows["file"], numbers)
        if query.worker:
            names = [[name, name.rpartition("/")[2]] for name in self.workers]
            wanted = {full for full, short in names if query.worker in (full, short)}
            keep &= np.isin(rows["workers"], [at for key, at in self._workers.items() if wanted & set(key)])
        for name, column, value in (
            (query.truncated, "truncated", True),
            (query.invalid, "valid", False),
            (query.no_signal, "signal", False),
            (query.detailed, "detailed", True),
        ):
            if name:
                keep &= rows[column] == value
        return keep

    def query(self, query: SampleQuery, *, limit_s: float = SEARCH_S) -> SamplePage:
        """A page of the samples that match; texts are searched from the newest file on, for `limit_s` seconds."""
        keep, unsearched, searched_to = self._mask(query), 0, 0
        if query.text:
            unsearched, searched_to = self._search(query.text.casefold(), keep, self._now() + limit_s)
        found = np.flatnonzero(keep)[::-1]
        if query.sort in SORTS:
            values = self._rows[query.sort][found].astype(np.float64)
            found = found[np.argsort(values if query.ascending else -values, kind="stable")]
        pages = max(1, math.ceil(len(found) / PAGE_ROWS))
        page = min(max(query.page, 1), pages)
        rows = self._rows_at(found[(page - 1) * PAGE_ROWS : page * PAGE_ROWS])
        return SamplePage(
            rows=rows, matches=len(found), page=page, pages=pages, unsearched=unsearched, searched_to=searched_to
        )

    def _search(self, text: str, keep: Mask, deadline_s: float) -> tuple[int, int]:
        """Keep the samples with the text. Returns how many were not searched in time, and the oldest step searched."""
        if text not in self._searched:
            self._searched.append(text)
            for forgotten in self._searched[:-4]:
                for file in self._files.values():
                    file.found.pop(forgotten, None)
            self._searched = self._searched[-4:]
        unsearched, end, oldest = 0, len(keep), 0
        for name in reversed(self._names):
            file = self._files[name]
            start, end_of_file, end = end - len(file.rows), end, end - len(file.rows)
            part = keep[start:end_of_file]
            if not part.any():
                continue
            found = file.found.setdefault(text, np.full(len(part), UNKNOWN, np.int8))
            waiting = np.flatnonzero(part & (found == UNKNOWN))
            if len(waiting) and self._now() < deadline_s:
                self._search_file(name, file, text, found, waiting[::-1], deadline_s)
            left = int((part & (found == UNKNOWN)).sum())
            unsearched += left
            oldest = file.step if not unsearched else oldest
            part &= found == YES
        return unsearched, oldest

    def _search_file(
        self,
        name: str,
        file: _File,
        text: str,
        found: npt.NDArray[np.int8],
        waiting: Sequence[int] | npt.NDArray[np.int64],
        deadline_s: float,
    ) -> None:
        with suppress(FileNotFoundError), (self.run.samples / name).open("rb") as samples:
            for at in waiting:
                line = os.pread(samples.fileno(), int(file.rows["length"][at]), int(file.rows["offset"][at]))
                found[at] = YES if _contains(line, text) else NO
                if self._now() > deadline_s:
                    return

    def _rows_at(self, places: npt.NDArray[np.int64]) -> tuple[SampleRow, ...]:
        prompts, workers = list(self._prompts), list(self._workers)
        rows = list[SampleRow]()
        for row in self._rows[places]:
            values: dict[str, Any] = {name: row[name].item() for name in COLUMNS.names or ()}
            name = self._names[values["file"]]
            values |= {name: None for name in ("reward", "advantage") if math.isnan(values[name])}
            values |= {
                "file": name,
                "purpose": self._files[name].purpose,
                "prompt_id": prompts[values["prompt"]],
                "workers": workers[values["workers"]],
                "versions": None if values["start"] < 0 else (values["oldest"], values["newest"]),
            }
            rows.append(msgspec.convert(values, SampleRow))
        return tuple(rows)

    def histogram(self, query: SampleQuery) -> Bins:
        """Rewards of the samples that match the other filters (not the text), in `first`; of those that match the
        rewards' range, too, in `last`. Shares of the former."""
        rewards = self._rows["reward"][self._mask(query, rewards=False)]
        rewards = rewards[np.isfinite(rewards)]
        edges, values = bin_edges(np.unique(rewards).tolist())
        low = -math.inf if query.reward_min is None else query.reward_min
        high = math.inf if query.reward_max is None else query.reward_max
        chosen = rewards[(rewards >= low) & (rewards <= high)]
        clipped = (np.clip(part, edges[0], edges[-1]) for part in (rewards, chosen))
        first, last = (np.histogram(part, edges)[0] / max(len(rewards), 1) for part in clipped)
        return Bins(edges=tuple(edges), first=tuple(first.tolist()), last=tuple(last.tolist()), values=values)

    def read(self, row: SampleRow) -> Sample:
        """The whole sample.

        Raises:
            UserError: it was deleted or replaced, as by a rewind.
        """
        try:
            with (self.run.samples / row.file).open("rb") as file:
                sample = msgspec.json.decode(os.pread(file.fileno(), row.length, row.offset), type=Sample)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _gone(self.run.samples / row.file) from error
        if (sample.prompt_id, sample.epoch, sample.index) != (row.prompt_id, row.epoch, row.index):
            raise _gone(self.run.samples / row.file)
        return sample

    def rows_of(self, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE) -> list[SampleRow]:
        """The samples of a group, by index."""
        keep = self._mask(SampleQuery(step_min=step, step_max=step, purpose=purpose))
        keep &= (self._rows["prompt"] == self._prompts.get(prompt_id, -1)) & (self._rows["epoch"] == epoch)
        return sorted(self._rows_at(np.flatnonzero(keep)), key=lambda row: row.index)

    def group(self, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE) -> list[Sample]:
        """The samples of a group, by index. Raises UserError as `read`."""
        return [self.read(row) for row in self.rows_of(step, prompt_id, epoch, purpose)]


def _stamp(path: Path) -> tuple[int, ...]:
    """Inode, time of change and size; empty for a missing file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _gone(path: Path) -> UserError:
    return UserError("that sample is not in the run any more", where=str(path), hint="reload the table of samples")


def _contains(line: bytes, text: str) -> bool:
    if text.isascii() and msgspec.json.encode(text)[1:-1] not in line.lower():
        return False
    try:
        texts = msgspec.json.decode(line, type=_Texts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return any(text in part.casefold() for part in (texts.prompt, texts.completion, texts.reason))
