"""Imitation of actions: regression of a policy's mean action on recorded ones, or on those of a teacher.

Both learners take the place of `trainer.control.ControlLearner` in a run: an update is a function of the networks, the
experience and the iteration. Critics are not trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.config.robot import CloneConfig, ControlConfig
from tidemill.robots.policy_arrays import mean_action
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.simulation import State
from tidemill.telemetry import metrics
from tidemill.trainer.control import ControlNetworks, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Rows of observations and actions by policy."""

    inputs: dict[str, Tensor]  # float32 [rows, D]
    labels: dict[str, Tensor]  # float32 [rows, A]

    def rows(self, at: Tensor) -> Demonstrations:
        """Rows by number or mask."""
        inputs = {name: each[at] for name, each in self.inputs.items()}
        return Demonstrations(inputs=inputs, labels={name: each[at] for name, each in self.labels.items()})

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


@dataclass(eq=False)
class ImitationLearner:
    """Minimises the squared error of mean actions with Adam; `seed` and the iteration determine the minibatches."""

    networks: ControlNetworks
    settings: CloneConfig
    control: ControlConfig
    _: KW_ONLY
    seed: int
    steps_per_update: int = 0  # of the newest update

    def __post_init__(self) -> None:
        self.learning_rate = self.settings.learning_rate
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            self.networks.parameters(), lr=self.learning_rate, fused=True
        )

    def loss(self, rows: Demonstrations) -> Tensor:
        """[]: squared errors of all joints, mean over rows and joints, summed over policies."""
        losses = [
            (actor(rows.inputs[name]) - rows.labels[name]).square().mean()
            for name, actor in self.networks.actors.items()
        ]
        return torch.stack(losses).sum()

    def observe(self, rows: Demonstrations) -> None:
        """Add the inputs to the normalisers."""
        for name, actor in self.networks.actors.items():
            actor.normaliser.update(rows.inputs[name])

    def fit(self, rows: Demonstrations, *, epochs: int, rate: float, iteration: int) -> dict[str, float]:
        """Passes over the rows in minibatches; returns the metrics."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + iteration) % 2**63)
        count = math.ceil(len(rows) / self.settings.batch_size)
        self.learning_rate, self.steps_per_update = rate, epochs * count
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        taken = []
        for _ in range(epochs):
            for at in torch.tensor_split(torch.randperm(len(rows), generator=generator), count):
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.loss(rows.rows(at))
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.networks.actors.parameters(), self.control.max_grad_norm)
                if math.isfinite(norm):
                    self.optimizer.step()
                    taken.append((float(norm), float(loss.detach())))
        norms, losses = zip(*taken, strict=True) if taken else ((), ())
        means = {metrics.GRAD_NORM: norms, metrics.LOSS: losses}
        return {name: sum(values) / len(values) for name, values in means.items() if values} | {
            metrics.LEARNING_RATE: rate,
            metrics.UPDATES_SKIPPED: float(epochs * count - len(taken)),
        }


@dataclass(eq=False)
class RecordedLearner(ImitationLearner):
    """An update is one pass over recorded episodes; the learning rate falls linearly to a tenth."""

    _: KW_ONLY
    training: Demonstrations
    held_out: Demonstrations  # of other episodes; the loss is measured after every pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.observe(self.training)

    def update(self, chunks: Sequence[State], iteration: int, *, lag: int = 0) -> dict[str, float]:
        del chunks, lag
        rate = self.settings.learning_rate * (1 - 0.9 * iteration / self.settings.epochs)
        values = self.fit(self.training, epochs=1, rate=rate, iteration=iteration)
        with torch.no_grad():
            return values | {metrics.HELD_OUT_LOSS: float(self.loss(self.held_out))}


@dataclass(eq=False)
class TeacherLearner(ImitationLearner):
    """The student acts, the teacher labels what the student observed (DAgger without memory)."""

    _: KW_ONLY
    description: PolicyDescription  # of the student
    teacher: StoredPolicy  # may read groups that the student does not

    def update(self, chunks: Sequence[State], iteration: int, *, lag: int = 0) -> dict[str, float]:
        del lag
        experience = collect(chunks, self.description)
        inputs = {name: experience.inputs[name][:, :-1].flatten(0, 1) for name in self.networks.actors}
        rows = Demonstrations(inputs=inputs, labels=teacher_actions(chunks, self.teacher, self.description.history))
        self.observe(rows)
        return self.fit(
            rows, epochs=self.control.num_learning_epochs, rate=self.settings.learning_rate, iteration=iteration
        )


def teacher_actions(chunks: Sequence[State], teacher: StoredPolicy, history: int) -> dict[str, Tensor]:
    """The teacher's mean actions for the observations of chunks, [N * T, A] by policy.

    Args:
        history: observations in the chunks' windows, at least as many as the teacher reads.
    """
    description = teacher.description
    labels = {}
    for name in description.policies:
        parts = []
        for group in description.obs_groups[name]:
            windows = np.concatenate([chunk[f"obs/{group}"][:, :-1] for chunk in chunks])
            newest = description.history * (windows.shape[2] // history)
            parts.append(windows[:, :, -newest:].reshape(-1, newest))
        observed = np.concatenate(parts, axis=1)
        labels[name] = torch.from_numpy(mean_action(teacher.weights, name, observed, description.activation))
    return labels
