"""Verdicts of people on samples: the lines of RUN/checks/*.jsonl, which `tidemill check` appends.

{"run_id", "step", "prompt_id", "index", "completion": DIGEST, "reward": 0.9, "verdict": 0.0}

A run reads new lines after each step. A verdict is evidence from the step in whose evidence the journal has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from tidemill.core.evidence import GoldPair
from tidemill.core.records import Record
from tidemill.extensions.results import LARGEST
from tidemill.telemetry.jsonl import SharedLines, disk_error
from tidemill.telemetry.run_dir import samples_name
from tidemill.telemetry.sample_files import Sample, read_samples

SampleKey: TypeAlias = tuple[int, str, int, str]


class Verdict(Record, gc=False):
    """One line."""

    run_id: str
    step: int
    prompt_id: str
    index: int  # in its group
    completion: str  # a digest: after a rollback the same place may have another text
    reward: Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]  # that was trained on
    verdict: Annotated[float, msgspec.Meta(ge=0, le=1)]  # 1: good

    @property
    def sample(self) -> SampleKey:
        return (self.step, self.prompt_id, self.index, self.completion)


def text_digest(completion: str) -> str:
    return blake2b(completion.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def sample_key(sample: Sample) -> SampleKey:
    """As `Verdict.sample`."""
    return (sample.step, sample.prompt_id, sample.index, text_digest(sample.completion))


def append_verdict(folder: Path, run_id: str, sample: Sample, verdict: float) -> None:
    """Store a verdict; the run may be running, and others may write.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / "verdicts.jsonl"
    line = Verdict(
        run_id=run_id,
        step=sample.step,
        prompt_id=sample.prompt_id,
        index=sample.index,
        completion=text_digest(sample.completion),
        reward=sample.reward or 0.0,
        verdict=verdict,
    )
    try:
        SharedLines(path).append(line)
    except OSError as error:
        raise disk_error(error, path) from error


class VerdictFiles:
    """Reads the verdicts on the samples of one run.

    Args:
        folder: RUN/checks.
        run_id: of manifest.json; lines with another one are left out.
        journalled: pairs that are evidence already; they are not returned again.
        warn: gets one message for each file with lines that are left out.
    """

    def __init__(
        self, folder: Path, run_id: str, *, journalled: Iterable[GoldPair] = (), warn: Callable[[str], None]
    ) -> None:
        self._folder, self._run_id, self._warn = folder, run_id, warn
        self._taken = {pair for pair in journalled if pair.source == "person"}
        self._files: dict[Path, SharedLines] = {}
        self._warned: set[Path] = set()
        self._waiting: list[Verdict] = []  # for the samples of a step that is repeated after a resume

    def new_verdicts(self) -> list[Verdict]:
        """The complete lines since the last call, in the order of the files' names."""
        verdicts = list[Verdict]()
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                lines = self._files.setdefault(path, SharedLines(path)).new_lines()
            except OSError as error:
                self._leave_out(path, str(error))
                continue
            for line in lines:
                try:
                    verdict = msgspec.convert(line, Verdict)
                except msgspec.ValidationError as error:
                    self._leave_out(path, f"a line is no verdict ({error})")
                    continue
                if verdict.run_id == self._run_id:
                    verdicts.append(verdict)
                else:
                    self._leave_out(path, f"a verdict is on a sample of another run ({verdict.run_id})")
        return verdicts

    def new_pairs(self) -> list[GoldPair]:
        """The verdicts since the last call on samples that are still part of the run."""
        pairs = list[GoldPair]()
        verdicts = self._waiting + self.new_verdicts()
        written = {step: self._samples(step) for step in {verdict.step for verdict in verdicts}}
        self._waiting = [verdict for verdict in verdicts if written[verdict.step] is None]
        for verdict in verdicts:
            pair = GoldPair(
                prompt_id=verdict.prompt_id,
                index=verdict.index,
                step=verdict.step,
                proxy=verdict.reward,
                gold=verdict.verdict,
                source="person",
            )
            if verdict.sample in (written[verdict.step] or ()) and pair not in self._taken:
                self._taken.add(pair)
                pairs.append(pair)
        return pairs

    def _samples(self, step: int) -> set[SampleKey] | None:
        """The samples of a step; None if it has no file."""
        path = self._folder.parent / "samples" / samples_name(step)
        return {sample_key(sample) for sample in read_samples(path)} if path.is_file() else None

    def _leave_out(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            self._warn(f"warning: {self._folder.name}/{path.name}: {why}; such lines are left out")
