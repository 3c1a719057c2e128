"""Device, precision and threads of numerical work, and the thread it runs on."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch

from tidemill.config.learning import TrainerConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import with_deadline

T = TypeVar("T")
Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]

IDLE_S = 0.005
"""A thread without a call for this long counts as idle: a caller that computes in a loop calls again sooner."""


class ComputeThread:
    """Implements `core.protocols.Compute` with one daemon thread that runs calls in the order they are made.

    A cancelled call that has not started is skipped. One that is running cannot be interrupted: it finishes, its result
    is dropped, and the next call waits for it.
    """

    def __init__(self, name: str = "tidemill-compute") -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._low_priority: deque[Call] = deque()
        self._ended: Future[None] = Future()
        self._closed = False
        self._name = name
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T], *, when_idle: bool = False) -> T:
        """Return the function's result, or raise its exception.

        Args:
            when_idle: call it once no other call was made for `IDLE_S` seconds. A running call is not interrupted.

        Raises:
            RuntimeError: the thread is closed.
        """
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        if when_idle:
            self._low_priority.append((future, function))
            wake_up: Future[Any] = Future()  # a call that is skipped; without it the thread waits for an ordinary call
            wake_up.cancel()
            self._calls.put((wake_up, lambda: None))
        else:
            self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    async def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the calls already made.

        Raises:
            DeadlineError: they did not finish in time; the thread ends with the process.
        """
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        ended, running = asyncio.shield(asyncio.wrap_future(self._ended)), f"the call running on thread {self._name}"
        await with_deadline(ended, timeout_s=timeout_s, awaited="computations to end", look_at=running)
        self._thread.join(timeout_s)  # the thread only has to return

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            _run(*call)
            del call  # an idle thread must not keep the last call's tensors alive
        for future, _ in self._low_priority:
            future.cancel()
        self._ended.set_result(None)

    def _next(self) -> Call | None:
        try:
            return self._calls.get(timeout=IDLE_S if self._low_priority else None)
        except queue.Empty:
            return self._low_priority.popleft()


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # asyncio cannot pass it to the awaiting task
        future.set_exception(RuntimeError(f"the computation raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - raised in the caller; the thread must survive
        future.set_exception(error)
    else:
        future.set_result(result)


def choose_device(config: TrainerConfig) -> torch.device:
    """Raises UserError: a GPU is configured and torch finds none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            "torch finds no GPU",
            where="trainer.device",
            hint='set it to "auto" or "cpu", or see `tidemill doctor`',
        )
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")


def choose_precision(config: TrainerConfig, device: torch.device) -> torch.dtype | None:
    """The dtype that forward and backward passes are autocast to; None computes in the weights' own fp32."""
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else None


_PROBE_ROUNDS = 5


def set_threads(config: TrainerConfig, device: torch.device) -> int:
    """Set how many threads one CPU operation uses in this process; returns their number.

    Two threads nearly double the speed of an idle machine, but are many times slower than one where another process
    competes. Unless the number is configured, it is therefore measured.
    """
    if config.threads:
        threads = config.threads
    elif device.type == "cuda":
        threads = 1
    else:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = min((1, available), key=_slowest_round_s) if available > 1 else 1
    torch.set_num_threads(threads)
    return threads


def _slowest_round_s(threads: int) -> float:
    """Slowest of a few rounds of matrix products with the shapes of a small model's layers, in seconds."""
    torch.set_num_threads(threads)
    x, weight = torch.ones(128, 576), torch.ones(1536, 576)
    slowest_s = 0.0
    for _ in range(_PROBE_ROUNDS):
        start_s = time.perf_counter()
        for _ in range(20):
            torch.nn.functional.linear(x, weight)
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
    return slowest_s


RARELY = (50_000, 50, 100)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Run Python's garbage collector rarely, in a process that schedules but computes nothing.

    Such a process keeps very many samples and creates hardly any cycles; with the default thresholds scanning them
    takes a tenth of its time (`benchmarks/controller_scale.py`). Not for a process that holds models: engines and
    simulated workers leave large objects in cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def release_memory() -> None:
    """Free models in reference cycles, and return their memory to the operating system.

    The C library keeps freed tensors below 32 MB for later use, but fragmented: a stage of a pipeline then needs
    gigabytes more than in a process of its own.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
