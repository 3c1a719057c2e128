"""A critic learns the same bits from a microbatch that was sent to another process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.model_shapes import HIDDEN, llama
from tests.trajectories import trajectory
from tidemill.config.algorithm import CriticConfig
from tidemill.models.attention import use_packed_attention
from tidemill.models.reward_model import reward_head
from tidemill.models.tree_forward import TreeForward
from tidemill.runtime.cluster.ray_critic import (
    ReceivedTokens,
    SentTokens,
    floats,
    pack_microbatch,
    to_bytes,
    unpack_microbatch,
)
from tidemill.runtime.cluster.wire import decode, encode
from tidemill.trainer.critic import ModelCritic
from tidemill.trainer.packing import Microbatch, WeightedSample, pack

CPU = torch.device("cpu")


def _microbatch() -> Microbatch:
    samples = [trajectory([5, 6, 7, 8], [9, 10, 11], 1.0), trajectory([5, 6, 7, 8], [9, 12], 0.0, index=1)]
    return pack(
        [WeightedSample(trajectory=t, advantage=0.5, token_weight=1 / t.completion_length) for t in samples], CPU
    )


def _learned(microbatch: Microbatch | ReceivedTokens, returns: Tensor) -> list[Tensor]:
    model = llama()
    use_packed_attention(model)
    critic = ModelCritic(TreeForward(model), reward_head(HIDDEN), CriticConfig(learning_rate=1e-2), source=Path())
    values = critic.values(microbatch)()
    critic.learn(microbatch, returns, values)
    critic.step(2.0)
    return [values, *(parameter.detach() for parameter in model.parameters()), critic.head.weight.detach()]


def test_values_and_updates_are_identical() -> None:
    microbatch, returns = _microbatch(), torch.linspace(-1, 2, 5)
    crossed = unpack_microbatch(decode(encode(pack_microbatch(microbatch)), SentTokens), CPU)
    ours, theirs = _learned(microbatch, returns), _learned(crossed, floats(to_bytes(returns), CPU))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert crossed.counted
    microbatch.counted = False  # of a rank without samples in a round
    assert not unpack_microbatch(pack_microbatch(microbatch), CPU).counted
