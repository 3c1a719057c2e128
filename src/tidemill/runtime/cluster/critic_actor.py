"""The critic's process: a model of its own, which learns while the policy does."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, UserError
from tidemill.models.catalog import resolve
from tidemill.runtime.cluster.critic_tokens import SentTokens, floats, received, to_bytes
from tidemill.runtime.cluster.plan import CriticPlan
from tidemill.runtime.cluster.wire import answered, decode
from tidemill.runtime.critic import build_model_critic
from tidemill.runtime.frozen import FrozenModels
from tidemill.runtime.machine import choose_device, choose_precision, require_reserved_gpus
from tidemill.trainer.critic import ModelCritic


class CriticActor:
    """Behind `critic.RayCritic`. Its methods are no coroutines: what the trainer asks for is done in that order."""

    def __init__(self) -> None:
        self._critic: ModelCritic | None = None
        self._device = torch.device("cpu")

    @answered
    def start(self, plan: bytes) -> str:
        """Load the model; returns the device that it is on.

        Raises:
            UserError: it cannot be had here, or this machine does not see the run directory.
        """
        planned = decode(plan, CriticPlan)
        _require_checkpoints(planned)
        spec = RunSpec.model_validate_json(planned.spec)
        torch.set_num_threads(planned.threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        self._device = choose_device(spec.trainer)
        self._critic = build_model_critic(
            spec,
            policy_folder=resolve(spec.model, progress=lambda _: None),
            frozen=FrozenModels(self._device),
            device=self._device,
            autocast=choose_precision(spec.trainer, self._device),
            progress=lambda _: None,
        )
        return str(self._device)

    @answered
    def values(self, tokens: bytes) -> bytes:
        """float32 [T]"""
        values_T = self._ready().values(received(decode(tokens, SentTokens), self._device))()
        return to_bytes(values_T.float())

    @answered
    def learn(self, tokens: bytes, returns: bytes, values: bytes) -> None:
        microbatch = received(decode(tokens, SentTokens), self._device)
        self._ready().learn(microbatch, floats(returns, self._device), floats(values, self._device))

    @answered
    def step(self, denominator: float) -> dict[str, float]:
        return self._ready().step(denominator)()

    @answered
    def state_bytes(self) -> int:
        return self._ready().state_bytes()

    @answered
    def write_state(self, directory: str) -> list[str]:
        """The files written, relative to the directory."""
        self._ready().write_state(Path(directory))
        return [str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()]

    @answered
    def read_state(self, directory: str) -> None:
        self._ready().read_state(Path(directory))

    def _ready(self) -> ModelCritic:
        if self._critic is None:
            raise TidemillError("this critic has not been started")
        return self._critic


def _require_checkpoints(plan: CriticPlan) -> None:
    if not Path(plan.seen).exists():
        raise UserError(
            "the critic's machine does not see the run directory, where checkpoints are written",
            where="placement.critic",
            cure='put run.dir on a file system that the machines share, or set placement.critic = "trainer"',
        )
