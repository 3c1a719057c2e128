"""Which sample a flattened token belongs to, and reductions over each sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """T tokens of S samples, in any order."""

    index_T: Tensor  # int64 [T], the sample of each token
    count: int  # S; a sample without tokens is one all the same

    def sum(self, values_T: Tensor) -> Tensor:
        """float [S], 0 for a sample without tokens. Gradients pass."""
        return values_T.new_zeros(self.count).index_add(0, self.index_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """float [S], 0 for a sample without tokens. Gradients pass."""
        return self.sum(values_T) / self.sum(torch.ones_like(values_T)).clamp(min=1.0)

    def spread(self, values_S: Tensor) -> Tensor:
        """[T], each token with its sample's value."""
        return values_S[self.index_T]
