"""The run directory: paths, format check, and the lock that allows one process at a time."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from filelock import FileLock, Timeout

from tidemill.core.errors import UserError
from tidemill.core.formatting import natural_sort_key
from tidemill.core.records import Record, decode_json
from tidemill.telemetry.events import PastSessions, past_sessions
from tidemill.telemetry.jsonl import (
    disk_error,
    drop_torn_line,
    read_lines,
    remove_partial_files,
    write_atomically,
    write_json,
)

LOCK = ".lock"
CURRICULUM = "curriculum.jsonl"
RUN_FORMAT = 3
"""Format of run directories, in manifest.json. Raised when the files of older runs can no longer be read."""

GENERATION = "generation"
"""Key of the manifest; see `RunDirectory.generation`."""

SUPERVISED = ("sft", "reward_model", "dpo")
"""Values of `kind` in manifest.json of runs that learn from examples instead of prompts."""
ROBOT_KINDS = ("control", "clone", "twin")
"""The same of runs of robots."""
PLAYBACK = "episodes.json"
"""Episodes that the page of a robot's run plays."""
TWIN_REPORT = "twin.json"
"""What a twin stage has found."""


class LockedDirectory:
    """A directory that one process locks, from `acquire` to `close`; a context manager that closes.

    Args:
        lock_file: its name; locks of different names are independent.
    """

    def __init__(self, path: Path, *, lock_file: str = LOCK) -> None:
        self.path, self._lock_file = path, path / lock_file
        self._lock: FileLock | None = None

    def acquire(self, held: Callable[[], str]) -> None:
        """Take the lock without waiting.

        Args:
            held: returns the error's text if another process holds the lock.

        Raises:
            UserError: another process holds the lock, or the lock file cannot be written.
        """
        lock = FileLock(self._lock_file, blocking=False, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            hint = "wait until it ends or stop it, or choose another --run.dir"
            raise UserError(held(), where=str(self.path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, self._lock_file) from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


PROMPTS = "prompts"
"""Key of the manifest, and of an exported model's description: the `PromptFormat`."""


class PromptFormat(Record):
    """How a run makes a prompt from a text: rows that are lists of messages always use the chat template."""

    chat: bool = False  # the text is a user message in the model's chat template
    system_prompt: str = ""  # put before it

    @classmethod
    def stored_in(cls, description: dict[str, Any]) -> PromptFormat:
        """The format in a manifest or description; the default if it has none."""
        try:
            return msgspec.convert(description[PROMPTS], cls)
        except (KeyError, msgspec.ValidationError):
            return cls()


TRAINING_PURPOSE = "train"
SAMPLES_INDEX = "samples_index.jsonl"
"""In the run directory: a line per samples file that was written; see `sample_files.index_line`."""
SAMPLES_NAME = re.compile(r"step_(\d+)(?:\.([\w.-]+))?\.jsonl$")


def samples_name(step: int, purpose: str = TRAINING_PURPOSE) -> str:
    """`step_000012.jsonl`, or `step_000012.PURPOSE.jsonl` for purposes other than training."""
    suffix = "" if purpose == TRAINING_PURPOSE else "." + re.sub(r"[^A-Za-z0-9_-]", "-", purpose)
    return f"step_{step:06d}{suffix}.jsonl"


class RunDirectory(LockedDirectory):
    """Paths of a run. `RunDirectory(path)` is for reading; `RunDirectory.open(path)` creates and locks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = path / "config.toml"
        self.manifest = path / "manifest.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.samples_index = path / SAMPLES_INDEX
        self.ledger = path / "ledger.sqlite"
        self.judges = path / "judges"
        self.checks = path / "checks"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.amendments = path / "amendments.jsonl"
        self.past = PastSessions()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory if needed, lock it, and remove incomplete lines and files left by a kill.

        Raises:
            UserError: it cannot be created or written, has another format, or another process holds it.
        """
        run = cls(path)
        run.refuse_other_format()
        run._create()
        run.acquire(run._holder)
        try:
            for log in (run.events, run.metrics):
                drop_torn_line(log)
            for folder in (path, run.samples):
                remove_partial_files(folder)
            run.past = past_sessions(run.events, run.metrics)
        except OSError as error:
            run.close()
            raise disk_error(error, path) from error
        return run

    def _create(self) -> None:
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            try:
                probe.write_bytes(b"\n")
            finally:
                probe.unlink(missing_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            hint = "choose another --run.dir or move the file away"
            raise UserError("a file is in the way of the run directory", where=str(self.path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, self.path) from error

    def _holder(self) -> str:
        holder = past_sessions(self.events, self.metrics).last
        who = f" (process {holder['pid']} on {holder.get('host', '?')})" if "pid" in holder else ""
        return f"another process is working on this run{who}"

    @property
    def exists(self) -> bool:
        """Whether a run was started here; then opening it resumes it."""
        return self.config.is_file()

    def refuse_other_format(self) -> None:
        """Raise UserError if the manifest has another format. A run killed before it wrote one has the current format.

        Runs of format 1 did not write their format.
        """
        manifest = self.read_manifest()
        if manifest and (found := manifest.get("format", 1)) != RUN_FORMAT:
            what = f"this run directory has format {found}, and this version reads format {RUN_FORMAT}"
            hint = "use the version of Tidemill that wrote it, or train again into another --run.dir"
            raise UserError(what, where=str(self.manifest), hint=hint)

    def read_config(self) -> str | None:
        """The stored configuration, or None for a new run.

        Raises:
            UserError: it is not UTF-8 text, or the run directory has another format.
        """
        self.refuse_other_format()
        try:
            return self.config.read_text(encoding="utf-8") if self.exists else None
        except UnicodeDecodeError as error:
            raise UserError("not UTF-8 text", where=str(self.config), hint="restore the file from a copy") from error

    def read_settings(self) -> dict[str, Any]:
        """The tables of the stored configuration, not validated; empty if it is missing or not TOML."""
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ValueError):
            return {}

    @property
    def prompt_format(self) -> PromptFormat:
        """How the run formats prompts. A run of an older version has stored its configuration only."""
        manifest = self.read_manifest()
        if PROMPTS in manifest:
            return PromptFormat.stored_in(manifest)
        settings = self.read_settings()
        chat, system = settings.get("model", {}).get("chat_template"), settings.get("task", {}).get("system_prompt")
        return PromptFormat(chat=bool(chat), system_prompt=str(system or ""))

    def write_config(self, text: str) -> None:
        write_atomically(self.config, text.encode())

    def read_manifest(self) -> dict[str, Any]:
        return read_json(self.manifest)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        write_json(self.manifest, manifest)

    @property
    def generation(self) -> int:
        """Rises before and after each deletion of metrics: what a reader knows of another generation may be gone."""
        found = self.read_manifest().get(GENERATION)
        return found if isinstance(found, int) else 0

    def _raise_generation(self) -> None:
        self.write_manifest({"format": RUN_FORMAT, **self.read_manifest(), GENERATION: self.generation + 1})

    def read_summary(self) -> dict[str, Any]:
        return read_json(self.summary)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.summary, summary)

    def sample_files(self) -> list[tuple[int, str, Path]]:
        """(step, purpose as in the file name, path) of every samples file, by step."""
        if not self.samples.is_dir():
            return []
        named = ((SAMPLES_NAME.match(path.name), path) for path in self.samples.iterdir())
        return sorted((int(match[1]), match[2] or TRAINING_PURPOSE, path) for match, path in named if match)

    def abandoned(self) -> list[RunDirectory]:
        """Metrics and samples of steps that rollbacks took back, in order."""
        folders = sorted(self.path.glob("abandoned/*"), key=lambda folder: natural_sort_key(folder.name))
        return [RunDirectory(folder) for folder in folders]

    def clear(self) -> None:
        """Delete metrics, samples, checkpoints and stored samples of a run that starts again. Events and inputs stay.

        Raises:
            UserError: the files cannot be deleted.
        """
        ledgers, choices = self.path.glob(f"{self.ledger.name}*"), self.path / CURRICULUM
        files = (self.metrics, self.amendments, self.samples_index, choices, *ledgers, *self.samples.glob("*.jsonl"))
        self._raise_generation()
        try:
            for file in files:
                file.unlink(missing_ok=True)
            for checkpoint in self.checkpoints.iterdir():
                shutil.rmtree(checkpoint)
        except OSError as error:
            raise disk_error(error, self.path) from error
        self._raise_generation()

    def rewind(self, step: int) -> None:
        """Delete metrics and samples of steps after `step`, which the resumed run writes again. Events stay.

        A run restarted from step 0 also writes the line of step 0 again.

        Can be repeated after a kill, and called while a writer has metrics.jsonl open for appending.

        Raises:
            UserError: the files cannot be changed.
        """
        self._raise_generation()
        try:
            for sample_step, _, path in self.sample_files():
                if sample_step > step:
                    path.unlink(missing_ok=True)
            drop_torn_line(self.metrics)
            for offset, line in read_lines(self.metrics):
                if int(line.get("step", 0)) > (step or -1):
                    os.truncate(self.metrics, offset)
                    break
        except OSError as error:
            raise disk_error(error, self.path) from error
        self._raise_generation()  # of a reader that read between the first time and the truncation


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or has no object."""
    try:
        return decode_json(path.read_bytes(), dict)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return {}
