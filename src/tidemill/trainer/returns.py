"""The running scale of returns, so that a critic learns numbers of the size of 1 whatever the reward's unit is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tidemill.models.heads import ScalarHead

LEAST_STD = 1e-2
DECAY = 0.99  # what one optimizer step keeps of the running figures


@dataclass(slots=True, kw_only=True)
class ReturnScale:
    """A head's number x stands for the value `mean + std · x`. It starts as the number itself.

    Moving the scale rescales the head so that every value stays what it was (PopArt, arXiv 1602.07714).
    """

    decay: float = DECAY
    mean: float = 0.0
    std: float = 1.0
    first: float = 0.0  # decayed sums: of returns, of their squares, and of the weights of both
    second: float = 0.0
    weight: float = 0.0

    @torch.no_grad()
    def move(self, head: ScalarHead, *, mean: float, mean_square: float) -> None:
        """Take in one step's returns (their mean and mean square), and keep the head's values."""
        keep = self.decay
        self.first = keep * self.first + (1 - keep) * mean
        self.second = keep * self.second + (1 - keep) * mean_square
        self.weight = keep * self.weight + (1 - keep)
        old_mean, old_std = self.mean, self.std
        self.mean = self.first / self.weight
        self.std = max(math.sqrt(max(self.second / self.weight - self.mean**2, 0.0)), LEAST_STD)
        head.weight.mul_(old_std / self.std)
        head.bias.mul_(old_std / self.std).add_((old_mean - self.mean) / self.std)

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        names = ("mean", "std", "first", "second", "weight")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
