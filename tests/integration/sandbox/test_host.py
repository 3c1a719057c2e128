"""Nothing of the host changes while programs in a sandbox try to change it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sandbox.probes import PROBES
from tests.sandboxes import need_bubblewrap, probe_results
from tidemill.sandbox.bubblewrap import visible_paths

pytestmark = pytest.mark.xdist_group("probes")
WATCHED = ("/etc", "/boot", "/opt", "/srv", "/var/spool", str(Path.home() / ".ssh"))
CONTENT = ("/proc/mounts", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/self/cgroup")


def test_no_file_mount_or_setting_of_the_host_changes() -> None:
    need_bubblewrap()
    before = state()

    probe_results.cache_clear()  # run again, also if another test has; those of test_probes.py use this run
    printed = probe_results("bwrap", "this", tuple(PROBES))

    assert len(printed) == len(PROBES)
    after = state()
    assert {path for path in before | after if before.get(path) != after.get(path)} == set()


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    before = dict(entries(str(tmp_path)))
    times = file.stat()
    file.write_text("b")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert dict(entries(str(tmp_path))) != before


def state() -> dict[str, str]:
    """Digests of folders that sandboxes see and of watched ones, and some of the kernel's settings."""
    found = {}
    for folder in {*visible_paths(), *filter(os.path.isdir, WATCHED)}:
        digest = hashlib.blake2b(digest_size=16)
        for path, entry in sorted(entries(folder)):
            digest.update(f"{path}\0{entry}\n".encode(errors="surrogateescape"))
        found[folder] = digest.hexdigest()
    return found | {path: Path(path).read_text() for path in CONTENT if Path(path).exists()}


def entries(folder: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Paths below a folder with what no write leaves unchanged: the kernel sets the time of change, nobody else can.

    Python caches of the host's own interpreters are left out, because other tests write them.
    """
    for parent, folders, files in os.walk(folder):
        with_cache = "__pycache__" in folders
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (parent, *(f"{parent}/{name}" for name in (*folders, *files))):
            found = os.lstat(path)  # hundreds of thousands: a `Path` would take longer than its look-up
            changed_ns = 0 if with_cache and path == parent else found.st_ctime_ns  # the cache's making sets it
            yield path, (found.st_mode, found.st_ino, found.st_size, found.st_uid, changed_ns)
