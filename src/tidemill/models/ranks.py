"""Ranks: the processes that hold the shards of one model, and the rows of a parameter that each of them holds."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """The group of a sharded trainer. All ranks make the same calls in the same order; results are equal on all."""

    @property
    def size(self) -> int: ...
    @property
    def index(self) -> int: ...

    def all_sum(self, values: Tensor) -> Tensor:
        """Sum of a tensor over the ranks, with the same bits on all."""

    def gather(self, value: bytes) -> list[bytes]:
        """The value of every rank, in their order."""

    def barrier(self) -> None:
        """Return when every rank has called."""


class OneRank:
    """A trainer in one process; implements `Ranks`."""

    size, index = 1, 0

    def all_sum(self, values: Tensor) -> Tensor:
        return values

    def gather(self, value: bytes) -> list[bytes]:
        return [value]

    def barrier(self) -> None:
        pass


ONE_RANK = OneRank()


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(the rows of a tensor in this process, number of the first): all rows unless it is sharded.

    A shard is that of `torch.chunk`; later ranks may hold no rows.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, 0
    rows = -(-tensor.shape[0] // mesh.size())
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local, min(mesh.get_local_rank() * rows, tensor.shape[0])


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor; every rank calls this."""
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return result.detach()


def is_sharded(tensor: Tensor) -> bool:
    return getattr(tensor, "device_mesh", None) is not None


def filled(tensor: Tensor, rows: Tensor, first: int) -> None:
    """Copy the rows `first`, `first + 1`, ... of a whole tensor to those of them that this process holds."""
    local, own = local_rows(tensor)
    start, end = max(first, own), min(first + len(rows), own + len(local))
    if start < end:
        with torch.no_grad():
            local[start - own : end - own].copy_(rows[start - first : end - first])
