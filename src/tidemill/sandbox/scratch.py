"""The files of a sandbox, handled from outside: links are never followed, and only regular files and folders kept."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.sandbox.bubblewrap import WORK
from tidemill.sandbox.records import SandboxError, Snapshot

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = READ | os.O_DIRECTORY
MODE = 0o777
"""Bits of a mode that are kept."""


def path_parts(path: str) -> list[str]:
    """The names of a path relative to /work, or in it. Raises SandboxError: it leads out, or is no path."""
    path = path.removeprefix(f"{WORK}/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    is_text = path.encode(errors="ignore").decode() == path  # no lone surrogates, which no name can have
    if path.startswith("/") or not parts or ".." in parts or "\0" in path or not is_text:
        raise SandboxError(f"{path!r} is not a path in the sandbox; paths are relative to {WORK}")
    return parts


class Scratch:
    """The folder of a sandbox.

    Args:
        owner: user and group of new files; None: this process's.
    """

    def __init__(self, folder: str, *, owner: int | None, limit_bytes: int, limit_files: int) -> None:
        self._folder, self._owner = folder, owner
        self._limit_bytes, self._limit_files = limit_bytes, limit_files

    def read(self, path: str) -> bytes:
        with self._parent(path, create=False) as (folder, name):
            return self._read(folder, name, path)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        with self._parent(path, create=True) as (folder, name):
            try:
                made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
            except FileExistsError:
                if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
                    raise SandboxError(f"{path} is not a regular file") from None
                os.unlink(name, dir_fd=folder)
                made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
            try:
                with os.fdopen(made, "wb") as file:
                    self._own(made)
                    file.write(data)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise SandboxError(f"{path}: no space left (limit: {self._limit_bytes:,} bytes)") from None

    def snapshot(self) -> Snapshot:
        buffer, left_out = io.BytesIO(), 0
        total = files = 0
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, folder, name, found in self._walk():
                kind = stat.S_IFMT(found.st_mode)
                if kind not in (stat.S_IFREG, stat.S_IFDIR):
                    left_out += 1
                    continue
                left_out += bool(found.st_mode & ~(MODE | kind))
                files += 1
                entry = tarfile.TarInfo(path)
                entry.mode, entry.mtime = found.st_mode & MODE, int(found.st_mtime)
                if kind == stat.S_IFDIR:
                    entry.type = tarfile.DIRTYPE
                    archive.addfile(entry)
                    continue
                total += found.st_size  # not the blocks in use: a sparse file counts as a whole
                self._check_size(total, files)
                data = self._read(folder, name, path)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return Snapshot(data=buffer.getvalue(), left_out=left_out)

    def restore(self, data: bytes) -> None:
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                entries = archive.getmembers()
                self._check_size(sum(each.size for each in entries), len(entries))
                self.clear()
                for entry in entries:
                    if entry.isdir():
                        with self._parent(f"{entry.name}/-", create=True) as (folder, _):
                            os.fchmod(folder, entry.mode & MODE | 0o700)
                    elif entry.isfile() and (content := archive.extractfile(entry)) is not None:
                        self.write(entry.name, content.read(), entry.mode & MODE)
        except (tarfile.TarError, EOFError) as error:
            raise SandboxError(f"the snapshot is damaged: {error}") from None

    def clear(self) -> None:
        """Delete all files."""
        for entry in os.scandir(self._folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)  # does not follow links
            else:
                os.unlink(entry.path)

    def _walk(self) -> Iterator[tuple[str, int, str, os.stat_result]]:
        """(path, open folder, name in it, status) of every entry, folders before their content."""
        top = os.open(self._folder, FOLDER)
        try:
            for at, folders, files, folder in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                folders.sort()
                for name in sorted([*folders, *files]):
                    path = os.path.normpath(os.path.join(at, name))
                    yield path, folder, name, os.lstat(name, dir_fd=folder)
        finally:
            os.close(top)

    def _read(self, folder: int, name: str, path: str) -> bytes:
        try:
            descriptor = os.open(name, READ, dir_fd=folder)
        except OSError as error:
            raise SandboxError(f"{path} cannot be read: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SandboxError(f"{path} is not a regular file")
            self._check_size(found.st_size, 1)
            return file.read(self._limit_bytes)

    @contextmanager
    def _parent(self, path: str, *, create: bool) -> Iterator[tuple[int, str]]:
        """The open folder that a path is in, and its name there. Raises SandboxError."""
        parts = path_parts(path)
        try:
            folder = os.open(self._folder, FOLDER)
            try:
                for part in parts[:-1]:
                    if create:
                        try:
                            os.mkdir(part, 0o755, dir_fd=folder)
                            self._own(part, dir_fd=folder)
                        except FileExistsError:
                            pass
                    below = os.open(part, FOLDER, dir_fd=folder)
                    os.close(folder)
                    folder = below
                yield folder, parts[-1]
            finally:
                os.close(folder)
        except OSError as error:
            raise SandboxError(f"{path}: {error.strerror}") from None

    def _own(self, target: int | str, dir_fd: int | None = None) -> None:
        if self._owner is not None:
            os.chown(target, self._owner, self._owner, dir_fd=dir_fd)

    def _check_size(self, total: int, files: int) -> None:
        if total > self._limit_bytes or files > self._limit_files:
            raise SandboxError(
                f"its files are too large: {total:,} bytes in {files:,} files; the limit is {self._limit_bytes:,} "
                f"bytes and {self._limit_files:,} files"
            )
