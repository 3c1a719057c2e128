"""Shards a model over ranks with FSDP2, and the ranks of a process group.

Every rank holds a range of rows of each parameter, and its gradient and moments. Layers are gathered one at a time for
the forward and the backward pass; gradients are summed, not averaged: they are sums over samples.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.auto import allocate
from tidemill.models.loading import read_rows
from tidemill.models.ranks import Ranks
from tidemill.models.tree_forward import TreeForward
from tidemill.models.weight_stream import stay_on_this_machine


class GroupRanks:
    """The ranks of the process group that this process has joined; implements `Ranks`."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.index = distributed.get_world_size(), distributed.get_rank()
        self._device = device

    def all_sum(self, values: Tensor) -> Tensor:
        own = values.to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own)
        # All ranks add the same parts with the same kernel: the same bits everywhere.
        return torch.stack(parts).sum(0).to(values.device)

    def gather(self, value: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        lengths[self.index] = len(value)
        distributed.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
        padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else padded[:0]
        parts = [torch.empty_like(padded, device=self._device) for _ in range(self.size)]
        distributed.all_gather(parts, padded.to(self._device))
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths.tolist(), strict=True)]

    def barrier(self) -> None:
        self.all_sum(torch.zeros(1, device=self._device))


def join_ranks(
    meeting: Path, *, size: int, index: int, device: torch.device, timeout_s: float, one_machine: bool
) -> GroupRanks:
    """Join the group of `size` ranks that meet at a file.

    Args:
        meeting: a new path in a folder that all ranks see.
        device: of the computation; what is offloaded is gathered on the CPU.
        timeout_s: of every operation of the group, including this.
        one_machine: whether all ranks are on this machine; they then listen on the loopback interface only. Otherwise
            anyone on their network can connect: neither gloo nor NCCL authenticates.

    Raises:
        UserError: the ranks do not meet.
    """
    if not meeting.parent.is_dir():
        raise _not_met(meeting, "there is no such folder on this machine")
    if one_machine:
        stay_on_this_machine()
    try:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(meeting), size),
            rank=index,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise _not_met(meeting, str(error).split("\n", 1)[0]) from error
    return GroupRanks(device)


def _not_met(meeting: Path, why: str) -> UserError:
    return UserError(
        f"the trainer's shards do not find each other through {meeting}: {why}",
        where="run.dir",
        hint="choose a folder that all nodes with shards share, and check that they can connect to each other",
    )


_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20


def shard(forward: TreeForward, ranks: Ranks, *, offload: bool = False) -> None:
    """Keep only this rank's rows of every parameter of `forward`, in place; does nothing with one rank.

    Args:
        offload: keep parameters, gradients and moments in host memory, and run the optimizer there.
    """
    if ranks.size == 1:
        return
    device = forward.device
    if device.type == "cpu" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # glibc then returns large blocks to the operating system when they are freed. Layers are gathered and freed in
        # turn; kept for later use, their memory would add up to that of the whole model.
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    mesh = init_device_mesh(device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=forward.autocast, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    placement = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in (*layers_of(forward.model), forward):
        # The root, too, is resharded after every forward pass: without it, a pass without gradient would leave
        # whole parameters behind.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=placement)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def load_shards(forward: TreeForward, folder: Path, ranks: Ranks, *, offload: bool = False) -> None:
    """Shard a model of `models.loading.unloaded_model`, and read this rank's rows of a folder's weights.

    Raises:
        UserError: the weights cannot be used, as `load_model` says; raised on all ranks.
    """
    shard(forward, ranks, offload=offload)
    allocate(forward, torch.device("cpu") if offload else forward.device)
    read_rows(forward.model, folder, ranks)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a model, which are gathered as wholes."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
