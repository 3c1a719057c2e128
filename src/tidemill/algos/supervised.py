"""Learning from demonstrations."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(trainer_logprobs_T: Tensor) -> Tensor:
    """Loss of each completion token in nats, -log π; its mean by `losses.token_weights` is what is minimised.

    Args:
        trainer_logprobs_T: float [T], of the demonstrated tokens, with gradient.

    Returns:
        float [T].
    """
    return -trainer_logprobs_T
