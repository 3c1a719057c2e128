"""Copies tensors between a GPU and pageable host memory through two pinned buffers.

The driver copies pageable memory at a fraction of the speed of the bus. Here the processor copies to or from one buffer
while the GPU copies the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20  # of each; torch rounds pinned memory up to a power of two

Copy: TypeAlias = tuple[Tensor, Tensor]
"""(target, source) of equal shapes; the target is contiguous, and gets the source in its dtype."""


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@torch.no_grad()
def copy_tensors(copies: Sequence[Copy], device: torch.device) -> None:
    """Make copies between host memory and `device`, all in the same direction; returns when they are done."""
    host = (tensor for copy in copies for tensor in copy if tensor.device.type == "cpu")
    if device.type == "cuda" and not all(tensor.is_pinned() for tensor in host):
        with torch.cuda.device(device):
            buffers = (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
            slots = [Slot(buffer, torch.cuda.Event()) for buffer in buffers]
            copy_through(slots, copies, download=copies[0][1].device == device)
        return
    for target, source in copies:
        target.copy_(source, non_blocking=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Slot:
    """A pinned buffer, and the event after which the GPU no longer uses it."""

    buffer: Tensor  # uint8
    event: Event
    arriving: Copy | None = None  # from the buffer to host memory, after the event

    def finish(self) -> None:
        self.event.synchronize()
        if self.arriving is not None:
            target, staged = self.arriving
            target.copy_(staged)
            self.arriving = None


def copy_through(slots: Sequence[Slot], copies: Iterable[Copy], *, download: bool) -> None:
    """Make copies in parts, each through the buffer that was used the longest time ago.

    Args:
        download: from the GPU, which then converts dtypes; else the processor does.
    """
    for slot, (target, source) in zip(itertools.cycle(slots), _parts(copies, len(slots[0].buffer))):
        slot.finish()
        staged = slot.buffer[: target.nbytes].view(target.dtype)
        if download:
            staged.copy_(source.to(target.dtype), non_blocking=True)
            slot.arriving = target, staged
        else:
            staged.copy_(source)
            target.copy_(staged, non_blocking=True)
        slot.event.record()
    for slot in slots:
        slot.finish()


def _parts(copies: Iterable[Copy], nbytes: int) -> Iterator[Copy]:
    """Flat parts of at most `nbytes` of the target."""
    for target, source in copies:
        size = nbytes // target.itemsize
        yield from zip(target.view(-1).split(size), source.reshape(-1).split(size), strict=True)
