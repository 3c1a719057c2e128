"""Critics: state values learned from returns, and the running scale of returns.

V of a token is the head's number at the node that predicts it: the state in which the token was chosen. Gradients
accumulate as sums with the microbatch's own token weights, so that one denominator normalises policy and critic alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.algos.returns import value_loss
from tidemill.config.algorithm import CriticConfig
from tidemill.config.learning import OptimizerConfig
from tidemill.models.reward_model import ScalarHead, load_head, save_head
from tidemill.trainer.checkpoint import (
    head_state_bytes,
    restore_head_state,
    restore_state,
    save_head_state,
    save_state,
    state_bytes,
)
from tidemill.trainer.packing import Microbatch
from tidemill.trainer.scoring import Predictions, predicting_states
from tidemill.trainer.update import build_optimizer, clip_and_step

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


T = TypeVar("T")

Deferred: TypeAlias = Callable[[], T]
"""Waits for a result that was asked for, and returns it; raises what went wrong on the way."""


def resolved(value: T) -> Deferred[T]:
    """A result that is there already."""
    return lambda: value


class Weighed(Predictions, Protocol):
    """T trained tokens, as far as a critic with a model of its own must know them."""

    @property
    def weights(self) -> Tensor: ...  # float32 [T]


class Critic(Protocol):
    """What a policy trainer asks of a critic. All tensors are float32 [T], in the microbatch's own order.

    What it was asked for it does in that order; where it does so in another process, the trainer goes on meanwhile.
    """

    @property
    def elsewhere(self) -> bool:
        """Whether it computes in another process: values are then best asked for as soon as a group is complete."""

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        """V of the state in which each token was chosen; no gradient."""

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        """Add the summed gradient of the value loss; `values_T` are those of the start of the update.

        To be called between the policy's forward and backward pass, with the hidden states of the former in
        `microbatch.states`: a critic that shares them adds its gradient to theirs.
        """

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        """One optimizer step; promises its metrics, once everything that it learned from has been learned."""

    def state_bytes(self) -> int:
        """About what `write_state` will write."""

    def write_state(self, directory: Path) -> None:
        """Everything it goes on from, into an empty directory."""

    def read_state(self, directory: Path) -> None:
        """Go on from what `write_state` wrote."""


@dataclass(slots=True)
class ValueSums:
    """Figures between two optimizer steps."""

    tokens: int = 0
    loss: float = 0.0  # weighted as its gradient
    clipped: float = 0.0
    returns: float = 0.0
    squares: float = 0.0
    errors: float = 0.0  # of the return minus the value at the start of the update
    error_squares: float = 0.0

    def add(self, returns_T: Tensor, values_T: Tensor, loss: Tensor, clipped_T: Tensor) -> None:
        returns, errors = returns_T.double(), (returns_T - values_T).double()
        sums = (returns, returns.square(), errors, errors.square(), clipped_T.double())
        figures = torch.stack([each.sum() for each in sums] + [loss.detach().double()]).tolist()
        self.tokens += returns.numel()
        self.returns += figures[0]
        self.squares += figures[1]
        self.errors += figures[2]
        self.error_squares += figures[3]
        self.clipped += figures[4]
        self.loss += figures[5]

    def metrics(self, denominator: float) -> dict[str, float]:
        """Of no tokens there are none. The explained variance is 1 - Var(R - V) / Var(R); none of constant returns."""
        if not self.tokens:
            return {}
        n = self.tokens
        variance = max(self.squares / n - (self.returns / n) ** 2, 0.0)
        unexplained = max(self.error_squares / n - (self.errors / n) ** 2, 0.0)
        values = {
            "value_loss": self.loss / denominator,
            "value_clip_fraction": self.clipped / n,
            "returns_mean": self.returns / n,
        }
        return values | ({"explained_variance": 1.0 - unexplained / variance} if variance > 0 else {})


class _HeadCritic:
    """What both kinds share: a head, its optimizer and the scale of its numbers."""

    elsewhere = False

    def __init__(self, head: ScalarHead, trained: nn.Module, config: CriticConfig, *, value_clip: float) -> None:
        self.head, self.config = head, config
        self.optimizer = build_optimizer(trained, OptimizerConfig(learning_rate=config.learning_rate))
        self.optimizer_steps = 0
        self._value_clip = value_clip
        self._scale = ReturnScale()
        self._sums = ValueSums()

    def _values(self, states: Tensor, microbatch: Predictions) -> Tensor:
        values_H: Tensor = self._scale.mean + self._scale.std * self.head(states)
        return values_H[microbatch.head_rows]

    def _loss(self, states: Tensor, microbatch: Weighed, returns_T: Tensor, values_T: Tensor) -> Tensor:
        """The weighted sum, on the scale of the head's numbers."""
        mean, std = self._scale.mean, self._scale.std
        now_T = self.head(states)[microbatch.head_rows]
        parts = value_loss(now_T, (returns_T - mean) / std, (values_T - mean) / std, clip=self._value_clip)
        loss = (microbatch.weights * parts.loss_T).sum()
        self._sums.add(returns_T, values_T, loss, parts.clipped_T)
        return loss

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        sums, self._sums = self._sums, ValueSums()
        norm = clip_and_step(self.optimizer, scale=1.0 / denominator, max_grad_norm=self.config.max_grad_norm)
        self.optimizer_steps += 1
        if self.config.normalize and sums.tokens:
            self._scale.move(self.head, mean=sums.returns / sums.tokens, mean_square=sums.squares / sums.tokens)
        return resolved(sums.metrics(denominator) | {"value_grad_norm": norm})

    def _counters(self) -> dict[str, Any]:
        return {"optimizer_steps": self.optimizer_steps, "scale": self._scale.state()}

    def _restore_counters(self, counters: dict[str, Any]) -> None:
        self.optimizer_steps = int(counters["optimizer_steps"])
        self._scale.restore(counters["scale"])

    def _save_head(self, directory: Path) -> None:
        save_head(directory, self.head, kind="value_model", pooling="every_token", vocabulary_digest="")

    def _load_head(self, directory: Path) -> None:
        stored, _ = load_head(directory, "value_model", device=self.head.weight.device)
        self.head.load_state_dict(stored.state_dict())


class ModelCritic(_HeadCritic):
    """A network of its own; implements `Critic`.

    Args:
        model: trained in place, with packed attention.
        source: the folder it came from; its tokenizer goes into checkpoints.
        value_clip: how far a value may move in one update, in units of the return (of its deviation, where returns are
            normalised); 0 for any distance.
        autocast: dtype of the forward and backward passes; None computes in the weights' own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: ScalarHead,
        config: CriticConfig,
        *,
        source: Path,
        value_clip: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(head, nn.ModuleList([model, head]), config, value_clip=value_clip)
        self.model = model
        self._source, self._autocast = source, autocast

    @torch.no_grad()
    def values(self, microbatch: Predictions) -> Deferred[Tensor]:
        return resolved(self._values(self._states(microbatch), microbatch))

    def learn(self, microbatch: Weighed, returns_T: Tensor, values_T: Tensor) -> None:
        self._loss(self._states(microbatch), microbatch, returns_T, values_T).backward()

    def _states(self, microbatch: Predictions) -> Tensor:
        with torch.autocast(microbatch.targets.device.type, self._autocast, enabled=self._autocast is not None):
            return predicting_states(self.model, microbatch)

    def state_bytes(self) -> int:
        return state_bytes(self.model, self.optimizer, source=self._source, head=self.head)

    def write_state(self, directory: Path) -> None:
        save_state(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            source=self._source,
            counters=self._counters(),
            head=self.head,
        )
        self._save_head(directory)

    def read_state(self, directory: Path) -> None:
        counters = restore_state(directory, model=self.model, optimizer=self.optimizer, head=self.head)
        self._load_head(directory)
        self._restore_counters(counters)


class TrunkCritic(_HeadCritic):
    """A value head on the policy's own hidden states; implements `Critic`.

    Where `microbatch.states` holds the policy's states with their graph, nothing is computed twice: the value loss is
    differentiated down to them, and that gradient is added to whatever the policy's own backward pass brings there.
    States without a graph train the head alone (a critic's warm-up). Without any, the trunk is run for the critic.

    Args:
        model: the policy's; its optimizer is the policy trainer's and sees this critic's gradient, scaled.
        value_coefficient: of the value loss in what the trunk learns; the head itself learns at full strength.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: ScalarHead,
        config: CriticConfig,
        *,
        value_coefficient: float,
        value_clip: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(head, head, config, value_clip=value_clip)
        self.model = model
        self._coefficient, self._autocast = value_coefficient, autocast

    @torch.no_grad()
    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        return resolved(self._values(self._states(microbatch), microbatch))

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        states = self._states(microbatch)
        cut = states.detach().requires_grad_()
        self._loss(cut, microbatch, returns_T, values_T).backward()
        if not states.requires_grad or cut.grad is None:
            return
        extra = self._coefficient * cut.grad
        if microbatch.states is None:
            states.backward(extra)
        else:
            states.register_hook(lambda gradient: gradient + extra)

    def _states(self, microbatch: Microbatch) -> Tensor:
        if microbatch.states is not None:
            return microbatch.states
        with torch.autocast(microbatch.targets.device.type, self._autocast, enabled=self._autocast is not None):
            return predicting_states(self.model, microbatch)

    def state_bytes(self) -> int:
        return head_state_bytes(self.head, self.optimizer)

    def write_state(self, directory: Path) -> None:
        save_head_state(directory, head=self.head, optimizer=self.optimizer, counters=self._counters())
        self._save_head(directory)

    def read_state(self, directory: Path) -> None:
        counters = restore_head_state(directory, head=self.head, optimizer=self.optimizer)
        self._load_head(directory)
        self._restore_counters(counters)
