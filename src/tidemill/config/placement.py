"""Where the models beside the policy compute: with what uses them, or each in a process of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.config.base import Config


class PlacementConfig(Config):
    """An actor is a Ray actor of its own, on the nodes that the trainer may be on."""

    reward_model: Literal["driver", "actor"] = "driver"
    """Rewards of kind "model". driver: in the controller's process (in one process on its one compute thread)."""
    reference: Literal["trainer", "actor"] = "trainer"
    """The model that algorithm.kl_beta holds the policy to. trainer: in its process, which then has it in memory."""
    critic: Literal["trainer", "actor"] = "trainer"
    """The critic of algorithm.advantage = "gae", where critic.kind = "own". actor: it values each group when that is
    complete and learns while the policy does; where others are valued together, sums may round differently."""
    actor_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each of these actors; also its threads inside one operation."""
    actor_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for each of these actors."""

    def faults(self, runtime: str, *, critic: str) -> list[str]:
        """What cannot be on this runtime, or with this kind of critic, with its cure."""
        found = []
        if self.critic == "actor" and critic == "shared":
            found.append(
                'placement.critic = "actor" and critic.kind = "shared": a head on the policy\'s hidden states is where '
                'they are; set placement.critic = "trainer", or critic.kind = "own"'
            )
        if runtime != "ray":
            found += [
                f'placement.{name} = "actor" needs runtime = "ray", and runtime is "{runtime}"; set one of them'
                for name in self.on_actors
            ]
        return found

    @property
    def on_actors(self) -> tuple[str, ...]:
        """The keys that say "actor"."""
        return tuple(name for name in ("reward_model", "reference", "critic") if getattr(self, name) == "actor")
