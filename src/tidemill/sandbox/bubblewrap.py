"""Command lines of bubblewrap: of the launcher's namespaces, and of a command in a sandbox.

host ── launcher: own mounts and processes; IMAGE, what sandboxes see; SLOTS, a tmpfs per sandbox
        └─ command: own users, processes, network, mounts: IMAGE read-only, /work and /tmp from its slot

The launcher is process 2 of its namespace: when it ends, the kernel ends every sandbox and forgets every mount.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tidemill.core.errors import UserError

IMAGE, SLOTS = "/tidemill-image", "/tidemill-slots"
WORK = "/work"
MAX_USER_NAMESPACES = "/proc/sys/user/max_user_namespaces"
USER = 1000
"""User id that a command sees."""
PATH = f"{os.path.realpath(sys.base_prefix)}/bin:/usr/local/bin:/usr/bin:/bin"
SYSTEM = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/certs")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Links into /usr on current distributions, folders on others."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384

LIBC = ctypes.CDLL(None, use_errno=True)


PACKAGES = {
    "bwrap": ("bubblewrap", 'install it ("apt install bubblewrap"); `tidemill doctor` says which back-ends work'),
    "runsc": ("runsc (gVisor)", 'install it from gvisor.dev, or use backend = "bwrap"'),
}


def find_program(name: str) -> str:
    """The path of one of PACKAGES. Raises UserError: it is not installed."""
    if (found := shutil.which(name)) is None:
        package, hint = PACKAGES[name]
        raise UserError(f"{package} is not installed", where="sandbox.backend", hint=hint)
    return str(Path(found).resolve())


def launcher_options() -> list[str]:
    """Options for the launcher: the same user with all capabilities in new namespaces, and the image of sandboxes."""
    # Without --die-with-parent, which kills it when the thread that started it ends; it ends with its standard input.
    options = ["--new-session", "--unshare-pid", "--cap-add", "ALL"]
    if os.getuid() != 0:
        options += ["--unshare-user"]
    for entry in sorted(os.scandir("/"), key=lambda each: each.name):
        if entry.is_symlink():
            options += ["--symlink", os.readlink(entry.path), entry.path]
        else:
            options += ["--dev-bind", entry.path, entry.path]
    for path in visible_paths():
        options += [*_folders(IMAGE + path), "--ro-bind", path, IMAGE + path]
    for link in filter(os.path.islink, LINKS):
        options += ["--symlink", os.readlink(link), IMAGE + link]
    for folder in ("/proc", "/dev", "/dev/shm", WORK, "/tmp", "/etc", "/mnt"):
        options += _folders(f"{IMAGE}{folder}/")
    return [*options, "--dir", SLOTS]


def visible_paths() -> list[str]:
    """Paths that a sandbox sees read-only: the system's programs and libraries, and this interpreter."""
    paths = [
        *filter(os.path.exists, SYSTEM),
        *(each for each in LINKS if os.path.isdir(each) and not os.path.islink(each)),
    ]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/"):
        paths.append(prefix)
    return paths


def _folders(path: str) -> Iterator[str]:
    """Options that make the folders above a path readable; bubblewrap would hide them from other users."""
    parts = path.split("/")[1:-1]
    for end in range(1, len(parts) + 1):
        yield from ("--dir", "/" + "/".join(parts[:end]))


def show(path: str, folder: str) -> None:
    """Mount a folder as another one. Raises OSError: it does not exist."""
    Path(folder).mkdir()
    _mount(path, folder, MS_BIND | MS_REC, "")


def mount_processes() -> None:
    """Let the launcher see the processes of its own namespace. Raises OSError."""
    _mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")


def mount_scratch(folder: str, size_bytes: int, files: int) -> None:
    """Mount a file system of limited size. Raises OSError."""
    Path(folder).mkdir()
    _mount("tmpfs", folder, MS_NOSUID | MS_NODEV, f"size={size_bytes},nr_inodes={files},mode=0700")


def unmount(folder: str) -> None:
    detach = 2
    LIBC.umount2(folder.encode(), detach)


def _mount(source: str, folder: str, flags: int, options: str) -> None:
    """Mount a folder, or a file system named by its type."""
    if LIBC.mount(source.encode(), folder.encode(), source.encode(), flags, options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {source}: {os.strerror(number)}")


def sandbox_command(
    slot: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    filter_fd: int,
    status_fd: int,
    block_fd: int | None = None,
    processes: int,
    bubblewrap: str,
) -> list[str]:
    """A command in namespaces of its own.

    Args:
        slot: folder with `work`, `tmp`, `shm` and `mnt`, and with `hosts` if `block_fd` is given.
        filter_fd: of the filter of system calls.
        status_fd: receives the start and the exit code.
        block_fd: the command starts when it can be read from.
        processes: limit; set inside, where it counts this sandbox alone.
    """
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    if Path(MAX_USER_NAMESPACES).exists():  # gVisor lacks it; the filter of system calls refuses namespaces, too
        options.append("--disable-userns")
    options += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox", "--cap-drop", "ALL"]
    options += ["--ro-bind", IMAGE, "/", "--proc", "/proc", "--dev", "/dev"]
    for name, path in (("work", WORK), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        options += ["--bind", f"{slot}/{name}", path]
    options += ["--ro-bind", f"{slot}/mnt", "/mnt", "--remount-ro", "/dev", "--chdir", WORK]
    options += ["--seccomp", str(filter_fd), "--json-status-fd", str(status_fd)]
    if block_fd is not None:
        options += ["--ro-bind", f"{slot}/hosts", "/etc/hosts", "--block-fd", str(block_fd)]
    for name, value in {"PATH": PATH, "HOME": WORK, "LANG": "C.UTF-8", **env}.items():
        options += ["--setenv", name, value]
    return [bubblewrap, *options, "--", "/usr/bin/prlimit", f"--nproc={processes}", "--", *argv]
