"""PPO for control policies: the networks of a task and their update with the experience of an iteration.

```
 answers of all shards ─▶ Experience ─▶ values, advantages ─▶ epochs of minibatches ─▶ normalisers ─▶ metrics
```
The normalisers change after the optimizer steps, as in rsl_rl: a policy is then the same function at the start of the
update as in the simulation, so that importance ratios start at 1 (at lag 0).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.algos.kl import gaussian_kl
from tidemill.algos.losses import ppo_clip
from tidemill.algos.returns import gae, value_loss
from tidemill.config.robot import ControlConfig
from tidemill.models.actor import GaussianActor, Network
from tidemill.robots.policy_folder import PolicyDescription
from tidemill.robots.simulation import State
from tidemill.telemetry import metrics

RATE_STEP, LOWEST_RATE, HIGHEST_RATE = 1.5, 1e-5, 1e-2  # of the adaptive learning rate, as in rsl_rl
SPREAD_FLOOR = 1e-8  # added to the standard deviation of advantages, as in rsl_rl
CENTRAL = "critic"


N = TypeVar("N", bound=Network)


class NetworksByName(nn.ModuleDict, Generic[N]):
    """Networks of one class."""

    if TYPE_CHECKING:

        def __getitem__(self, key: str) -> N: ...
        def items(self) -> ItemsView[str, N]: ...
        def values(self) -> ValuesView[N]: ...


class ControlNetworks(nn.Module):
    """The actors and critics of a task. Parameters have the names of a policy on disk below `actors`."""

    def __init__(self, description: PolicyDescription, config: ControlConfig, *, seed: int) -> None:
        super().__init__()
        activation = config.activation
        names = list(description.policies) if config.critic == "separate" else [CENTRAL]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actors: NetworksByName[GaussianActor] = NetworksByName(
                {
                    name: GaussianActor(
                        description.inputs(name),
                        len(joints),
                        config.actor_hidden_dims,
                        activation,
                        init_std=config.init_noise_std,
                    )
                    for name, joints in description.policies.items()
                }
            )
            self.critics: NetworksByName[Network] = NetworksByName(
                {name: Network(description.inputs(name), 1, config.critic_hidden_dims, activation) for name in names}
            )

    def by_name(self) -> list[tuple[str, Network]]:
        """All networks with the names of their inputs, actors first. A separate critic has the name of its policy."""
        return [*self.actors.items(), *self.critics.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """T steps of N worlds. Inputs are those of policies by name, and of `CENTRAL`."""

    inputs: dict[str, Tensor]  # float32 [N, T + 1, D], the last one of the state after the steps
    actions: dict[str, Tensor]  # float32 [N, T, A] by policy
    means: dict[str, Tensor]  # of the policy that acted, float32 [N, T, A]
    log_stds: dict[str, Tensor]  # of the policy that acted, float32 [A]
    logprobs: dict[str, Tensor]  # float32 [N, T]
    rewards: Tensor  # float32 [N, T]
    terminated: Tensor  # bool [N, T]
    truncated: Tensor  # bool [N, T]
    final_at: Tensor  # int64 [K, 2], world and step of truncated episodes with a known last observation
    finals: dict[str, Tensor]  # these observations, float32 [K, D]
    acted: Tensor  # bool [N, T]; False: the environment reset itself in this step


def collect(chunks: Sequence[State], description: PolicyDescription) -> Experience:
    """The experience of all shards, in their order."""

    def joined(name: str) -> Tensor:  # finals are only in chunks that have some
        return torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks if name in chunk]))

    def inputs(name: str, prefix: str) -> Tensor:
        return torch.cat([joined(f"{prefix}/{group}") for group in description.obs_groups[name]], dim=-1)

    names, policies = [*description.policies, CENTRAL], description.policies
    actions, means, logprobs = joined("actions"), joined("means"), joined("logprobs")
    log_stds = torch.from_numpy(chunks[0]["stds"]).log()
    columns = {name: [description.joints.index(joint) for joint in joints] for name, joints in policies.items()}
    widths = list(map(len, columns.values()))  # in the means, which are in the order of policies
    final_at, first_world = [np.zeros((0, 2), dtype=np.int64)], 0
    for chunk in chunks:
        if "final_at" in chunk:
            final_at.append(chunk["final_at"] + np.array([first_world, 0]))
        first_world += len(chunk["rewards"])
    ignored = [chunk.get("ignored", np.zeros_like(chunk["truncated"])) for chunk in chunks]
    return Experience(
        inputs={name: inputs(name, "obs") for name in names},
        actions={name: actions[..., each] for name, each in columns.items()},
        means=dict(zip(columns, means.split(widths, dim=-1), strict=True)),
        log_stds=dict(zip(columns, log_stds.split(widths), strict=True)),
        logprobs={name: logprobs[..., at] for at, name in enumerate(columns)},
        rewards=joined("rewards"),
        terminated=joined("terminated"),
        truncated=joined("truncated"),
        final_at=torch.from_numpy(np.concatenate(final_at)),
        finals={name: inputs(name, "final") for name in names} if len(final_at) > 1 else {},
        acted=torch.from_numpy(~np.concatenate(ignored)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a critic says about an experience."""

    values: Tensor  # float32 [N, T]
    advantages: Tensor  # float32 [N, T], not whitened

    @property
    def returns(self) -> Tensor:
        return self.advantages + self.values


@torch.no_grad()
def targets(critic: nn.Module, experience: Experience, name: str, config: ControlConfig) -> Targets:
    """Values and generalised advantages. An episode that reaches its time limit continues with the value of its last
    observation; if that is unknown, with that of the observation before, as in rsl_rl."""
    all_values = critic(experience.inputs[name]).squeeze(-1)
    values, next_values = all_values[:, :-1], all_values[:, 1:]
    next_values = torch.where(experience.truncated, values, next_values)
    if len(experience.final_at):
        worlds, steps = experience.final_at.T
        next_values[worlds, steps] = critic(experience.finals[name]).squeeze(-1)
    advantages = gae(
        experience.rewards,
        values,
        next_values,
        terminated_T=experience.terminated,
        truncated_T=experience.truncated,
        gamma=config.gamma,
        lam=config.lam,
    )
    return Targets(values=values, advantages=advantages)


def whitened(advantages: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-8)."""
    return (advantages - advantages.mean()) / (advantages.std() + SPREAD_FLOOR)


def adapted_rate(rate: float, kl: float, desired_kl: float) -> float:
    """The learning rate after an optimizer step's KL divergence was measured, by rsl_rl's rule."""
    if kl > 2 * desired_kl:
        return max(LOWEST_RATE, rate / RATE_STEP)
    if 0 < kl < desired_kl / 2:
        return min(HIGHEST_RATE, rate * RATE_STEP)
    return rate


Minibatch = Mapping[str, Tensor]
"""B rows of an iteration: `inputs/NAME` (normalised), `actions/NAME`, `means/NAME` and `logprobs/NAME` of policies,
`values/NAME`, `returns/NAME` and `advantages/NAME` of critics."""


class Learner(Protocol):
    """What changes the networks of a run."""

    networks: ControlNetworks
    learning_rate: float

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def steps_per_update(self) -> int: ...

    def update(self, chunks: Sequence[State], iteration: int, *, lag: int = 0) -> dict[str, float]: ...


class ControlLearner:
    """PPO with one optimizer for all networks.

    Args:
        seed: with the number of the iteration it determines the minibatches.
    """

    def __init__(
        self, networks: ControlNetworks, config: ControlConfig, description: PolicyDescription, *, seed: int
    ) -> None:
        self.networks, self.config, self._description, self._seed = networks, config, description, seed
        self.learning_rate = config.learning_rate
        self.optimizer = torch.optim.Adam(networks.parameters(), lr=config.learning_rate, fused=True)

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of an update."""
        return self.config.num_learning_epochs * self.config.num_mini_batches

    def update(self, chunks: Sequence[State], iteration: int, *, lag: int = 0) -> dict[str, float]:
        """Learn from the experience of an iteration; returns its metrics. All parameters change in place.

        Args:
            lag: versions between the policy that acted and the present one.
        """
        config, networks = self.config, self.networks
        experience = collect(chunks, self._description)
        of_critics = {name: targets(critic, experience, name, config) for name, critic in networks.critics.items()}
        log_stds = experience.log_stds
        rows = self._rows(experience, of_critics)
        if lag:  # the learning rate follows the change by this update, not that of the version before
            with torch.no_grad():
                means = {name: actor.outputs(rows[f"inputs/{name}"]) for name, actor in networks.actors.items()}
            rows |= {f"means/{name}": each for name, each in means.items()}
            log_stds = {name: actor.log_std.detach().clone() for name, actor in networks.actors.items()}
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + iteration) % 2**63)
        count = len(next(iter(rows.values())))
        sums: dict[str, float] = defaultdict(float)
        taken = 0
        for _ in range(config.num_learning_epochs):
            order = torch.randperm(count, generator=generator)
            for at in order.tensor_split(config.num_mini_batches):
                minibatch = {name: values.index_select(0, at) for name, values in rows.items()}
                loss, figures = self.loss(minibatch, log_stds)
                if config.schedule == "adaptive":
                    kl = float(figures[metrics.APPROX_KL])
                    self.learning_rate = adapted_rate(self.learning_rate, kl, config.desired_kl)
                if self._step(loss, figures):
                    taken += 1
                    for name, value in figures.items():
                        sums[name] += float(value)
        steps = self.steps_per_update
        if taken == steps:  # otherwise an observation may not be finite, and would stay in the moments
            for name, network in networks.by_name():
                network.normaliser.update(experience.inputs[name][:, :-1])
        returns = torch.stack([each.returns for each in of_critics.values()])
        errors = torch.stack([each.advantages for each in of_critics.values()])
        stds = torch.cat([actor.log_std.detach().exp() for actor in networks.actors.values()])
        return {name: total / max(taken, 1) for name, total in sums.items()} | {
            metrics.LEARNING_RATE: self.learning_rate,
            metrics.UPDATES_SKIPPED: float(steps - taken),
            "explained_variance": 1.0 - float(errors.var() / returns.var().clamp(min=SPREAD_FLOOR)),
            "returns_mean": float(returns.mean()),
            "robot/action_std": float(stds.mean()),
        }

    def _rows(self, experience: Experience, of_critics: Mapping[str, Targets]) -> dict[str, Tensor]:
        """The experience as rows of minibatches."""
        config = self.config
        rows = {  # normalised once: the moments change after the last step
            f"inputs/{name}": network.normaliser(experience.inputs[name][:, :-1])
            for name, network in self.networks.by_name()
        }
        for kind in ("actions", "means", "logprobs"):
            rows |= {f"{kind}/{name}": each for name, each in getattr(experience, kind).items()}
        for name, each in of_critics.items():
            whole = not config.normalize_advantage_per_mini_batch
            rows[f"advantages/{name}"] = whitened(each.advantages) if whole else each.advantages
            rows[f"returns/{name}"], rows[f"values/{name}"] = each.returns, each.values
        acted = experience.acted.flatten()
        rows = {name: values.flatten(0, 1) for name, values in rows.items()}
        return rows if acted.all() else {name: values[acted] for name, values in rows.items()}

    def loss(self, minibatch: Minibatch, log_stds: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss, value loss and entropy bonus, with gradient; and the figures of the step.

        Args:
            log_stds: of the policies at the start of the update, whose means are those of the minibatch.
        """
        config = self.config
        whiten = whitened if config.normalize_advantage_per_mini_batch else lambda advantages: advantages
        advantages = {name: whiten(minibatch[f"advantages/{name}"]) for name in self.networks.critics}
        policy_losses, entropies, divergences, clipped = [], [], [], []
        for name, actor in self.networks.actors.items():
            means = actor.outputs(minibatch[f"inputs/{name}"])
            outcome = ppo_clip(
                actor.logprobs(means, minibatch[f"actions/{name}"]),
                minibatch[f"logprobs/{name}"],
                advantages[name if name in advantages else CENTRAL],
                clip_low=config.clip_param,
                clip_high=config.clip_param,
            )
            policy_losses.append(outcome.loss_T.mean())
            entropies.append(actor.entropy())
            clipped.append(outcome.clipped_T.float().mean())
            with torch.no_grad():
                kl = gaussian_kl(minibatch[f"means/{name}"], log_stds[name], means, actor.log_std)
                divergences.append(kl.mean())
        values = [
            value_loss(
                critic.outputs(minibatch[f"inputs/{name}"]).squeeze(-1),
                minibatch[f"returns/{name}"],
                minibatch[f"values/{name}"],
                clip=config.clip_param if config.use_clipped_value_loss else 0.0,
            )
            for name, critic in self.networks.critics.items()
        ]
        policy, entropy = torch.stack(policy_losses).sum(), torch.stack(entropies).sum()
        value = torch.stack([each.loss_T.mean() for each in values]).sum()
        total = policy + config.value_loss_coef * value - config.entropy_coef * entropy
        figures = {
            metrics.LOSS: total.detach(),
            "value_loss": value.detach(),
            metrics.ENTROPY: entropy.detach(),
            metrics.APPROX_KL: torch.stack(divergences).sum(),
            metrics.CLIP_FRACTION: torch.stack(clipped).mean(),
            "value_clip_fraction": torch.stack([each.clipped_T.float().mean() for each in values]).mean(),
        }
        return total, figures

    def _step(self, loss: Tensor, figures: dict[str, Tensor]) -> bool:
        """Take an optimizer step and add its gradient norms to the figures; False: a gradient is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit = self.config.max_grad_norm
        # Each network by itself, as in rsl_rl.
        norms = [nn.utils.clip_grad_norm_(network.parameters(), limit) for _, network in self.networks.by_name()]
        if not all(norm.isfinite() for norm in norms):
            return False
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        actors = len(self.networks.actors)
        figures[metrics.GRAD_NORM] = torch.stack(norms[:actors]).norm()
        figures["value_grad_norm"] = torch.stack(norms[actors:]).norm()
        return True
