"""A folder of checkpoints that are written atomically.

A checkpoint is written into a hidden folder, flushed to disk, sealed with a manifest of its files and renamed to
`step_N`; older checkpoints are deleted afterwards. A killed process leaves hidden folders, which `recover` removes.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.models.checkpoint_manifest import damage, make_durable, read_manifest, seal, unpinned
from tidemill.models.ranks import Ranks

_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.(writing|replaced|deleting)-(step_\d+)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoredCheckpoint(Record):
    """A visible checkpoint with a readable manifest."""

    step: int
    path: Path
    score: float | None  # higher is better; None when not measured at this step
    bytes: int


class LatestCheckpoint(Record):
    """The newest intact checkpoint."""

    checkpoint: StoredCheckpoint | None
    skipped: dict[str, str]  # damage of newer ones, by name


@dataclass
class CheckpointStore:
    """Checkpoints under a folder, with at most one writer at a time."""

    root: Path  # created with the first checkpoint
    _: KW_ONLY
    keep_last: int  # newest checkpoints to keep, at least 1
    keep_best: bool = True  # also keep the checkpoint with the highest score, the earliest of equal ones

    def recover(self) -> list[str]:
        """Remove what a killed writer left, and return one line per finding.

        Call it before reading or writing, but never while another process writes.
        """
        findings = []
        for path, match in sorted(self._matching(_HIDDEN)):
            state, name = match.groups()
            if state == "replaced" and not (self.root / name).exists():
                path.rename(self.root / name)  # killed between the two renames of `_publish`
                findings.append(f"{name}: restored after an interrupted replacement")
                continue
            shutil.rmtree(path, ignore_errors=True)
            if state == "writing":
                findings.append(f"{name}: removed an unfinished checkpoint")
        return findings

    def write(
        self,
        step: int,
        writer: Callable[[Path], None],
        *,
        score: float | None = None,
        expected_bytes: int = 0,
        pinned: int | None = None,
    ) -> StoredCheckpoint:
        """Write one checkpoint durably, then delete checkpoints that need not be kept.

        Args:
            step: replaces an existing checkpoint of this step.
            writer: writes the files into an empty folder.
            score: higher is better; None or NaN if not measured.
            expected_bytes: required free space; 0 for the size of the newest checkpoint.
            pinned: also keep the newest checkpoint up to this step.

        Raises:
            UserError: the disk is full or the folder cannot be written; earlier checkpoints are unchanged.
        """
        writing = self._hidden("writing", step)
        needed = expected_bytes or max((c.bytes for c in self.checkpoints()[-1:]), default=0)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.recover()
            if _free_bytes(self.root) < needed:
                raise OSError(errno.ENOSPC, "checked before writing")
            writing.mkdir()
            writer(writing)
            manifest = seal(writing, step=step, score=score)
            self._publish(step, writing)
        except OSError as error:
            self._discard(writing)
            raise self.write_error(step, needed, error) from error
        except BaseException:
            self._discard(writing)
            raise
        self._delete_old(step, pinned)
        path = self.root / f"step_{step}"
        return StoredCheckpoint(step=step, path=path, score=manifest.score, bytes=manifest.bytes)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Visible checkpoints with a readable manifest, oldest first. Does not check their files."""
        stored = []
        for step, path in self._visible():
            try:
                manifest = read_manifest(path)
            except (OSError, msgspec.DecodeError):
                continue
            stored.append(StoredCheckpoint(step=step, path=path, score=manifest.score, bytes=manifest.bytes))
        return stored

    def latest(self) -> LatestCheckpoint:
        """The newest checkpoint whose files all match the sizes and checksums of its manifest.

        Raises:
            UserError: all checkpoints are damaged.
        """
        skipped: dict[str, str] = {}
        for step, path in reversed(self._visible()):
            if reason := damage(path):
                skipped[path.name] = reason
                continue
            intact = next(c for c in self.checkpoints() if c.step == step)
            return LatestCheckpoint(checkpoint=intact, skipped=skipped)
        if skipped:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise UserError(
                f"every checkpoint is damaged ({reasons})",
                where=str(self.root),
                hint="restore a copy, or delete this folder to restart the run",
            )
        return LatestCheckpoint(checkpoint=None, skipped={})

    def best(self) -> StoredCheckpoint | None:
        """The checkpoint with the highest score, the earliest of equal ones; None if none has a score."""
        return _best(self.checkpoints())

    def _publish(self, step: int, writing: Path) -> None:
        """Rename a sealed folder to `step_N`, replacing an older one."""
        final, replaced = self.root / f"step_{step}", self._hidden("replaced", step)
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        make_durable(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def retire_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, which the run discards."""
        for later, path in self._visible():
            if later > step:
                self._delete(path, later)

    def _delete_old(self, newest: int, pinned: int | None) -> None:
        """Delete checkpoints that need not be kept, including steps after `newest`, which the run has discarded.

        A checkpoint that is being read is deleted after a later write, unless the run has discarded it.
        """
        past = [c for c in self.checkpoints() if c.step <= newest]
        kept = {c.step for c in past[-max(self.keep_last, 1) :]}
        if self.keep_best and (best := _best(past)) is not None:
            kept.add(best.step)
        if pinned is not None:
            kept |= {max((c.step for c in past if c.step <= pinned), default=newest)}
        for step, path in self._visible():
            if step in kept:
                continue
            with unpinned(path) as free:
                if free or step > newest:
                    self._delete(path, step)

    def _delete(self, path: Path, step: int) -> None:
        hidden = self._hidden("deleting", step)
        path.rename(hidden)  # a half-deleted checkpoint must not be visible
        shutil.rmtree(hidden, ignore_errors=True)

    def _discard(self, writing: Path) -> None:
        shutil.rmtree(writing, ignore_errors=True)
        with contextlib.suppress(OSError):  # the original error is more important
            self.recover()

    def write_error(self, step: int, needed: int, error: OSError) -> UserError:
        """What a user is told of a failed write."""
        earlier = self.checkpoints()
        resume = f"{earlier[-1].path.name} is intact" if earlier else "there is no earlier checkpoint"
        if error.errno not in _DISK_FULL:
            return UserError(
                f"cannot write checkpoint step_{step}: {error}",
                where=str(self.root),
                hint=f"{resume}; make the folder writable and run the same command again",
            )
        need = f"about {needed:,} bytes needed, " if needed else ""
        return UserError(
            f"the disk is full: cannot write checkpoint step_{step} ({need}{_free_bytes(self.root):,} free)",
            where=str(self.root),
            hint=f"{resume}; free some space and run the same command again",
        )

    def _hidden(self, state: str, step: int) -> Path:
        return self.root / f".{state}-step_{step}"

    def _visible(self) -> list[tuple[int, Path]]:
        return sorted((int(match[1]), path) for path, match in self._matching(_VISIBLE))

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
        for path in list(self.root.iterdir()) if self.root.is_dir() else ():
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                yield path, match


def write_together(
    store: CheckpointStore,
    step: int,
    writer: Callable[[Path], None],
    *,
    ranks: Ranks,
    score: float | None = None,
    expected_bytes: int = 0,
    pinned: int | None = None,
) -> None:
    """`CheckpointStore.write` on all ranks: the first creates, seals and renames the folder, and all call `writer`."""
    if ranks.index > 0:
        directory = Path(ranks.gather(b"")[0].decode())
        try:
            writer(directory)
        except OSError as error:
            raise store.write_error(step, expected_bytes, error) from error
    else:

        def announced(directory: Path) -> None:
            ranks.gather(str(directory).encode())
            writer(directory)

        store.write(step, announced, score=score, expected_bytes=expected_bytes, pinned=pinned)
    ranks.barrier()


def recover_together(store: CheckpointStore, *, ranks: Ranks) -> list[str]:
    """`CheckpointStore.recover` on the first rank, before any reads."""
    findings = store.recover() if ranks.index == 0 else []
    ranks.barrier()
    return findings


def _free_bytes(folder: Path) -> int:
    """Free space on the disk of the folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _best(checkpoints: list[StoredCheckpoint]) -> StoredCheckpoint | None:
    scored = [c for c in checkpoints if c.score is not None]
    return max(scored, key=lambda c: (c.score, -c.step), default=None)
