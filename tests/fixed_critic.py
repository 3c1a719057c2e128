"""A critic that is not trained: its values are a function of a state's last token and position."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tidemill.trainer.critic import Deferred, resolved
from tidemill.trainer.packing import Microbatch

T = TypeVar("T")


def fixed_value(token_id: int, position: int) -> float:
    """V of the state whose last token is at `position`."""
    return math.sin(0.7 * token_id) + 0.1 * position


class FixedCritic:
    """Implements `Critic` and records its training targets: (return, value, weight) of every token.

    Args:
        elsewhere: pretends to run in another process, and logs requests and waits in `story`.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        self.story: list[str] = []
        self.learned: list[tuple[float, float, float]] = []
        self.denominators: list[float] = []
        self.with_graph: list[bool] = []  # whether the policy's states could carry a gradient
        self.restored = False

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        nodes = microbatch.head_nodes[microbatch.head_rows].numpy()
        ids, depths = microbatch.tree.token_ids[nodes].tolist(), microbatch.tree.depths[nodes].tolist()
        return self._told("values", torch.tensor([fixed_value(*state) for state in zip(ids, depths, strict=True)]))

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        columns = (returns_T.tolist(), values_T.tolist(), microbatch.weights.tolist())
        self.learned += list(zip(*columns, strict=True))
        self.with_graph.append(microbatch.states is not None and microbatch.states.requires_grad)
        self.story.append("learn")

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        self.denominators.append(denominator)
        return self._told("step", {"value_loss": float(len(self.denominators))})

    def _told(self, what: str, answer: T) -> Deferred[T]:
        if not self.elsewhere:
            return resolved(answer)
        self.story.append(what)

        def promise() -> T:
            self.story.append(f"{what}!")
            return answer

        return promise

    def state_bytes(self) -> int:
        return 100

    def write_state(self, directory: Path) -> None:
        (directory / "critic.txt").write_text("fixed")

    def read_state(self, directory: Path) -> None:
        self.restored = (directory / "critic.txt").read_text() == "fixed"
