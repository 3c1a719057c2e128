"""Facts of a GPU are read from torch, the driver and NVML; here from stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.planted import spec_of
from tests.unit.hardware.test_gpu_check import GOOD, NONE
from tidemill.core.errors import UserError
from tidemill.hardware.gpu_check import GpuFacts
from tidemill.runtime import gpu_facts, memory_check

KERNEL = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x) \nGCC version: 12.3.0\n"
)


@pytest.mark.parametrize(("initialized", "others"), [(False, 3), (True, 2)])
def test_facts_of_a_card(initialized: bool, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Card", uuid="1-2", major=9, minor=0)
    asked: list[bytes] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [1, 2, 3],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_facts, "_driver_cuda", lambda: "13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: initialized,
        "get_device_properties": lambda _: properties,
        "mem_get_info": lambda _: (60, 100),
        "memory_reserved": lambda _: 15,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    found = gpu_facts.gpu_facts()
    assert asked == [b"GPU-1-2"]
    assert (found.name, found.capability, found.driver_cuda, found.torch_cuda) == ("Card", (9, 0), "13.0", "13.0")
    assert (found.memory_bytes, found.free_bytes, found.used_elsewhere_bytes) == (100, 60, 25)
    assert found.other_processes == others
    assert found.triton


def test_facts_without_a_gpu(tmp_path: Path) -> None:
    found = gpu_facts.gpu_facts()
    assert (found.name, found.torch_cuda, found.driver_cuda) == ("", "", "")  # torch of the development lock
    (tmp_path / "version").write_text(KERNEL)
    assert gpu_facts._driver(tmp_path / "version") == "580.65.06"
    assert gpu_facts._driver(tmp_path / "none") == ""


def checked(facts: GpuFacts, work: Any, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> list[str]:
    """The notes of a run that starts on a machine with this GPU."""
    notes = list[str]()
    monkeypatch.setattr(memory_check, "GPU_DRIVERS", (Path(__file__),))
    monkeypatch.setattr(gpu_facts, "gpu_facts", lambda: facts)
    memory_check.check_memory(spec_of(**sections), work, note=notes.append)
    return notes


def test_a_run_is_refused_or_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(GOOD, "rl", monkeypatch) == []
    shared = replace(GOOD, other_processes=1)
    (note,) = checked(shared, "rl", monkeypatch)
    assert note.startswith("warning: NVIDIA H200 is shared with other processes (1): ")
    turing = replace(GOOD, capability=(7, 5))
    with pytest.raises(UserError, match=r"compute capability 7\.5; bfloat16 needs 8\.0"):
        checked(turing, "generate", monkeypatch)
    (note,) = checked(turing, "generate", monkeypatch, trainer={"precision": "fp32"})
    assert "torch's are slower" in note
    untrained = replace(GOOD, triton="")
    with pytest.raises(UserError, match="Triton is not installed"):
        checked(untrained, "rl", monkeypatch)
    assert len(checked(untrained, "eval", monkeypatch)) == 1
    old = replace(GOOD, **NONE, driver_cuda="12.2")
    (note,) = checked(old, "rl", monkeypatch)
    assert "the CPU is used" in note
    with pytest.raises(UserError, match=r"the driver 580\.65\.06 supports CUDA up to 12\.2"):
        checked(old, "rl", monkeypatch, trainer={"device": "cuda"})


@pytest.mark.parametrize("sections", [{"trainer": {"device": "cpu"}}, {"runtime": "ray"}])
def test_processes_that_use_no_gpu_do_not_check_it(sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(replace(GOOD, capability=(7, 5)), "rl", monkeypatch, **sections) == []
