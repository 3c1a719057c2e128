"""What is wrong with a GPU is said in one line, before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tidemill.hardware.gpu_check import GpuFacts, objections

GOOD = GpuFacts(
    name="NVIDIA H200",
    driver="580.65.06",
    driver_cuda="13.0",
    torch_cuda="13.0",
    capability=(9, 0),
    memory_bytes=150.1e9,
    free_bytes=149.5e9,
    used_elsewhere_bytes=0.6e9,
    triton="3.7.1",
)
NONE: dict[str, Any] = {"name": "", "capability": (0, 0), "triton": ""}
ELSEWHERE = "NVIDIA H200 is shared with other processes"
TOO_OLD = "the driver 535.161.07 supports CUDA up to 12.2, and torch is built for 13.0"


def said(*, bf16: bool = True, trains: bool = True, required: bool = False, **changes: Any) -> list[tuple[str, bool]]:
    facts = replace(GOOD, **changes)
    found = list(objections(facts, bf16=bf16, trains=trains, required=required))
    assert all(each.hint and "\n" not in each.text for each in found)
    return [(each.text, each.refuses) for each in found]


def test_a_good_gpu_has_no_objection() -> None:
    assert said(required=True) == []
    assert said(driver_cuda="13.2") == []


@pytest.mark.parametrize("required", [False, True])
def test_a_driver_that_is_too_old(required: bool) -> None:
    old: dict[str, Any] = {**NONE, "driver": "535.161.07", "driver_cuda": "12.2"}
    assert said(required=required, **old) == [(TOO_OLD if required else f"{TOO_OLD}; the CPU is used", required)]
    # an older minor version is compatible, so something else is wrong
    minor = said(**NONE, torch_cuda="13.2")
    assert minor == [("torch cannot use the GPU of this machine; the CPU is used", False)]
    assert said(**NONE, torch_cuda="", required=True)[0][0].startswith("torch is built for CPUs only")


def test_an_older_card_computes_in_fp32_only() -> None:
    turing: dict[str, Any] = {"name": "Tesla T4", "capability": (7, 5)}
    assert said(**turing) == [("Tesla T4 has compute capability 7.5; bfloat16 needs 8.0", True)]
    slower = "Tesla T4 has compute capability 7.5; Tidemill's kernels need 8.0, torch's are slower"
    assert said(**turing, bf16=False) == [(slower, False)]
    assert said(name="AMD Instinct MI60", capability=(7, 5), nvidia=False) == []


def test_without_triton_nothing_is_trained() -> None:
    assert said(triton="") == [("Triton is not installed, and attention in token trees is compiled with it", True)]
    assert said(compiler=False) == [
        ("Triton finds no C compiler, and attention in token trees is compiled with it", True)
    ]
    assert said(triton="", trains=False) == [("Triton is not installed: torch's kernels are slower", False)]


def test_a_shared_card_is_used() -> None:
    used = said(other_processes=2, used_elsewhere_bytes=40.2e9)
    assert used == [(f"{ELSEWHERE} (2): 40.2 GB of 150 GB are used elsewhere, and the run is slower", False)]
    assert said(used_elsewhere_bytes=1.5e9)[0][0].startswith(f"{ELSEWHERE}: 1.5 GB")  # without NVML
    assert said(other_processes=1)[0][0].startswith(f"{ELSEWHERE} (1): 600 MB")
