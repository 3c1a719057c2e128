"""NVML is replaced by a fake: readings, missing features, a lost GPU, and a driver that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.core.records import GpuStatus
from tidemill.hardware import gpu_health
from tidemill.hardware.gpu_health import EVERY_S, GpuReader, gpu_reader


class NVMLError(Exception): ...


class Lost(NVMLError): ...


def fake(**changes: Callable[..., int]) -> Any:
    answers: dict[str, Any] = {
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1755,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x40,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
    }
    constants = {"NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_SM": 1, "NVML_VOLATILE_ECC": 0}
    reasons = {"nvmlClocksThrottleReasonHwThermalSlowdown": 0x40, "nvmlClocksThrottleReasonHwSlowdown": 0x8}
    errors = {"NVMLError": NVMLError, "NVMLError_GpuIsLost": Lost, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1}
    return SimpleNamespace(**answers | constants | reasons | errors | changes)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def next_status(reader: GpuReader) -> GpuStatus:
    """The status of the reading that is under way."""
    until_s = time.monotonic() + 10
    while (status := reader()) is None and time.monotonic() < until_s:
        time.sleep(0.001)
    assert status is not None
    return status


def unsupported(*arguments: object) -> int:
    raise NVMLError("not supported")


def lost(*arguments: object) -> int:
    raise Lost("the GPU is lost")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, GpuStatus(temperature_c=61, clock_mhz=1755, power_w=350.5, hot=True, uncorrected_errors=2)),
        (
            {
                "nvmlDeviceGetTotalEccErrors": unsupported,
                "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4,
            },
            GpuStatus(temperature_c=61, clock_mhz=1755, power_w=350.5),
        ),
        (
            {"nvmlDeviceGetPowerUsage": lost},
            GpuStatus(temperature_c=61, clock_mhz=1755, hot=True, uncorrected_errors=2, error="the GPU is lost"),
        ),
    ],
)
def test_a_reading(changes: dict[str, Any], expected: GpuStatus) -> None:
    clock = Clock()
    reader = GpuReader(fake(**changes), [None], clock=clock)
    assert next_status(reader) == expected
    assert reader() is None  # not again
    clock.now_s += EVERY_S
    assert next_status(reader) == expected


def test_of_several_gpus_the_worst_is_reported() -> None:
    temperatures, clocks = {"a": 50, "b": 61}, {"a": 1755, "b": 1200}
    changes = {
        "nvmlDeviceGetTemperature": lambda handle, _: temperatures[handle],
        "nvmlDeviceGetClockInfo": lambda handle, _: clocks[handle],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x8 if handle == "b" else 0,
    }
    reader = GpuReader(fake(**changes), ["a", "b"], clock=Clock())
    expected = GpuStatus(temperature_c=61, clock_mhz=1200, power_w=2 * 350.5, hot=True, uncorrected_errors=2 * 2)
    assert next_status(reader) == expected


def test_a_driver_that_hangs_is_reported_once_and_never_waited_for() -> None:
    clock, released, entered = Clock(), threading.Event(), threading.Event()

    def hangs(handle: None) -> int:
        entered.set()
        released.wait(10)
        return 0

    reader = GpuReader(fake(nvmlDeviceGetPowerUsage=hangs), [None], clock=clock)
    assert reader() is None
    assert entered.wait(10)
    clock.now_s = 2.5
    assert reader() == GpuStatus(error="nvmlDeviceGetPowerUsage has not returned for 2 s")
    clock.now_s = 100.0
    assert reader() is None
    released.set()


def test_without_nvml_there_is_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(gpu_health, "import_module", missing)
    assert gpu_reader(["GPU-0"])() is None
    assert gpu_reader([])() is None
