"""What a worker passes to vLLM, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.config.schema import VllmConfig
from tidemill.rollout.engines.vllm.engine import VllmSettings, engine_arguments


def settings(**changes: Any) -> VllmSettings:
    return VllmSettings(model="folder", dtype="bfloat16", slots=64, context=1024, **changes)


@pytest.mark.parametrize("sleeps", [False, True])
def test_only_a_gpu_uses_cuda_graphs_and_sleeps(sleeps: bool) -> None:
    cpu = engine_arguments(settings(sleeps=sleeps), on_cpu=True, can_sleep=False)
    gpu = engine_arguments(settings(sleeps=sleeps), on_cpu=False, can_sleep=True)
    assert (cpu["enforce_eager"], cpu["enable_sleep_mode"]) == (True, False)
    assert (gpu["enforce_eager"], gpu["enable_sleep_mode"]) == (False, sleeps)
    assert gpu["async_scheduling"] is False  # weights change between two steps
    assert {name for name in gpu if gpu[name] != cpu[name]} <= {"enforce_eager", "enable_sleep_mode"}


def test_graphs_can_be_turned_off() -> None:
    args = VllmConfig(args={"enforce_eager": True}).args
    assert engine_arguments(settings(args=args), on_cpu=False, can_sleep=True)["enforce_eager"] is True
