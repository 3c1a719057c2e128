"""Critics: value heads trained on returns, and the running scale of the returns.

The value of a token is the head's output at the node that predicts it, i.e. of the state in which the token was chosen.
Gradients accumulate as sums with the token weights of the microbatch, so policy and critic have the same denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from tidemill.algos.returns import value_loss
from tidemill.config.algorithm import CriticConfig
from tidemill.config.learning import OptimizerConfig
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.reward_model import ScalarHead, load_head, save_head
from tidemill.models.tree_forward import TreeForward, TreeOutput
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.packing import Microbatch
from tidemill.trainer.scoring import Predictions
from tidemill.trainer.update import build_optimizer, clip_and_step

STD_FLOOR = 1e-2
DECAY = 0.99  # of the running moments, per optimizer step


@dataclass(slots=True, kw_only=True)
class ReturnScale:
    """Running mean and deviation of returns: a head output x means the value `mean + std · x`.

    Updating the scale rescales the head so that its values do not change (PopArt, arXiv 1602.07714).
    """

    mean: float = 0.0
    std: float = 1.0
    first: float = 0.0  # decayed sums of returns, of squared returns, and of their weights
    second: float = 0.0
    weight: float = 0.0

    @torch.no_grad()
    def update(self, head: ScalarHead, *, mean: float, mean_square: float) -> None:
        """Add the mean and mean square of one step's returns, and rescale the head."""
        self.first = DECAY * self.first + (1 - DECAY) * mean
        self.second = DECAY * self.second + (1 - DECAY) * mean_square
        self.weight = DECAY * self.weight + (1 - DECAY)
        old_mean, old_std = self.mean, self.std
        self.mean = self.first / self.weight
        self.std = max(math.sqrt(max(self.second / self.weight - self.mean**2, 0.0)), STD_FLOOR)
        head.weight.mul_(old_std / self.std)
        head.bias.mul_(old_std / self.std).add_((old_mean - self.mean) / self.std)


T = TypeVar("T")

Deferred: TypeAlias = Callable[[], T]
"""Waits for the result of a started computation and returns it, or raises its error."""


def resolved(value: T) -> Deferred[T]:
    """A deferred result that is already available."""
    return lambda: value


class WeightedPredictions(Predictions, Protocol):
    """The fields of a microbatch that a critic with a separate model needs."""

    @property
    def weights(self) -> Tensor: ...  # float32 [T]
    @property
    def counted(self) -> bool: ...  # whether its tokens count in metrics and in the scale of the returns


class Critic(Protocol):
    """A critic of the policy trainer. All tensors are float32 [T], in the order of the microbatch.

    Calls are executed in order; a critic in another process executes them while the trainer continues.
    """

    @property
    def remote(self) -> bool:
        """Whether the critic runs in another process; values are then requested as soon as a group is complete."""

    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        """Value of the state in which each token was chosen, without gradient."""

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        """Add the summed gradient of the value loss; `values_T` are from the start of the update.

        Called between the forward and backward pass of the policy, whose hidden states are in `microbatch.states`; a
        critic with a shared trunk adds its gradient to theirs.
        """

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        """Take one optimizer step and return its metrics."""

    def state_bytes(self) -> int:
        """Upper bound of the bytes that `write_state` writes."""

    def write_state(self, directory: Path) -> None:
        """Write everything needed to resume into an empty directory."""

    def read_state(self, directory: Path) -> None:
        """Restore what `write_state` wrote."""


@dataclass(slots=True)
class ValueSums:
    """Sums over the tokens of one optimizer step."""

    tokens: int = 0
    # float64 [6] on the device: returns, their squares, errors (return minus value at the start of the update), their
    # squares, clipped tokens, and the loss with the token weights of the gradient.
    sums: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, returns_T: Tensor, values_T: Tensor, loss: Tensor, clipped_T: Tensor) -> None:
        returns, errors = returns_T.double(), (returns_T - values_T).double()
        terms = (returns, returns.square(), errors, errors.square(), clipped_T.double(), loss.detach().double())
        self.tokens += returns.numel()
        self.sums = self.sums + torch.stack([each.sum() for each in terms])

    def over(self, ranks: Ranks) -> ValueSums:
        """Sums over all ranks, on the host."""
        own = torch.tensor([self.tokens, *self.sums.expand(6).tolist()], dtype=torch.float64)
        tokens, *sums = ranks.all_sum(own).tolist()
        return ValueSums(int(tokens), torch.tensor(sums, dtype=torch.float64))

    def metrics(self, denominator: float) -> dict[str, float]:
        """Means over tokens; empty without tokens. The explained variance 1 - Var(R - V) / Var(R) is omitted if Var(R)
        is 0."""
        if not self.tokens:
            return {}
        n = self.tokens
        returns, squares, errors, error_squares, clipped, loss = self.sums.tolist()
        variance = max(squares / n - (returns / n) ** 2, 0.0)
        unexplained = max(error_squares / n - (errors / n) ** 2, 0.0)
        values = {
            "value_loss": loss / denominator,
            "value_clip_fraction": clipped / n,
            "returns_mean": returns / n,
        }
        return values | ({"explained_variance": 1.0 - unexplained / variance} if variance > 0 else {})


class _HeadCritic:
    """A value head on a model, with its optimizer, return scale and state.

    Args:
        forward: the pass whose states the head reads: that of the critic's own model, or the policy's.
        source: the folder of the model, if it belongs to the critic; its tokenizer is copied into checkpoints.
        value_coefficient: factor of the value loss in the gradient of a shared trunk, not of the head.
        value_clip: largest change of a value in one update, in units of the return (of its deviation if returns are
            normalised); 0 for no limit.
    """

    remote = False
    owns_model: ClassVar[bool]

    def __init__(
        self,
        forward: TreeForward,
        head: ScalarHead,
        config: CriticConfig,
        *,
        source: Path = Path(),
        value_coefficient: float = 1.0,
        value_clip: float = 0.0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.model = forward.model
        self.head = head
        self.config = config
        trained = nn.ModuleList([forward, head]) if self.owns_model else head
        self.optimizer = build_optimizer(trained, OptimizerConfig(learning_rate=config.learning_rate))
        self.optimizer_steps = 0
        self._stored_model, self._source = forward.model if self.owns_model else None, source
        self._value_coefficient, self._value_clip = value_coefficient, value_clip
        self._tree_forward, self._ranks = forward, ranks
        self._scale = ReturnScale()
        self._sums = ValueSums()

    def _forward(self, microbatch: Predictions) -> Tensor:
        """Hidden states [H, hidden] of the trunk."""
        output: TreeOutput = self._tree_forward(microbatch.tree, microbatch.head_nodes)
        return output.states

    def _values(self, states: Tensor, microbatch: Predictions) -> Tensor:
        values_H: Tensor = self._scale.mean + self._scale.std * self.head(states)
        return values_H[microbatch.head_rows]

    def _loss(self, states: Tensor, microbatch: WeightedPredictions, returns_T: Tensor, values_T: Tensor) -> Tensor:
        """Weighted sum of the value losses of normalised values and returns."""
        mean, std = self._scale.mean, self._scale.std
        outputs_T = self.head(states)[microbatch.head_rows]
        parts = value_loss(outputs_T, (returns_T - mean) / std, (values_T - mean) / std, clip=self._value_clip)
        loss = (microbatch.weights * parts.loss_T).sum()
        if microbatch.counted:
            self._sums.add(returns_T, values_T, loss, parts.clipped_T)
        return loss

    def step(self, denominator: float) -> Deferred[dict[str, float]]:
        sums, self._sums = self._sums.over(self._ranks), ValueSums()
        limit = self.config.max_grad_norm
        norm = clip_and_step(self.optimizer, scale=1.0 / denominator, max_grad_norm=limit, ranks=self._ranks)
        self.optimizer_steps += 1
        if self.config.normalize and sums.tokens:
            returns, squares = sums.sums[:2].tolist()
            self._scale.update(self.head, mean=returns / sums.tokens, mean_square=squares / sums.tokens)
        return resolved(sums.metrics(denominator) | {"value_grad_norm": norm})

    def state_bytes(self) -> int:
        return state_bytes(self._stored_model, self.optimizer, source=self._source, head=self.head)

    def write_state(self, directory: Path) -> None:
        save_state(
            directory,
            model=self._stored_model,
            optimizer=self.optimizer,
            source=self._source,
            counters={"optimizer_steps": self.optimizer_steps, "scale": asdict(self._scale)},
            head=self.head,
            ranks=self._ranks,
        )
        if self._ranks.index == 0:
            save_head(directory, self.head, kind="value_model", pooling="every_token", vocabulary_digest="")

    def read_state(self, directory: Path) -> None:
        model, optimizer = self._stored_model, self.optimizer
        counters = restore_state(directory, model=model, optimizer=optimizer, head=self.head, ranks=self._ranks)
        stored, _ = load_head(directory, "value_model", device=self.head.weight.device)
        self.head.load_state_dict(stored.state_dict())
        self.optimizer_steps = int(counters["optimizer_steps"])
        self._scale = ReturnScale(**counters["scale"])


class ModelCritic(_HeadCritic):
    """A critic with a separate model, which is trained in place; implements `Critic`."""

    owns_model = True

    @torch.no_grad()
    def values(self, microbatch: Predictions) -> Deferred[Tensor]:
        return resolved(self._values(self._forward(microbatch), microbatch))

    def learn(self, microbatch: WeightedPredictions, returns_T: Tensor, values_T: Tensor) -> None:
        self._loss(self._forward(microbatch), microbatch, returns_T, values_T).backward()


class TrunkCritic(_HeadCritic):
    """A value head on the hidden states of the policy, which the policy trainer optimizes; implements `Critic`.

    If `microbatch.states` has a graph, the gradient of the value loss with respect to the states is added to that of
    the policy, without another forward pass. States without a graph train only the head (critic warm-up). If there are
    no states, the trunk is run for the critic.
    """

    owns_model = False

    @torch.no_grad()
    def values(self, microbatch: Microbatch) -> Deferred[Tensor]:
        return resolved(self._values(self._states(microbatch), microbatch))

    def learn(self, microbatch: Microbatch, returns_T: Tensor, values_T: Tensor) -> None:
        states = self._states(microbatch)
        leaf = states.detach().requires_grad_()
        self._loss(leaf, microbatch, returns_T, values_T).backward()
        if not states.requires_grad or leaf.grad is None:
            return
        value_gradient = self._value_coefficient * leaf.grad
        if microbatch.states is None:
            states.backward(value_gradient)
        else:
            states.register_hook(lambda gradient: gradient + value_gradient)

    def _states(self, microbatch: Microbatch) -> Tensor:
        return microbatch.states if microbatch.states is not None else self._forward(microbatch)
