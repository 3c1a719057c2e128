"""The manifest of a run (versions, commit, machine, command line) and its forecast."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import tidemill
from tidemill.core.formatting import counted, dollars, duration
from tidemill.core.records import Record, decode_json
from tidemill.telemetry.events import timestamp
from tidemill.telemetry.jsonl import write_json
from tidemill.telemetry.run_dir import RUN_FORMAT

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "reasoning-gym")
GIT_TIMEOUT_S = 5.0


def build_manifest(
    earlier: dict[str, Any], *, run: str, model: str, seed: int, unix_s: float, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """The manifest with this session appended; `earlier` is the stored manifest, empty for a new run."""
    session = {
        "started": timestamp(unix_s),
        "argv": without_absolute_paths(sys.argv if argv is None else argv),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
    }
    created = earlier.get("created", session["started"])
    return {
        **earlier,  # keeps fields added elsewhere, such as the model's digest
        "format": RUN_FORMAT,
        "run": run,
        "run_id": earlier.get("run_id", blake2b(f"{run} {created}".encode(), digest_size=6).hexdigest()),
        "model": model,
        "seed": seed,
        "created": created,
        "sessions": [*earlier.get("sessions", []), session],
    }


def without_absolute_paths(argv: Sequence[str]) -> list[str]:
    """The command line with every absolute path shortened to its last part, to keep local paths private."""

    def shorten(argument: str) -> str:
        head, equals, tail = argument.rpartition("=")
        prefix = "@" if tail.startswith("@") else ""
        path = tail.removeprefix("@")
        return f"{head}{equals}{prefix}…/{Path(path).name}" if Path(path).is_absolute() else argument

    return [Path(argv[0]).name, *map(shorten, argv[1:])] if argv else []


def versions() -> dict[str, str]:
    """Versions of Python, Tidemill and the packages that affect results, without importing them."""
    found = {"python": platform.python_version(), "tidemill": tidemill.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Commit of Tidemill's checkout and whether it has local changes; empty if installed from a package."""
    folder = Path(tidemill.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed package may be inside another project's checkout (in its virtual environment).
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
    """Operating system, processor, cores available to this process, and memory."""
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


def peak_rss_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    # Preferred on Linux: getrusage starts at the peak of the parent process.
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


FORECAST = "forecast.json"
FORECAST_FORMAT = 2


class Spread(Record):
    """Mean of several simulations, and the bounds two standard deviations below and above."""

    mean: float
    low: float
    high: float


class Forecast(Record):
    """Forecast of a whole run. Times in seconds."""

    format: int
    profile: str  # description of the profile it is based on
    seeds: int  # simulations
    steps: int
    step_s: tuple[Spread, ...]  # of each simulated step, from step 1
    usual_step_s: Spread  # mean over the steps after the first; used for steps that were not simulated
    total_s: Spread  # from the command to the end
    split_s: dict[str, float]  # the trainer's phases in a usual step
    generating_s: float  # of a usual step, until its last sample was finished
    outside_steps_s: dict[str, float]  # of the whole run, outside steps: start, evaluation, checkpoints
    tokens_per_s: float
    cost_usd: float
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        cost = f" and {dollars(self.cost_usd)}" if self.cost_usd else ""
        low, high = duration(self.total_s.low), duration(self.total_s.high)
        return f"forecast: {duration(self.total_s.mean)} ({low} to {high}){cost} for {counted(self.steps, 'step')}"

    @property
    def caveats(self) -> str:
        """The profile's caveats in one line; empty if there are none."""
        return f"the forecast is from {self.profile}; {'; '.join(self.notes)}" if self.notes else ""

    def of_step(self, step: int) -> Spread:
        """Wall time of a step, counted from 1."""
        return self.step_s[step - 1] if step <= len(self.step_s) else self.usual_step_s


def write_forecast(directory: Path, forecast: Forecast) -> None:
    """Write RUN/forecast.json. Raises UserError if it cannot be written."""
    write_json(directory / FORECAST, forecast)


def read_forecast(directory: Path) -> Forecast | None:
    """None if the file is missing, damaged or of another format."""
    try:
        forecast = decode_json((directory / FORECAST).read_bytes(), Forecast)
    except (OSError, msgspec.DecodeError):
        return None
    return forecast if forecast.format == FORECAST_FORMAT else None
