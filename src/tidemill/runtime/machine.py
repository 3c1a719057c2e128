"""What to compute on: device, precision and threads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

import torch

from tidemill.config.learning import TrainerConfig
from tidemill.config.schema import RunSpec
from tidemill.config.words import counted
from tidemill.core.errors import UserError

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
            cure='set it to "auto" or "cpu", or see `tidemill doctor`',
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
        from tidemill.runtime.cluster.local import local_nodes

        asked, present = sum(math.ceil(node.gpus) for node in local_nodes(spec)), torch.cuda.device_count()
        if asked > present:
            raise UserError(
                f"{counted(asked, 'GPU')} {'is' if asked == 1 else 'are'} reserved, and this machine has {present}",
                where=", ".join(key for key, gpus in _reserved(spec) if gpus),
                cure="set it to 0 to compute on the CPU, or see `tidemill doctor`",
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
            cure="install a CUDA build of torch on that node, or set it to 0 to compute on the CPU",
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
