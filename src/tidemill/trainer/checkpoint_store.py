"""A folder of checkpoints of which every visible one is whole, whatever killed the process that wrote it.

A checkpoint is written in a hidden folder, flushed to the disk, given a manifest of its files and renamed to `step_N`
in one go. Older ones are deleted only after that. What a killed process leaves is hidden and cleaned by `recover`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.models.checkpoint_manifest import damage, make_durable, read_manifest, seal, unpinned

_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.(writing|replaced|deleting)-(step_\d+)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoredCheckpoint(Record):
    """A visible checkpoint with a readable manifest."""

    step: int
    path: Path
    score: float | None  # higher is better; None when not measured at this step
    bytes: int


class Damaged(Record):
    """A visible checkpoint that cannot be used, and why."""

    path: Path
    reason: str


class Latest(Record):
    """The newest whole checkpoint, if any, and the newer ones passed over: each deserves a warning."""

    checkpoint: StoredCheckpoint | None
    passed_over: tuple[Damaged, ...]


class CheckpointStore:
    """Checkpoints under `root`, at most one writer at a time; which is best is read from their own manifests.

    Args:
        root: made when the first checkpoint is written.
        keep_last: how many of the newest stay, at least 1.
        keep_best: also keep the one with the highest score; of equal ones the earliest.
    """

    def __init__(self, root: Path, *, keep_last: int, keep_best: bool = True) -> None:
        self._root = root
        self._keep_last = max(keep_last, 1)
        self._keep_best = keep_best

    def recover(self) -> list[str]:
        """Clean up what a killed writer left; call once before reading or writing. Returns a line per finding.

        Not for readers beside a live writer: it would remove what is being written.
        """
        findings = []
        for path, match in sorted(self._matching(_HIDDEN)):
            state, name = match.groups()
            if state == "replaced" and not (self._root / name).exists():
                path.rename(self._root / name)  # killed between the two renames of a replacement
                findings.append(f"{name}: put back after an interrupted replacement")
                continue
            shutil.rmtree(path, ignore_errors=True)
            if state == "writing":
                findings.append(f"{name}: an unfinished checkpoint was removed")
        return findings

    def write(
        self, step: int, writer: Callable[[Path], None], *, score: float | None = None, expected_bytes: int = 0
    ) -> StoredCheckpoint:
        """Write one checkpoint durably, then delete those no longer to be kept.

        Args:
            step: names it; an existing one of the same step is replaced.
            writer: fills the empty folder it is given.
            score: higher is better; None or NaN when not measured.
            expected_bytes: what the writer will need; 0 takes the size of the newest checkpoint.

        Raises:
            UserError: the disk is full or the folder cannot be written. Earlier checkpoints are as they were.
        """
        writing = self._hidden("writing", step)
        needed = expected_bytes or max((c.bytes for c in self.checkpoints()[-1:]), default=0)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self.recover()
            if _free_bytes(self._root) < needed:
                raise OSError(errno.ENOSPC, "checked before writing")
            writing.mkdir()
            writer(writing)
            manifest = seal(writing, step=step, score=score)
            self._publish(step, writing)
        except OSError as error:
            self._give_up(writing)
            raise self._unwritable(step, needed, error) from error
        except BaseException:
            self._give_up(writing)
            raise
        self._retire(step)
        path = self._root / f"step_{step}"
        return StoredCheckpoint(step=step, path=path, score=manifest.score, bytes=manifest.bytes)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Visible checkpoints with a readable manifest, oldest first; their files are not checked."""
        found = []
        for step, path in self._visible():
            try:
                manifest = read_manifest(path)
            except (OSError, msgspec.DecodeError):
                continue
            found.append(StoredCheckpoint(step=step, path=path, score=manifest.score, bytes=manifest.bytes))
        return found

    def latest(self) -> Latest:
        """The newest checkpoint all of whose files have the size and checksum they were written with.

        Raises:
            UserError: there are checkpoints, but none of them is whole: starting over silently would be worse.
        """
        passed_over: list[Damaged] = []
        for step, path in reversed(self._visible()):
            if reason := damage(path):
                passed_over.append(Damaged(path=path, reason=reason))
                continue
            whole = next(c for c in self.checkpoints() if c.step == step)
            return Latest(checkpoint=whole, passed_over=tuple(passed_over))
        if passed_over:
            reasons = "; ".join(f"{damaged.path.name}: {damaged.reason}" for damaged in passed_over)
            raise UserError(
                f"no checkpoint is whole ({reasons})",
                where=str(self._root),
                hint="put back a copy, or delete this folder to start the run from its beginning",
            )
        return Latest(checkpoint=None, passed_over=())

    def best(self) -> StoredCheckpoint | None:
        """The one with the highest score, the earliest of equals; None when none has a score."""
        return _best(self.checkpoints())

    def _publish(self, step: int, writing: Path) -> None:
        """Make a sealed folder visible in one go, in place of an older one of the same step."""
        final, replaced = self._root / f"step_{step}", self._hidden("replaced", step)
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        make_durable(self._root)
        shutil.rmtree(replaced, ignore_errors=True)

    def _retire(self, newest: int) -> None:
        """Delete what is not to be kept. Steps beyond `newest` belong to a history that was given up.

        One that is being read stays until the next checkpoint is written, unless its history was given up.
        """
        past = [c for c in self.checkpoints() if c.step <= newest]
        kept = {c.step for c in past[-self._keep_last :]}
        if self._keep_best and (best := _best(past)) is not None:
            kept.add(best.step)
        for step, path in self._visible():
            if step in kept:
                continue
            with unpinned(path) as free:
                if free or step > newest:
                    doomed = self._hidden("deleting", step)
                    path.rename(doomed)  # out of sight first: a half-deleted checkpoint must not be visible
                    shutil.rmtree(doomed, ignore_errors=True)

    def _give_up(self, writing: Path) -> None:
        shutil.rmtree(writing, ignore_errors=True)
        with contextlib.suppress(OSError):  # the error being reported matters more
            self.recover()

    def _unwritable(self, step: int, needed: int, error: OSError) -> UserError:
        survivors = self.checkpoints()
        survivor = f"{survivors[-1].path.name} is unharmed" if survivors else "there is no earlier checkpoint"
        if error.errno not in _DISK_FULL:
            return UserError(
                f"cannot write checkpoint step_{step}: {error}",
                where=str(self._root),
                hint=f"{survivor}; make the folder writable and run the same command again",
            )
        need = f"about {needed:,} bytes are needed, " if needed else ""
        return UserError(
            f"the disk is full: checkpoint step_{step} was not written ({need}{_free_bytes(self._root):,} are free)",
            where=str(self._root),
            hint=f"{survivor}; free some space and run the same command again",
        )

    def _hidden(self, state: str, step: int) -> Path:
        return self._root / f".{state}-step_{step}"

    def _visible(self) -> list[tuple[int, Path]]:
        return sorted((int(match[1]), path) for path, match in self._matching(_VISIBLE))

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
        for path in list(self._root.iterdir()) if self._root.is_dir() else ():
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                yield path, match


def _free_bytes(folder: Path) -> int:
    """Free space where the folder is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _best(checkpoints: list[StoredCheckpoint]) -> StoredCheckpoint | None:
    scored = [c for c in checkpoints if c.score is not None]
    return max(scored, key=lambda c: (c.score, -c.step), default=None)
