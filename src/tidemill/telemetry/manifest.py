"""What produced a run: versions, git commit, machine, command line; one entry per session."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tidemill
from tidemill.telemetry.events import timestamp

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "reasoning-gym")
GIT_TIMEOUT_S = 5.0


def build_manifest(
    earlier: dict[str, Any], *, run: str, model: str, seed: int, unix_s: float, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """The manifest of a run with one more session; `earlier` is the stored one, empty for a new run."""
    session = {
        "started": timestamp(unix_s),
        "argv": without_absolute_paths(sys.argv if argv is None else argv),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
    }
    created = earlier.get("created", session["started"])
    return {
        **earlier,  # whatever else was noted of this run stays
        "run": run,
        "run_id": earlier.get("run_id", blake2b(f"{run} {created}".encode(), digest_size=6).hexdigest()),
        "model": model,
        "seed": seed,
        "created": created,
        "sessions": [*earlier.get("sessions", []), session],
    }


def without_absolute_paths(argv: Sequence[str]) -> list[str]:
    """The command line with every absolute path shortened to its last part: it should not tell where things lie."""

    def shorten(argument: str) -> str:
        head, equals, tail = argument.rpartition("=")
        prefix = "@" if tail.startswith("@") else ""
        path = tail.removeprefix("@")
        return f"{head}{equals}{prefix}…/{Path(path).name}" if Path(path).is_absolute() else argument

    return [Path(argv[0]).name, *map(shorten, argv[1:])] if argv else []


def versions() -> dict[str, str]:
    """Of Python, Tidemill and what its figures depend on, without importing any of it."""
    found = {"python": platform.python_version(), "tidemill": tidemill.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Commit of the checkout Tidemill runs from and whether it has changes; empty when installed from a package."""
    folder = Path(tidemill.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed package may lie inside somebody else's checkout (a virtual environment in a project).
    if not commit or _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Operating system, processor, cores this process may use, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory_bytes = 0
    return {"system": platform.platform(), "processor": _processor(), "cores": cores, "memory_bytes": memory_bytes}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
