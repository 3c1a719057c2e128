"""Verdicts of people on samples: the lines of RUN/checks/*.jsonl, which `tidemill check` or another tool appends.

{"run_id", "step", "prompt_id", "epoch", "index", "completion": DIGEST, "reward": 0.9, "verdict": 0.0, "who", "unix_s"}

A run reads new lines after each step. A verdict is evidence from the step in whose evidence the journal has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from tidemill.core.evidence import GoldPair
from tidemill.core.records import Record
from tidemill.extensions.results import LARGEST
from tidemill.telemetry.jsonl import SharedLines, disk_error
from tidemill.telemetry.run_dir import samples_name
from tidemill.telemetry.sample_files import Sample, read_samples

SampleKey: TypeAlias = tuple[int, str, int, int, str]


class Verdict(Record, gc=False):
    """One line."""

    run_id: str
    step: int
    prompt_id: str
    epoch: int
    index: int  # in its group
    completion: str  # a digest: after a rollback the same place may have another text
    reward: Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]  # that was trained on
    verdict: Annotated[float, msgspec.Meta(ge=0, le=1)]  # 1: good
    who: str = ""
    unix_s: float = 0.0

    @property
    def sample(self) -> SampleKey:
        return (self.step, self.prompt_id, self.epoch, self.index, self.completion)


def text_digest(completion: str) -> str:
    return blake2b(completion.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def sample_key(sample: Sample) -> SampleKey:
    """As `Verdict.sample`."""
    return (sample.step, sample.prompt_id, sample.epoch, sample.index, text_digest(sample.completion))


def append_verdict(folder: Path, verdict: Verdict) -> None:
    """Add a line to the file of its author; the run may be running, and others may write.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', verdict.who).strip('.-') or 'unknown'}.jsonl"
    try:
        SharedLines(path).append(verdict)
    except OSError as error:
        raise disk_error(error, path) from error


def identity(sample: Sample, run_id: str, reward: float) -> dict[str, Any]:
    """The fields of a verdict that do not depend on the person."""
    step, prompt_id, epoch, index, completion = sample_key(sample)
    place = {"step": step, "prompt_id": prompt_id, "epoch": epoch, "index": index}
    return {"run_id": run_id, **place, "completion": completion, "reward": reward}


class VerdictFiles:
    """Reads the verdicts on the samples of one run.

    Args:
        folder: RUN/checks.
        run_id: of manifest.json; lines with another one are left out.
        journalled: pairs that are evidence already; they are not returned again.
        warn: gets one message for each file with lines that are left out.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        journalled: Iterable[GoldPair] = (),
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._run_id, self._warn = folder, run_id, warn
        self._taken = {pair for pair in journalled if pair.source == "person"}
        self._files: dict[Path, SharedLines] = {}
        self._warned: set[Path] = set()
        self._waiting: list[Verdict] = []  # for the samples of a step that is repeated after a resume

    def new_verdicts(self) -> list[Verdict]:
        """The complete lines since the last call, in the order of the files' names."""
        return [verdict for path in sorted(self._folder.glob("*.jsonl")) for verdict in self._read(path)]

    def new_pairs(self) -> list[GoldPair]:
        """The verdicts since the last call on samples that are still part of the run."""
        pairs = list[GoldPair]()
        verdicts = self._waiting + self.new_verdicts()
        self._waiting = []
        written = {step: self._samples(step) for step in {verdict.step for verdict in verdicts}}
        for verdict in verdicts:
            samples = written[verdict.step]
            if samples is None:
                self._waiting.append(verdict)
                continue
            pair = GoldPair(
                prompt_id=verdict.prompt_id,
                index=verdict.index,
                step=verdict.step,
                proxy=verdict.reward,
                gold=verdict.verdict,
                source="person",
            )
            if verdict.sample in samples and pair not in self._taken:
                self._taken.add(pair)
                pairs.append(pair)
        return pairs

    def _samples(self, step: int) -> set[SampleKey] | None:
        """The samples of a step; None if it has no file."""
        path = self._folder.parent / "samples" / samples_name(step)
        return {sample_key(sample) for sample in read_samples(path)} if path.is_file() else None

    def _read(self, path: Path) -> Iterator[Verdict]:
        lines = self._files.setdefault(path, SharedLines(path))
        try:
            found = lines.new_lines()
        except OSError as error:
            self._leave_out(path, error.strerror or str(error))
            return
        for line in found:
            try:
                verdict = _verdict(line)
            except msgspec.ValidationError as error:
                self._leave_out(path, f"a line is no verdict ({error})")
                continue
            if verdict.run_id != self._run_id:
                self._leave_out(path, f"a verdict is on a sample of another run ({verdict.run_id})")
                continue
            yield verdict

    def _leave_out(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            self._warn(f"warning: {self._folder.name}/{path.name}: {why}; such lines are left out")


def _verdict(line: dict[str, Any] | None) -> Verdict:
    if line is None:
        raise msgspec.ValidationError("not a JSON object")
    return msgspec.convert(line, Verdict)
