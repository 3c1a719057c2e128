"""Health of a GPU as its driver reports it, through NVML (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from tidemill.core.records import GpuStatus

CALL_S = 2.0
"""Deadline of one call: a driver in trouble can hang."""
EVERY_S = 10.0

SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")


class GpuReader:
    """Reads one GPU every `EVERY_S` seconds, in a thread that is given up when a call passes its deadline.

    Args:
        nvml: the module `pynvml`, initialised.
        handle: of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._read_s = -EVERY_S
        self._call: tuple[str, float] | None = None  # under way: its name and start
        self._status: GpuStatus | None = None  # not taken yet
        self._given_up = False

    def __call__(self) -> GpuStatus | None:
        """The status if there is a new one. Never waits."""
        call, now_s = self._call, self._clock()
        if call is not None and now_s - call[1] > CALL_S and not self._given_up:
            self._given_up = True
            return GpuStatus(error=f"{call[0]} has not returned for {now_s - call[1]:.0f} s")
        status, self._status = self._status, None
        if not self._given_up and call is None and now_s - self._read_s >= EVERY_S:
            self._read_s = now_s
            self._call = ("a thread", now_s)
            threading.Thread(target=self._read, name="gpu health", daemon=True).start()
        return status

    def _read(self) -> None:
        nvml, lost = self._nvml, ""
        values: dict[str, Any] = {}
        for name, function, arguments in (
            ("temperature_c", "nvmlDeviceGetTemperature", (nvml.NVML_TEMPERATURE_GPU,)),
            ("clock_mhz", "nvmlDeviceGetClockInfo", (nvml.NVML_CLOCK_SM,)),
            ("power_w", "nvmlDeviceGetPowerUsage", ()),
            ("reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", ()),
            (
                "uncorrected_errors",
                "nvmlDeviceGetTotalEccErrors",
                (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            ),
        ):
            self._call = (function, self._clock())
            try:
                values[name] = getattr(nvml, function)(self._handle, *arguments)
            except nvml.NVMLError_GpuIsLost as error:
                lost = str(error)
            except nvml.NVMLError:
                continue  # this GPU does not have it
        reasons = int(values.pop("reasons", 0))
        slow = sum(getattr(nvml, f"nvmlClocksThrottleReason{name}", 0) for name in SLOWDOWNS)
        values["power_w"] = values.get("power_w", 0.0) / 1000
        self._status = GpuStatus(hot=bool(reasons & slow), error=lost, **values)
        self._call = None


def gpu_reader(uuid: str | None) -> Callable[[], GpuStatus | None]:
    """Reads the GPU with this UUID; returns None forever without one, or without NVML."""
    if uuid is not None:
        with suppress(Exception):  # a worker does not depend on it
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            return GpuReader(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
    return lambda: None
