"""Keys and values of every slot, and which tokens they belong to.

A slot's contents stay usable as a shared prefix after its sample has finished, until the slot is taken again.
"""

from __future__ import annotations

import numpy as np
import torch

from tidemill.models.token_tree import Tokens


class SlotCache:
    """`rows` rows of `context` tokens each.

    A layer's keys [rows, kv_heads, context + 1, head_dim] and values [rows, kv_heads, context + 1, value_dim] are
    allocated when it is first written. Position `context` takes what nobody reads.
    """

    def __init__(self, *, rows: int, context: int) -> None:
        self.rows, self.context = rows, context
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._tokens = np.full((rows, context), -1, np.int32)
        self._resident = np.zeros(rows, np.int64)  # tokens of a row whose keys and values may be shared

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; `key` and `value` [1, kv_heads, N, *] give shape, dtype and device."""
        while len(self._keys) <= index:
            # zeros, not empty: a masked garbage value of NaN would still poison the sum it has weight 0 in
            self._keys.append(self._zeros(key))
            self._values.append(self._zeros(value))
        return self._keys[index], self._values[index]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.rows, like.shape[1], self.context + 1, like.shape[3]))

    def keep(self, row: int, tokens: Tokens) -> None:
        """Declare that `row` holds keys and values of `tokens`, for others to share."""
        self._tokens[row, : len(tokens)] = tokens
        self._resident[row] = len(tokens)

    def forget(self) -> None:
        """The weights changed: nothing resident may be shared any more."""
        self._resident[:] = 0

    def longest_prefix(self, tokens: Tokens) -> tuple[int, int]:
        """(row, length) of the longest resident prefix of `tokens`; length 0 when there is none."""
        if not len(tokens) or not self._resident.any():
            return 0, 0
        equal = self._tokens[:, : len(tokens)] == tokens
        lengths = np.minimum(np.where(equal.all(1), len(tokens), equal.argmin(1)), self._resident)
        row = int(lengths.argmax())
        return row, int(lengths[row])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` keys and values, and what is resident, to another row."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self._tokens[target] = self._tokens[source]
        self._resident[target] = min(int(self._resident[source]), length)
