"""Environments of other packages for tests: an rsl_rl VecEnv, and gymnasium VectorEnvs."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


class PointEnv:
    """A point on a line moves by its action; rsl_rl's interface. An episode ends in failure beyond 2, and at 20 steps.

    Args:
        saves: whether it has get_state and set_state.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs, self.num_actions, self.max_episode_length, self.device = num_envs, 1, 20, "cpu"
        self.cfg: dict[str, Any] = {}
        self.random = torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.at = self._starts(num_envs)

    def _starts(self, count: int) -> torch.Tensor:
        return torch.rand(count, generator=self.random) * 2 - 1

    def get_observations(self) -> TensorDict:
        place = self.at[:, None]
        return TensorDict({"policy": place, "critic": torch.cat([place, place**2], 1)}, [self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.at = self.at + 0.1 * actions[:, 0].clamp(-1, 1)
        self.episode_length_buf += 1
        rewards = -self.at.abs()
        over = self.episode_length_buf >= self.max_episode_length
        done = over | (self.at.abs() > 2)
        self.at = torch.where(done, self._starts(self.num_envs), self.at)
        self.episode_length_buf[done] = 0
        return self.get_observations(), rewards, done.long(), {"time_outs": over}


class SavedPointEnv(PointEnv):
    def get_state(self) -> tuple[torch.Tensor, ...]:
        return self.at, self.episode_length_buf, self.random.get_state()

    def set_state(self, state: tuple[torch.Tensor, ...]) -> None:
        self.at, self.episode_length_buf = state[0].clone(), state[1].clone()
        self.random.set_state(state[2])


def point(num_envs: int, seed: int, saves: bool = False) -> PointEnv:
    return (SavedPointEnv if saves else PointEnv)(num_envs, seed)
