"""Health of a GPU as its driver reports it, through NVML (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from tidemill.core.records import GpuStatus

CALL_S = 2.0
"""Deadline of one call: a driver in trouble can hang."""
EVERY_S = 10.0
SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")


class GpuReader:
    """Reads the GPUs of a process every `EVERY_S` seconds, in a thread that is given up if a call misses its deadline.

    Of several GPUs it reports the highest temperature, the lowest clock, and the sums of watts and of errors.

    Args:
        nvml: the module `pynvml`, initialised.
        handles: of the GPUs.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handles, self._clock = nvml, handles, clock
        self._due_s = clock()
        self._call: tuple[str, float] | None = None  # under way: its name and start
        self._status: GpuStatus | None = None  # not taken yet

    def __call__(self) -> GpuStatus | None:
        """The status if there is a new one. Never waits."""
        call, now_s = self._call, self._clock()
        if call is not None and now_s - call[1] > CALL_S and self._due_s < float("inf"):
            self._due_s = float("inf")
            return GpuStatus(error=f"{call[0]} has not returned for {now_s - call[1]:.0f} s")
        if call is None and now_s >= self._due_s:
            self._due_s, self._call = now_s + EVERY_S, ("a thread", now_s)
            threading.Thread(target=self._read, name="gpu health", daemon=True).start()
        status, self._status = self._status, None
        return status

    def _read(self) -> None:
        nvml, errors = self._nvml, []
        ecc = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)

        def ask(function: str, *arguments: Any) -> list[int]:
            answers = []
            for handle in self._handles:
                self._call = (function, self._clock())
                answers.append(0)
                try:
                    answers[-1] = int(getattr(nvml, function)(handle, *arguments))
                except nvml.NVMLError_GpuIsLost as error:
                    errors.append(str(error))
                except nvml.NVMLError:
                    pass  # this GPU does not have it
            return answers

        slow = sum(getattr(nvml, f"nvmlClocksThrottleReason{name}", 0) for name in SLOWDOWNS)
        self._status = GpuStatus(
            temperature_c=max(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
            clock_mhz=min(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
            power_w=sum(ask("nvmlDeviceGetPowerUsage")) / 1000,
            hot=any(reasons & slow for reasons in ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
            uncorrected_errors=sum(ask("nvmlDeviceGetTotalEccErrors", *ecc)),
            error="; ".join(errors[:1]),
        )
        self._call = None


def gpu_reader(uuids: Sequence[str]) -> Callable[[], GpuStatus | None]:
    """Reads the GPUs with these UUIDs; returns None forever without any, or without NVML."""
    if uuids:
        with suppress(Exception):  # a worker does not depend on it
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            return GpuReader(nvml, [nvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in uuids])
    return lambda: None
