"""Rows of measurements on a GPU. The result file is complete after every row, so that nothing is lost at a deadline."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.check_rows import Skip
from benchmarks.measuring import write_result
from benchmarks.origin import parsed

WARM_UP = 2


class Rows:
    """Measures rows one after another and keeps them in results/NAME.json.

    Args:
        name: of the result; tiny runs get a name of their own.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.device, self.tiny = torch.device(options.device), bool(options.tiny)
        self._name = f"{name}-quick" if self.tiny else name
        self._rows: list[dict[str, Any]] = []
        self._unwritten = False

    def measure(self, row: str, function: Callable[[], Mapping[str, Any]], **about: object) -> dict[str, Any]:
        """Add a row: what `function` measures; a missing package skips it, a failure is reported and others go on."""
        began = time.perf_counter()
        try:
            status: dict[str, Any] = {"status": "measured", **function()}
        except (ImportError, Skip) as reason:
            status = {"status": "skipped", "why": str(reason)}
        except (RuntimeError, ValueError) as error:  # among them: out of memory
            status = {"status": "failed", "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        found = {"row": row, **about, **status, "row_s": time.perf_counter() - began}
        self._rows.append(found)
        Console(width=180).print({name: _short(value) for name, value in found.items() if name != "config"})
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 -- a row that cannot be written is printed, and others go on
            print(f"{self._name} was not written: {type(error).__name__}: {error}", file=sys.stderr)
            self._unwritten = True
        else:
            self._unwritten = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return found

    def finish(self) -> int:
        """Exit code: 1 if a row failed or the result could not be written."""
        return int(self._unwritten or any(row["status"] == "failed" for row in self._rows))

    def _write(self) -> None:
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        write_result(self._name, {"device": device, "torch": torch.__version__, "rows": self._rows})


def options(about: str) -> argparse.Namespace | None:
    """The options of a script; None if it asks for a GPU and there is none."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to see that the script works")
    found = parsed(parser)
    if torch.device(found.device).type == "cuda" and not torch.cuda.is_available():
        print("no GPU; use --device cpu --tiny", file=sys.stderr)
        return None
    return found


def seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of a call, after some that are not measured."""
    times = []
    for number in range(WARM_UP + rounds):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Let the device finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gb(device: torch.device) -> float | None:
    """Largest memory since the last row; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
