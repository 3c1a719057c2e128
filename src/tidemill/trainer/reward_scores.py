"""Scores of finished samples by a reward model: token trees within a budget, so that shared prompts are computed once
and memory stays bounded whatever has queued up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.core.buffers import TokenBuffer
from tidemill.models.reward_model import RewardModel, sequence_scores
from tidemill.models.token_tree import Tokens
from tidemill.trainer.minibatches import split_by_tokens
from tidemill.trainer.sequences import tokens_of


@torch.inference_mode()
def reward_scores(
    reward: RewardModel, samples: Sequence[TokenBuffer], *, budget: int, autocast: torch.dtype | None = None
) -> list[float]:
    """One score a sample (int32 [P + T]), in the order given.

    Args:
        budget: packed tokens of one forward pass; a longer sample runs alone.
    """
    device = next(reward.model.parameters()).device
    # In lexicographic order samples of one prompt stand together, whoever finished in between.
    order = sorted(range(len(samples)), key=lambda index: tokens_of(samples[index]).astype(">i4").tobytes())
    scores = [0.0] * len(samples)

    def tokens(index: int) -> tuple[Tokens]:
        return (tokens_of(samples[index]),)

    for run in split_by_tokens(order, tokens, budget):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            found, _ = sequence_scores(reward.model, reward.head, [tokens_of(samples[index]) for index in run])
        for index, score in zip(run, found.tolist(), strict=True):
            scores[index] = score
    return scores
