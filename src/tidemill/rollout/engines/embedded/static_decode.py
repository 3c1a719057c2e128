"""One decoding step in static memory: it reads and advances tensors on the device, and never waits for the host.

Imports Triton, so only where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.kernels.decode import DecodeLayout, decode
from tidemill.kernels.draw import draw_tokens
from tidemill.models.attention import hidden_states, vocabulary_logits
from tidemill.rollout.engines.embedded.cache import SlotCache

_POWERS, _SIXTEENS, _THIRTY_TWOS = 16, 64, 32  # largest sizes that are powers of 2, and multiples of 16; others' step


class StepKernels(NamedTuple):
    """The kernels of a decoding step, with the signatures of `kernels.decode` and `kernels.draw`."""

    decode: Callable[..., Tensor] = decode
    draw_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = draw_tokens


def bucket(entries: int) -> int:
    """Entries that are computed for so many: a power of 2, from 16 on a multiple of 16, from 64 on of 32."""
    if entries <= _POWERS:
        return 1 << (entries - 1).bit_length()
    step = _POWERS if entries <= _SIXTEENS else _THIRTY_TWOS
    return -(-entries // step) * step


def buckets(slots: int) -> list[int]:
    """All buckets for up to `slots` entries, largest first."""
    return sorted({bucket(entries) for entries in range(1, slots + 1)}, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """B samples, or padding, whose next token a step computes; views of the memory of a `DecodeState`."""

    tokens: Tensor  # int64 [B], the newest; after a step the drawn ones
    logprobs: Tensor  # float32 [B], of the drawn ones
    positions: Tensor  # int64 [B], of the newest tokens
    seeds: Tensor  # int32 [B], as `kernels.draw` takes them
    temperatures: Tensor  # float32 [B]
    layout: DecodeLayout

    def advance(self, token_ids: Tensor, logprobs: Tensor) -> None:
        """Make drawn tokens the newest ones. Padding stays where it is."""
        self.tokens.copy_(token_ids)
        self.logprobs.copy_(logprobs)
        real = self.layout.lengths > 0
        self.positions.add_(real)
        self.layout.lengths.add_(real)


class HostEntries:
    """What is uploaded for B entries, all padding at first.

    Args:
        padding: (row, position) that padding writes its keys and values to; never read.
    """

    def __init__(self, size: int, padding: tuple[int, int]) -> None:
        self._long = np.zeros((5, size), np.int64)
        self._short = np.zeros((5, size), np.int32)
        self.temperatures = np.zeros(size, np.float32)
        self.tokens, self.sources, self.positions, self.rows, self.prefix_rows = self._long
        self.seeds, self.lengths, self.prefix_lengths, self.group_first, self.group_size = self._short
        self.sources[:] = -1  # or the entry of the last step that drew the newest token, which is on the device only
        self.rows[:], self.positions[:] = padding

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        return self._long, self._short, self.temperatures


class DecodeState:
    """Memory of up to `bucket(slots)` entries, at the same addresses for ever, as CUDA graphs require."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.size = size = bucket(slots)
        self._long = torch.zeros((4, size), dtype=torch.int64, device=device)
        self._short = torch.zeros((5, size), dtype=torch.int32, device=device)
        self._floats = torch.zeros((2, size), dtype=torch.float32, device=device)

    def entries(self, size: int) -> Entries:
        tokens, positions, rows, prefix_rows = self._long[:, :size]
        seeds, lengths, prefix_lengths, group_first, group_size = self._short[:, :size]
        temperatures, logprobs = self._floats[:, :size]
        layout = DecodeLayout(
            rows=rows,
            lengths=lengths,
            prefix_rows=prefix_rows,
            prefix_lengths=prefix_lengths,
            group_first=group_first,
            group_size=group_size,
        )
        return Entries(
            tokens=tokens, logprobs=logprobs, positions=positions, seeds=seeds, temperatures=temperatures, layout=layout
        )

    def upload(self, host: HostEntries) -> None:
        """Replace all entries."""
        size, device = len(host.rows), self._long.device
        long, short, temperatures = (to_device(array, device) for array in host.arrays)
        sources = long[1]
        tokens = torch.where(sources >= 0, self._long[0, sources.clamp(min=0)], long[0])
        self._long[0, :size] = tokens
        self._long[1:, :size] = long[2:]
        self._short[:, :size] = short
        self._floats[0, :size] = temperatures


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device; from a GPU's view without waiting."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class StaticPlan:
    """Each entry writes its keys and values into its row, then attends to its row and its prefix."""

    def __init__(self, cache: SlotCache, entries: Entries, kernels: StepKernels) -> None:
        self._cache, self._entries, self._decode = cache, entries, kernels.decode

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        layout, positions = self._entries.layout, self._entries.positions
        keys[layout.rows, :, positions] = key[0].transpose(0, 1)
        values[layout.rows, :, positions] = value[0].transpose(0, 1)
        out = self._decode(query[0].transpose(0, 1), keys, values, layout, scaling=scaling, window=window)
        return out.transpose(0, 1)[None]


def decode_logits(model: PreTrainedModel, cache: SlotCache, entries: Entries, kernels: StepKernels) -> Tensor:
    """Logits float32 [B, V] of the next tokens."""
    plan = StaticPlan(cache, entries, kernels)
    return vocabulary_logits(model, hidden_states(model, entries.tokens, entries.positions, plan))


def decode_step(model: PreTrainedModel, cache: SlotCache, entries: Entries, kernels: StepKernels) -> None:
    """Draw the next token of every entry, without top-k and top-p, and advance."""
    logits = decode_logits(model, cache, entries, kernels)
    entries.advance(*kernels.draw_tokens(logits, entries.seeds, entries.positions, entries.temperatures))
