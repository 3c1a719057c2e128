"""What one loop needs to know of whatever it fits: SFT, a reward model, DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from tidemill.models.heads import ScalarHead
from tidemill.models.token_tree import Tokens


class Example(Protocol):
    """A demonstration or a preference pair."""

    @property
    def id(self) -> str: ...


E = TypeVar("E", bound=Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What some examples cost: sums over them, so that microbatches add up."""

    loss: Tensor  # [], with gradient where enabled
    weight: float  # what sums are divided by: trained tokens, or pairs
    figures: dict[str, Tensor] = field(default_factory=dict)  # [] each, further sums by metric name
    tokens_trained: int
    tokens_packed: int  # computed in the forward pass
    tokens_unpacked: int  # what they would have been without sharing


class Objective(Generic[E]):
    """A loss over examples. `trained` is the model, and the head where there is one."""

    trained: nn.Module
    head: ScalarHead | None = None

    def sequences(self, example: E) -> Sequence[Tokens]:
        """The token sequences that the example's forward pass computes."""
        raise NotImplementedError

    def outcome(self, examples: Sequence[E]) -> Outcome:
        """Their loss and figures, in one token tree."""
        raise NotImplementedError

    def prepare(self, examples: Sequence[E]) -> None:
        """Measure what must be known of the initial model, before anything is learned or restored."""

    def write(self, directory: Path) -> None:
        """What belongs into the model's folder beside the model."""

    def read(self, directory: Path) -> None:
        """Take over what `write` wrote."""


@dataclass(slots=True)
class Totals:
    """Outcomes added up."""

    loss: float = 0.0
    weight: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    tokens_trained: int = 0
    tokens_packed: int = 0
    tokens_unpacked: int = 0

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        self.weight += outcome.weight
        for name, value in outcome.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + float(value)
        self.tokens_trained += outcome.tokens_trained
        self.tokens_packed += outcome.tokens_packed
        self.tokens_unpacked += outcome.tokens_unpacked

    def means(self) -> dict[str, float]:
        """The loss and every figure, per unit of weight; empty of nothing."""
        if not self.weight:
            return {}
        return {"loss": self.loss / self.weight} | {name: each / self.weight for name, each in self.figures.items()}
