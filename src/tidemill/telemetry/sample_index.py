"""The samples of a run, found without reading their texts: figures and byte offsets of every sample in memory.

The index file has a line per samples file (`sample_files.index_line`). A samples file without a line, or of another
size, is read: older runs have no index, and a kill can come between the file and its line.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlencode

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.telemetry.binning import Bins, bin_edges
from tidemill.telemetry.followed_file import FollowedFile, Signature, signature
from tidemill.telemetry.run_dir import TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.sample_files import Sample, index_line

COLUMNS = np.dtype(
    [(name, "i8") for name in ("offset", "length")]
    + [(name, "i4") for name in ("prompt", "epoch", "index")]
    + [("reward", "f8"), ("tokens", "i4"), ("truncated", "?"), ("valid", "?"), ("signal", "?"), ("advantage", "f4")]
    + [(name, "i4") for name in ("workers", "oldest", "newest", "start")]
    + [("detailed", "?"), ("step", "i4"), ("file", "i4")]
)
"""A sample in memory; `file`, `prompt` and `workers` are positions in tables of the index."""
SORTS = ("step", "reward", "advantage", "tokens", "newest")
PAGE_ROWS = 50
SEARCH_S = 1.5
"""Time of one request in which texts are searched."""
UNKNOWN, NO, YES = -1, 0, 1

Rows: TypeAlias = npt.NDArray[Any]  # of COLUMNS
Mask: TypeAlias = npt.NDArray[np.bool_]


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
                given = {name: parameters[name].strip()} if parameters.get(name, "").strip() else {}
                value = getattr(msgspec.convert(given, cls, strict=False), name)
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
    oldest: int  # version; -1: unknown
    newest: int
    detailed: bool


class SamplePage(Record):
    """The rows of one page that match a query."""

    rows: tuple[SampleRow, ...]
    matches: int
    page: int
    pages: int
    unsearched: int  # samples whose text was not searched in time; the same query again searches on
    searched_to: int  # the oldest step that was searched to its end


class _Texts(Record):
    prompt: str = ""
    completion: str = ""
    reason: str = ""


@dataclass(slots=True)
class _File:
    """The rows of one samples file."""

    step: int
    purpose: str
    rows: Rows
    nbytes: int  # of the samples file from which the rows were taken


class SampleIndex:
    """Finds the samples of a run that may be in progress; it reads only what is new."""

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._index = FollowedFile(run.samples_index)
        self._seen: tuple[Signature | None, ...] = ()  # of the folder and the index
        self._files: dict[str, _File] = {}
        self._names: list[str] = []  # of the files, by step
        self._prompts: dict[str, int] = {}
        self._workers: dict[tuple[str, ...], int] = {}
        self._text = ""  # searched last
        self._found: dict[str, npt.NDArray[np.int8]] = {}  # UNKNOWN, NO or YES, by file
        self._rows: Rows = np.empty(0, COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    def refresh(self) -> bool:
        """Read what changed; returns whether anything did."""
        seen = (signature(self.run.samples), signature(self._index.path))
        if seen == self._seen:
            return False
        self._seen = seen
        for lines, _ in self._index.new_lines():
            for line in filter(None, lines):
                self._add(line)
        present = {path.name: (step, purpose, path) for step, purpose, path in self.run.sample_files()}
        self._files = {name: file for name, file in self._files.items() if name in present}
        for name, (step, purpose, path) in present.items():
            with suppress(FileNotFoundError):  # deleted since
                nbytes = path.stat().st_size
                if name not in self._files or self._files[name].nbytes != nbytes:
                    lines_of_file = path.read_bytes().splitlines(keepends=True)
                    line = index_line(name, [each for each in lines_of_file if each.endswith(b"\n")])
                    self._add(line | {"step": step, "purpose": line["purpose"] or purpose}, nbytes)
        self._names = sorted(self._files, key=lambda name: (self._files[name].step, name))
        for number, name in enumerate(self._names):
            self._files[name].rows["file"] = number
        self._rows = np.concatenate([np.empty(0, COLUMNS), *(self._files[name].rows for name in self._names)])
        return True

    def _add(self, line: dict[str, Any], nbytes: int | None = None) -> None:
        """Take the rows of a line of the index, whose file has `nbytes`, by default those of the rows; the rows of a
        damaged line are taken from the samples file."""
        self._files.pop(str(line.get("file")), None)
        self._found.pop(str(line.get("file")), None)
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            rows = np.zeros(len(line["rows"]), COLUMNS)
            for at, row in enumerate(line["rows"]):
                *head, advantage, workers, versions, start, detailed = row
                head[2] = self._prompts.setdefault(str(head[2]), len(self._prompts))
                worker = self._workers.setdefault(tuple(map(str, workers)), len(self._workers))
                rows[at] = (*head, advantage, worker, *versions, start, detailed, line["step"], 0)
            if nbytes is None:
                nbytes = int(rows["offset"][-1] + rows["length"][-1]) if len(rows) else 0
            file = _File(step=line["step"], purpose=str(line["purpose"]), rows=rows, nbytes=nbytes)
            self._files[line["file"]] = file

    @property
    def purposes(self) -> list[str]:
        return sorted({file.purpose for file in self._files.values()})

    @property
    def workers(self) -> list[str]:
        return sorted({name for workers in self._workers for name in workers})

    def _mask(self, query: SampleQuery, *, rewards: bool = True) -> Mask:
        """bool [S]: which samples the filters keep, without the text."""
        rows, keep = self._rows, np.ones(len(self._rows), bool)
        ranges = [("step", query.step_min, query.step_max), ("tokens", query.tokens_min, query.tokens_max)]
        ranges += [("newest", query.version, None), ("oldest", None, query.version)]
        for column, low, high in [*ranges, *([("reward", query.reward_min, query.reward_max)] if rewards else [])]:
            if low is not None:
                keep &= rows[column] >= low
            if high is not None:
                keep &= rows[column] <= high
        if query.purpose != "all":
            numbers = [at for at, name in enumerate(self._names) if self._files[name].purpose == query.purpose]
            keep &= np.isin(rows["file"], numbers)
        if query.worker:
            wanted = {name for name in self.workers if query.worker in (name, name.rpartition("/")[2])}
            keep &= np.isin(rows["workers"], [at for names, at in self._workers.items() if wanted & set(names)])
        keep &= rows["truncated"] | (not query.truncated)
        keep &= ~rows["valid"] | (not query.invalid)
        keep &= ~rows["signal"] | (not query.no_signal)
        return keep & (rows["detailed"] | (not query.detailed))

    def query(self, query: SampleQuery, *, limit_s: float = SEARCH_S) -> SamplePage:
        """A page of the samples that match; texts are searched from the newest file on, for `limit_s` seconds."""
        keep, unsearched, searched_to = self._mask(query), 0, 0
        if query.text:
            unsearched, searched_to = self._search(query.text.casefold(), keep, self._clock() + limit_s)
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
        if text != self._text:
            self._text, self._found = text, {}
        unsearched, end, searched_to = 0, len(keep), 0
        for name in reversed(self._names):
            file = self._files[name]
            part, end = keep[end - len(file.rows) : end], end - len(file.rows)
            found = self._found.setdefault(name, np.full(len(part), UNKNOWN, np.int8))
            waiting = np.flatnonzero(part & (found == UNKNOWN))[::-1]
            with suppress(FileNotFoundError), (self.run.samples / name).open("rb") as samples:
                for at in waiting if self._clock() < deadline_s else ():
                    line = os.pread(samples.fileno(), int(file.rows["length"][at]), int(file.rows["offset"][at]))
                    found[at] = YES if _contains(line, text) else NO
                    if self._clock() >= deadline_s:
                        break
            unsearched += int((part & (found == UNKNOWN)).sum())
            searched_to = searched_to if unsearched else file.step
            part &= found == YES
        return unsearched, searched_to

    def _rows_at(self, places: npt.NDArray[np.int64]) -> tuple[SampleRow, ...]:
        prompts, workers, rows = list(self._prompts), list(self._workers), list[SampleRow]()
        for row in self._rows[places]:
            values: dict[str, Any] = {name: row[name].item() for name in COLUMNS.names or ()}
            values |= {name: None for name in ("reward", "advantage") if math.isnan(values[name])}
            values |= {"prompt_id": prompts[row["prompt"]], "workers": workers[row["workers"]]}
            name = self._names[row["file"]]
            rows.append(msgspec.convert(values | {"file": name, "purpose": self._files[name].purpose}, SampleRow))
        return tuple(rows)

    def histogram(self, query: SampleQuery) -> Bins:
        """Rewards of the samples that match the other filters (not the text), in `first`; of those that match the
        rewards' range, too, in `last`. Shares of the former."""
        rewards, chosen = (self._rows["reward"][self._mask(query, rewards=filtered)] for filtered in (False, True))
        rewards, chosen = rewards[np.isfinite(rewards)], chosen[np.isfinite(chosen)]
        edges, values = bin_edges(np.unique(rewards).tolist())
        clipped = (np.clip(part, edges[0], edges[-1]) for part in (rewards, chosen))
        first, last = ((np.histogram(part, edges)[0] / max(len(rewards), 1)).tolist() for part in clipped)
        return Bins(edges=tuple(edges), first=tuple(first), last=tuple(last), values=values)

    def read(self, row: SampleRow) -> Sample:
        """The whole sample.

        Raises:
            UserError: it was deleted or replaced, as by a rewind.
        """
        path, sample = self.run.samples / row.file, Sample()
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError), path.open("rb") as file:
            sample = msgspec.json.decode(os.pread(file.fileno(), row.length, row.offset), type=Sample)
        if (sample.prompt_id, sample.epoch, sample.index) != (row.prompt_id, row.epoch, row.index):
            raise UserError("that sample is not in the run any more", where=str(path), hint="reload the page")
        return sample

    def rows_of(self, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE) -> list[SampleRow]:
        """The samples of a group, by index."""
        keep = self._mask(SampleQuery(step_min=step, step_max=step, purpose=purpose))
        keep &= (self._rows["prompt"] == self._prompts.get(prompt_id, -1)) & (self._rows["epoch"] == epoch)
        return sorted(self._rows_at(np.flatnonzero(keep)), key=lambda row: row.index)

    def group(self, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE) -> list[Sample]:
        """The samples of a group, by index. Raises UserError as `read`."""
        return [self.read(row) for row in self.rows_of(step, prompt_id, epoch, purpose)]


def _contains(line: bytes, text: str) -> bool:
    if line.isascii() and msgspec.json.encode(text)[1:-1] not in line.lower():  # faster than decoding
        return False
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        texts = msgspec.json.decode(line, type=_Texts)
        return any(text in part.casefold() for part in (texts.prompt, texts.completion, texts.reason))
    return False
