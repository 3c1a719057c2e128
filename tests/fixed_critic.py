"""A critic whose values are a fixed function of the last token of the state and its position."""

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
    """Value of the state whose last token is at `position`."""
    return math.sin(0.7 * token_id) + 0.1 * position


class FixedCritic:
    """Implements `Critic`, and records the (return, value, weight) of every token it was to learn.

    Args:
        remote: reported to the trainer; `calls` then also records requests, and waits for their results with "!".
    """

    def __init__(self, *, remote: bool = False) -> None:
        self.remote = remote
        self.calls: list[str] = []
        self.learned: list[tuple[float, float, float]] = []
        self.denominators: list[float] = []
        self.with_graph: list[bool] = []  # whether the states of the policy had a graph
        self.restored = False

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        nodes = microbatch.head_nodes[microbatch.head_rows].numpy()
        ids, depths = microbatch.tree.token_ids[nodes].tolist(), microbatch.tree.depths[nodes].tolist()
        return self._answer("values", torch.tensor([fixed_value(*state) for state in zip(ids, depths, strict=True)]))

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        columns = (returns_T.tolist(), values_T.tolist(), microbatch.weights.tolist())
        self.learned += list(zip(*columns, strict=True))
        self.with_graph.append(microbatch.states is not None and microbatch.states.requires_grad)
        self.calls.append("learn")

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        self.denominators.append(denominator)
        return self._answer("step", {"value_loss": float(len(self.denominators))})

    def _answer(self, call: str, result: T) -> Deferred[T]:
        if not self.remote:
            return resolved(result)
        self.calls.append(call)

        def wait() -> T:
            self.calls.append(f"{call}!")
            return result

        return wait

    def state_bytes(self) -> int:
        return 100

    def write_state(self, directory: Path) -> None:
        (directory / "critic.txt").write_text("fixed")

    def read_state(self, directory: Path) -> None:
        self.restored = (directory / "critic.txt").read_text() == "fixed"
