"""The KV cache of the embedded engine: a row for each slot, and rows for samples between two turns."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from tidemill.core.records import SampleId
from tidemill.hardware.engine_profile import parking_rows
from tidemill.models.token_tree import Tokens
from tidemill.rollout.sequence import Sequence

GROWTH_TOKENS = 32
"""A growing cache gets room for a multiple of these, and for at least an eighth more tokens."""


class SlotCache:
    """Keys and values of `rows` rows with up to `context` tokens each.

    Keys [rows, kv_heads, capacity, head_dim] and values [rows, kv_heads, capacity, value_dim] of a layer are allocated
    at its first write. On a CPU the capacity grows with the longest row: the rows that are read in a step are then
    close together in memory, which a CPU reads two to three times as fast as rows with gaps between them. On another
    device it is the whole context from the start: blocks that grow leave memory there that no later block fits into,
    five times the final size on an H200. A row remains usable as a shared prefix after its sample has finished, until
    the row is reused.

    Args:
        fixed: the whole context from the start on a CPU, too.
    """

    def __init__(self, *, rows: int, context: int, device: torch.device, fixed: bool = False) -> None:
        self.rows, self.context = rows, context
        self._grows = device.type == "cpu" and not fixed
        self.capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._tokens = np.full((rows, context), -1, np.int32)
        self._resident = np.zeros(rows, np.int64)  # per row, tokens whose keys and values can be shared

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; `key` and `value` [1, kv_heads, N, *] give shape, dtype and device."""
        while len(self._keys) <= index:
            self._keys.append(self._zeros(key))
            self._values.append(self._zeros(value))
        return self._keys[index], self._values[index]

    def _zeros(self, like: Tensor, *, after: int = 0) -> Tensor:
        """Memory of a layer, whose positions from `after` on are zero: of NaN, even weight 0 would make NaN."""
        memory = like.new_empty((self.rows, like.shape[1], self.capacity, like.shape[3]))
        memory[:, :, after:] = 0
        return memory

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in each row."""
        if length <= self.capacity:
            return
        before = self.capacity
        wanted = max(length, before + before // 8) if self._grows else self.context
        self.capacity = max(length, min(-(-wanted // GROWTH_TOKENS) * GROWTH_TOKENS, self.context))
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = self._zeros(tensor, after=before)
                tensors[layer][:, :, :before] = tensor

    def keep(self, row: int, tokens: Tokens) -> None:
        """Declare that `row` contains keys and values of `tokens`."""
        self._tokens[row, : len(tokens)] = tokens
        self._resident[row] = len(tokens)

    def forget(self) -> None:
        """Invalidate all rows, after a change of the weights. Memory that grows is freed."""
        self._resident[:] = 0
        if not self._grows:
            return
        self.capacity = 0
        self._keys, self._values = [], []

    def forget_prefixes(self) -> None:
        """Share no row until its tokens are declared again; their keys and values stay."""
        self._resident[:] = 0

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """(row, length) of the longest cached prefix of `tokens`; length 0 if there is none."""
        if not len(tokens) or not self._resident.any():
            return 0, 0
        equal = self._tokens[:, : len(tokens)] == tokens
        lengths = np.minimum(np.where(equal.all(1), len(tokens), equal.argmin(1)), self._resident)
        row = int(lengths.argmax())
        return row, int(lengths[row])

    def add_rows(self, count: int) -> range:
        """Append rows; returns their numbers."""
        first, self.rows = self.rows, self.rows + count
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = torch.cat([tensor, tensor.new_zeros((count, *tensor.shape[1:]))])
        self._tokens = np.concatenate([self._tokens, np.full((count, self.context), -1, np.int32)])
        self._resident = np.concatenate([self._resident, np.zeros(count, np.int64)])
        return range(first, self.rows)

    @property
    def row_bytes(self) -> int:
        """Of a row of `context` tokens."""
        return sum(tensor[0, :, 0].nbytes for tensor in (*self._keys, *self._values)) * self.context

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values of a row to another row."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self._tokens[target] = self._tokens[source]
        self._resident[target] = min(int(self._resident[source]), length)


class Parking:
    """Rows of samples whose turn ended, which are read when the next turn starts; the oldest are overwritten.

    They are allocated at the end of the first turn.
    """

    def __init__(self, cache: SlotCache, *, slots: int) -> None:
        self._cache, self._slots = cache, slots
        self._free: list[int] = []
        self._parked: OrderedDict[SampleId, tuple[int, Sequence]] = OrderedDict()

    def park(self, row: int, sequence: Sequence, *, shared: int) -> None:
        """Copy the row of an ended sample if another turn may follow, which must not read keys of older weights.

        Args:
            shared: number of its tokens that other samples may read.
        """
        if sequence.finish == "aborted" or not sequence.request.resumes or sequence.has_old_keys:
            return
        if not self._free and not self._parked:
            self._free = list(self._cache.add_rows(parking_rows(self._slots, self._cache.row_bytes)))
        target = self._free.pop() if self._free else self._parked.popitem(last=False)[1][0]
        self._cache.copy(row, target, sequence.computed)
        self._cache.keep(target, sequence.tokens[:shared])
        self._parked[sequence.request.sample_id] = target, sequence

    def take(self, sequence: Sequence) -> tuple[int, Sequence] | None:
        """The row of the sample's previous turn, and this turn; the row may be read until the next `park`."""
        if (found := self._parked.pop(sequence.request.sample_id, None)) is not None:
            self._free.append(found[0])
        return found

    def forget(self) -> None:
        """Discard all rows, after a change of the weights."""
        self._free += [row for row, _ in self._parked.values()]
        self._parked.clear()
