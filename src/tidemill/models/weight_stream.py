"""The weights of a version one whole tensor at a time, within a process or through a process group.

An engine that is always there needs neither snapshots nor differences: it gets the tensors themselves. The memory that
this takes is that of one tensor. Preemptible workers are in no process group: one that vanishes would stop all others.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroupGloo
from transformers import PreTrainedModel

from tidemill.core.errors import UserError, WeightsError
from tidemill.core.records import TensorEntry
from tidemill.models.ranks import whole
from tidemill.models.snapshots import DTYPE_NAMES, DTYPES, Part, parameters_of
from tidemill.models.weights_digest import bit_sum

WeightStream: TypeAlias = Iterator[tuple[str, Tensor]]
"""Name and value of every parameter. A value is valid until the next one is asked for, and must not be written to."""


@torch.no_grad()
def streamed_weights(model: PreTrainedModel, dtype: torch.dtype, *, part: Part = "learned") -> WeightStream:
    """Every parameter, whole and rounded to `dtype`. Every rank of a sharded model calls this, and takes all."""
    for name, parameter in parameters_of(model, part).items():
        yield name, whole(parameter).to(dtype)


def stream_layout(model: PreTrainedModel, dtype: torch.dtype) -> tuple[TensorEntry, ...]:
    """Name, dtype and shape of what `streamed_weights` yields, in its order; without offsets and checksums."""
    return tuple(
        TensorEntry(
            name=name,
            dtype=DTYPE_NAMES[dtype],
            shape=tuple(parameter.shape),
            offset=0,
            nbytes=parameter.numel() * dtype.itemsize,
            checksum=0,
        )
        for name, parameter in parameters_of(model, "learned").items()
    )


def check_dtypes(layout: Sequence[TensorEntry], dtype: str) -> None:
    """Raises UserError: a tensor has another dtype than the weights of the engine that takes it."""
    for entry in layout:
        if entry.dtype != dtype:
            raise UserError(
                f"mixed dtypes: {entry.name} is sent as {entry.dtype}, and the engine has {dtype}",
                where="weights.lane",
                hint='use one dtype for all, or set weights.lane = "none"',
            )


def stay_on_this_machine() -> None:
    """Make process groups listen on the loopback interface only."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


class BroadcastGroup:
    """A process group of the trainer, which sends, and of engines that are always there.

    Neither gloo nor NCCL authenticates: anyone on the network of its members can connect.

    Args:
        meeting: a new path in a folder that all members see.
        index: 0 is the trainer.
        device: "cpu" takes gloo, a GPU NCCL.
        timeout_s: of joining, and of every tensor.

    Raises:
        UserError: the members do not meet.
    """

    def __init__(
        self, meeting: Path, *, size: int, index: int, device: torch.device, timeout_s: float, one_machine: bool
    ) -> None:
        if one_machine:
            stay_on_this_machine()
        self._device, self._timeout = device, timedelta(seconds=timeout_s)
        try:
            if not meeting.parent.is_dir():
                raise RuntimeError("there is no such folder on this machine")
            store = FileStore(str(meeting), size)
            store.set_timeout(self._timeout)
            self._group = _open_group(store, index, size, device, self._timeout)
            self._broadcast(torch.zeros(1, device=device))  # NCCL connects at the first operation
        except (RuntimeError, WeightsError) as error:
            why = str(error).split("\n", 1)[0]
            raise UserError(
                f"trainer and reserved engine do not find each other through {meeting}: {why}",
                where="weights.lane",
                hint='use a run.dir that both machines see, raise fleet.join_timeout_s, or set weights.lane = "none"',
            ) from error

    def send(self, stream: WeightStream) -> None:
        """Send all tensors, and then their checksums.

        Raises:
            WeightsError: a member is gone, or does not take a tensor in time.
        """
        sums: list[Tensor] = []
        for _, tensor in stream:
            sent = tensor.to(self._device).contiguous()
            self._broadcast(sent)
            sums.append(bit_sum([sent]))
        self._broadcast(torch.stack(sums))

    def receive(self, layout: Sequence[TensorEntry]) -> WeightStream:
        """The tensors of the next `send`. All must be taken; then their checksums are compared.

        Raises:
            WeightsError: the trainer is gone or late, or what arrived differs from what was sent.
        """
        sums: list[Tensor] = []
        for entry in layout:
            received = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
            self._broadcast(received)
            sums.append(bit_sum([received]))
            yield entry.name, received
        sent = torch.empty(len(layout), dtype=torch.int64, device=self._device)
        self._broadcast(sent)
        different = (torch.stack(sums) != sent).nonzero().view(-1).tolist()
        if different:
            raise WeightsError(f"{layout[different[0]].name} arrived with other bits than were sent")

    def _broadcast(self, tensor: Tensor) -> None:
        """Raises WeightsError."""
        try:
            self._group.broadcast(tensor, root=0).wait(self._timeout)
        except RuntimeError as error:
            raise WeightsError(f"weights were not broadcast: {str(error).splitlines()[0]}") from error


def _open_group(store: FileStore, index: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda":
        return ProcessGroupGloo(store, index, size, timeout)
    from torch.distributed import ProcessGroupNCCL  # missing in builds without CUDA

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, index, size, options)
