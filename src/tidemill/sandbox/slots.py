"""Slots: the folder and user of a sandbox, and the command line of a command in it, for each back-end."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.sandbox import bubblewrap
from tidemill.sandbox.bubblewrap import IMAGE, PATH, USER, WORK
from tidemill.sandbox.messages import Request
from tidemill.sandbox.network import hosts_file
from tidemill.sandbox.records import Limits
from tidemill.sandbox.scratch import Scratch
from tidemill.sandbox.seccomp import seccomp_program

FIRST_USER, FEW_USERS = 1_900_000_000, 60_000
"""First user id of slots, above those of people, services and containers; and the one where fewer ids exist."""
PR_CAP_AMBIENT, CLEAR_ALL = 47, 4
OPEN_FILES = 256
FOLDERS = ("work", "tmp", "shm")
NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
"""Of gVisor."""


@dataclass(kw_only=True)
class Slot:
    """What the launcher keeps of a sandbox between its commands."""

    folder: str
    owner: int | None  # user id of its commands; None: the launcher's
    limits: Limits
    network: tuple[str, ...]  # "HOST:PORT" pairs

    @property
    def scratch(self) -> Scratch:
        return Scratch(
            f"{self.folder}/work",
            owner=self.owner,
            limit_bytes=self.limits.scratch_bytes,
            limit_files=self.limits.scratch_files,
        )


@dataclass(kw_only=True)
class Spawn:
    """Arguments of `subprocess.Popen`."""

    argv: list[str]
    status_fd: int | None = None  # where bubblewrap reports that the command has started and ended
    block_fd: int | None = None  # the command starts when this is written to
    search_path: str | None = None  # without a sandbox: where its program is searched for
    options: dict[str, Any]


class MountedSlots:
    """Files in file systems of limited size, which are mounted here."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def mount(self, request: Request, number: int, owner: int | None) -> Slot:
        """Mount the scratch of a sandbox, and what it sees besides the image."""
        folder = f"{bubblewrap.SLOTS}/{number}"
        slot = Slot(folder=folder, owner=owner, limits=request.limits, network=request.network)
        ours = 2 + len(FOLDERS) + len(request.visible) + bool(request.network)  # the root, `mnt`, and what is in them
        bubblewrap.mount_scratch(folder, slot.limits.scratch_bytes, slot.limits.scratch_files + ours)
        _make_folders(slot)
        Path(folder, "mnt").mkdir(mode=0o755)
        for name, path in request.visible.items():
            bubblewrap.show(path, f"{folder}/mnt/{name}")
        return slot

    def close(self, slot: Slot) -> None:
        bubblewrap.unmount(slot.folder)
        os.rmdir(slot.folder)


class BubblewrapSlots(MountedSlots):
    """Commands in namespaces of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._bubblewrap = bubblewrap.find_program("bwrap")
        self._filter = seccomp_program()
        self._first_user = _first_user() if os.getuid() == 0 else None

    def open(self, request: Request) -> Slot:
        number = next(self._numbers)
        owner = None if self._first_user is None else self._first_user + number % 5000
        slot = self.mount(request, number, owner)
        if slot.network:
            Path(slot.folder, "hosts").write_text(hosts_file(slot.network))
        return slot

    @contextmanager
    def spawn(self, slot: Slot, request: Request, limits: Limits) -> Iterator[Spawn]:
        for name in FOLDERS:  # an earlier command may have closed them to itself
            os.chmod(f"{slot.folder}/{name}", 0o700)
        filter_read, filter_write = os.pipe()
        status_read, status_write = os.pipe()
        block = os.pipe() if slot.network else ()
        try:
            with os.fdopen(filter_write, "wb") as file:
                file.write(self._filter)
            argv = bubblewrap.sandbox_command(
                slot.folder,
                request.argv,
                request.env,
                filter_fd=filter_read,
                status_fd=status_write,
                block_fd=block[0] if block else None,
                processes=limits.processes,
                bubblewrap=self._bubblewrap,
            )
            options: dict[str, Any] = {
                "env": {},
                "pass_fds": (filter_read, status_write, *block[:1]),
                "preexec_fn": _confine(limits),
            }
            if slot.owner is not None:
                options |= {"user": slot.owner, "group": slot.owner, "extra_groups": []}
            block_fd = os.dup(block[1]) if block else None
            yield Spawn(argv=argv, status_fd=os.dup(status_read), block_fd=block_fd, options=options)
        finally:
            for each in (filter_read, status_read, status_write, *block):
                os.close(each)


class RunscSlots(MountedSlots):
    """As `BubblewrapSlots`, with gVisor's kernel between the command and Linux. Root only."""

    def __init__(self) -> None:
        super().__init__()
        self._runsc = bubblewrap.find_program("runsc")
        if os.getuid() != 0:
            raise OSError("runsc needs root")
        self._commands = itertools.count()

    def open(self, request: Request) -> Slot:
        if request.network:
            raise OSError("runsc has no network here; use bwrap for sandbox.network")
        return self.mount(request, next(self._numbers), USER)

    @contextmanager
    def spawn(self, slot: Slot, request: Request, limits: Limits) -> Iterator[Spawn]:
        name = f"command-{next(self._commands)}"
        folder = Path(bubblewrap.SLOTS, name)
        folder.mkdir()
        config = bundle_config(slot.folder, request.argv, request.env, limits)
        (folder / "config.json").write_text(json.dumps(config))
        argv = [self._runsc, "--root", str(folder / "state"), "--network=none", "--ignore-cgroups"]
        argv += ["run", "--bundle", str(folder), name]
        yield Spawn(argv=argv, options={"env": {"PATH": os.environ["PATH"]}})


def bundle_config(slot: str, argv: Sequence[str], env: Mapping[str, str], limits: Limits) -> dict[str, Any]:
    """What `runsc run` is given, by the runtime specification of the Open Container Initiative. (`runsc do` would show
    the files of the host.)

    Args:
        slot: folder with `work`, `tmp`, `shm` and `mnt`.
    """
    variables = {"PATH": PATH, "HOME": WORK, "LANG": "C.UTF-8", **env}
    rlimits = {
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": limits.scratch_bytes,
        "RLIMIT_DATA": limits.memory_bytes,
    }
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": USER, "gid": USER},
            "args": list(argv),
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": WORK,
            "capabilities": {},
            "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in rlimits.items()],
            "noNewPrivileges": True,
        },
        "root": {"path": IMAGE, "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
            *(
                {"destination": path, "type": "bind", "source": f"{slot}/{name}", "options": ["bind", "rw", "nosuid"]}
                for name, path in (("work", WORK), ("tmp", "/tmp"), ("shm", "/dev/shm"))
            ),
            {"destination": "/mnt", "type": "bind", "source": f"{slot}/mnt", "options": ["rbind", "ro", "nosuid"]},
        ],
        "linux": {
            "namespaces": [{"type": name} for name in NAMESPACES],
            "resources": {"pids": {"limit": limits.processes}, "memory": {"limit": limits.memory_bytes}},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/sysrq-trigger"],
            "readonlyPaths": ["/proc/sys"],
        },
    }


class PlainSlots:
    """Commands that see everything which this user sees; only their resources are limited."""

    def open(self, request: Request) -> Slot:
        folder = tempfile.mkdtemp(prefix="tidemill-sandbox-")
        slot = Slot(folder=folder, owner=None, limits=request.limits, network=request.network)
        _make_folders(slot)
        return slot

    @contextmanager
    def spawn(self, slot: Slot, request: Request, limits: Limits) -> Iterator[Spawn]:
        env = {
            "PATH": PATH,
            "HOME": f"{slot.folder}/work",
            "LANG": "C.UTF-8",
            "TMPDIR": f"{slot.folder}/tmp",
        }
        options: dict[str, Any] = {
            "env": env | request.env,
            "cwd": f"{slot.folder}/work",
            "start_new_session": True,
            "preexec_fn": _confine(limits),
        }
        yield Spawn(argv=list(request.argv), options=options, search_path=options["env"]["PATH"])

    def close(self, slot: Slot) -> None:
        shutil.rmtree(slot.folder, ignore_errors=True)


Slots: TypeAlias = BubblewrapSlots | RunscSlots | PlainSlots
"""The sandboxes of one back-end. `open` raises OSError; the file descriptors of a `spawn` are open inside its block;
`close` deletes the files of a sandbox in which no process is left."""


def _make_folders(slot: Slot) -> None:
    for path in (slot.folder, *(f"{slot.folder}/{name}" for name in FOLDERS)):
        Path(path).mkdir(mode=0o700, exist_ok=True)
        if slot.owner is not None:
            os.chown(path, slot.owner, slot.owner)


def _first_user() -> int:
    """The first user id of slots. Raises OSError: this namespace has too few."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for first in (FIRST_USER, FEW_USERS):
        if any(inside <= first < inside + count for inside, _, count in ranges):
            return first
    raise OSError(f"user {FEW_USERS} does not exist in this container, so that root could not be dropped")


def _confine(limits: Limits) -> Callable[[], None]:
    """Limits of each process, set in the child before it becomes the command; the watchdog adds up the processes."""
    cpu_s = int(limits.cpu_s) + 2 if math.isfinite(limits.cpu_s) else resource.RLIM_INFINITY

    def set_limits() -> None:
        bubblewrap.LIBC.prctl(PR_CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_FSIZE, limits.scratch_bytes),
            (resource.RLIMIT_DATA, limits.memory_bytes),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_CPU, cpu_s),
        ):
            resource.setrlimit(kind, (value, value))

    return set_limits
