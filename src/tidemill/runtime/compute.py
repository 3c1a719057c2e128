"""Device, precision, threads, and the thread for numerical work."""

from __future__ import annotations

import asyncio
import gc
import math
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
from tidemill.config.schema import RunSpec
from tidemill.core.errors import DeadlineError, UserError
from tidemill.core.formatting import counted

T = TypeVar("T")
Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]

QUIET_S = 0.005
"""Without a call for so long, what is left over may be used: whoever computes in a loop asks again sooner."""


class ComputeThread:
    """Implements `core.protocols.Compute` with one daemon thread: calls run one at a time in the order asked for.

    A cancelled call that has not started is skipped; one that runs is not interrupted (nothing can stop a matrix
    product half-way): it goes on to its end, its result is dropped, and the next call waits for it.
    """

    def __init__(self, name: str = "tidemill-compute") -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._put_off: deque[Call] = deque()  # until nothing else is to be computed
        self._ended: Future[None] = Future()
        self._closed = False
        self._name = name
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or the exception it raised.

        Raises:
            RuntimeError: the thread was closed.
        """
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    @property
    def leftover(self) -> LowPriorityExecutor:
        """What is left of this thread when nobody else computes on it."""
        return LowPriorityExecutor(self)

    async def put_off(self, function: Callable[[], T]) -> T:
        """As `run`, once nothing else was asked for during `QUIET_S` seconds."""
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        self._put_off.append((future, function))
        self._calls.put(_nothing())  # else the thread would go on waiting for an ordinary call
        return await asyncio.wrap_future(future)

    async def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the calls already asked for.

        Raises:
            DeadlineError: they did not end in time; the thread dies with the process.
        """
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ended)), timeout_s)
        except TimeoutError as error:
            where = f"the call running on thread {self._name}"
            raise DeadlineError("computations to end", waited_s=timeout_s, look_at=where) from error
        self._thread.join(timeout_s)  # it has nothing left to do but return

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            _run(*call)
            del call  # an idle thread must not keep the last call's tensors alive
        for future, _ in self._put_off:
            future.cancel()
        self._ended.set_result(None)

    def _next(self) -> Call | None:
        try:
            return self._calls.get(timeout=QUIET_S if self._put_off else None)
        except queue.Empty:
            return self._put_off.popleft()


class LowPriorityExecutor:
    """Implements `core.protocols.Compute`: calls wait until a thread has nothing else to do. One that runs is not
    interrupted, so that what comes meanwhile waits for its end."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.put_off(function)


def _nothing() -> Call:
    future: Future[Any] = Future()
    future.cancel()
    return future, lambda: None


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # asyncio cannot carry it to the awaiting task
        future.set_exception(RuntimeError(f"the computation raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller, and the thread must live on
        future.set_exception(error)
    else:
        future.set_result(result)


_PROBE_ROUNDS = 5


def choose_device(config: TrainerConfig) -> torch.device:
    """
    Raises:
        UserError: a GPU was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            "no GPU that torch can use",
            where="trainer.device",
            hint='set it to "auto" or "cpu", or see `tidemill doctor`',
        )
    return torch.device("cuda" if config.device != "cpu" and available else "cpu")


def check_devices(spec: RunSpec) -> None:
    """A run on this machine finds the GPUs that it asks for; on a cluster that is already there its processes look.

    Raises:
        UserError: there are fewer.
    """
    if spec.runtime == "inprocess":
        choose_device(spec.trainer)
    elif not spec.ray.address:
        from tidemill.runtime.cluster.connection import local_nodes

        asked, present = sum(math.ceil(node.gpus) for node in local_nodes(spec)), torch.cuda.device_count()
        if asked > present:
            raise UserError(
                f"{counted(asked, 'GPU')} {'is' if asked == 1 else 'are'} reserved, and this machine has {present}",
                where=", ".join(key for key, gpus in _reserved(spec) if gpus),
                hint="set it to 0 to compute on the CPU, or see `tidemill doctor`",
            )


def require_reserved_gpus(gpus: float, key: str) -> None:
    """For a process of a cluster.

    Raises:
        UserError: it has GPUs, and would compute on the CPU.
    """
    if gpus and not torch.cuda.is_available():
        raise UserError(
            "a GPU is reserved for a process in which torch can use no GPU",
            where=key,
            hint="install a CUDA build of torch on that node, or set it to 0 to compute on the CPU",
        )


def _reserved(spec: RunSpec) -> Iterator[tuple[str, float]]:
    yield "ray.trainer_gpus", spec.ray.trainer_gpus
    yield "ray.worker_gpus", spec.ray.worker_gpus
    yield "placement.actor_gpus", spec.placement.actor_gpus


def choose_precision(config: TrainerConfig, device: torch.device) -> torch.dtype | None:
    """The dtype that forward and backward passes are autocast to; None computes in the weights' own fp32."""
    bf16 = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else None


def set_threads(config: TrainerConfig, device: torch.device) -> int:
    """Choose the threads of one CPU operation, and use them in this process; returns their number.

    Two threads nearly double the speed of an idle machine and are many times slower than one where another process
    competes, so the choice is measured unless it was made.
    """
    if config.threads:
        threads = config.threads
    elif device.type == "cuda":
        threads = 1
    else:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = min((1, available), key=_seconds_with) if available > 1 else 1
    torch.set_num_threads(threads)
    return threads


def _seconds_with(threads: int) -> float:
    """Slowest of a few rounds of small matrix products, as a model's layers are."""
    torch.set_num_threads(threads)
    x, weight = torch.ones(128, 576), torch.ones(1536, 576)
    return max(_timed(lambda: [torch.nn.functional.linear(x, weight) for _ in range(20)]) for _ in range(_PROBE_ROUNDS))


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


RARELY = (50_000, 50, 100)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """For a process that schedules and computes nothing: it keeps very many samples and makes hardly any cycles, and
    with Python's own thresholds looking through them all takes a tenth of its time (`benchmarks/controller_scale.py`).

    Not for one that holds models: what engines and simulated workers leave behind lies in cycles, and is large.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
