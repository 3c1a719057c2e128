"""The mask that transformers defines for an attention layer, and the sliding window in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query positions, key positions) -> bool, broadcast: the form in which transformers defines a mask."""


class LibraryMask(NamedTuple):
    """A mask that is defined but not computed; Tidemill's attention gets it in place of a tensor."""

    function: MaskFunction
    size: int | None  # of the window or chunk
    device: torch.device

    def window(self) -> int | None:
        """How many positions a token attends to, its own included; None for every position up to its own.

        Raises:
            ValueError: the mask is of another kind (attention to later tokens, or in chunks).
        """
        queries, keys = self._positions()
        allowed = self.function(0, 0, queries, keys).expand(queries.shape)
        for window in {None, self.size}:
            causal = keys <= queries
            if torch.equal(allowed, causal if window is None else causal & (queries - keys < window)):
                return window
        if (allowed & (keys > queries)).any():
            raise ValueError("attends to later tokens")
        raise ValueError("has an attention mask that is neither causal nor a sliding window")

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of positions near multiples of the size, where the kinds of mask differ."""
        size = self.size or 8
        near = {edge + shift for edge in (0, size, 2 * size, 3 * size) for shift in range(-2, 3)} | {size // 2}
        positions = torch.tensor(sorted(p for p in near if p >= 0), device=self.device)
        pairs = torch.cartesian_prod(positions, positions)
        return pairs[:, 0], pairs[:, 1]
