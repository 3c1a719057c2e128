"""Functions as a user writes them, for `benchmarks.user_advantage`."""

from __future__ import annotations

import hashlib

import torch

import tidemill as tm


@tm.advantage
def like_grpo(rewards: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    from tidemill.algos.advantages import grpo

    return grpo(rewards, valid)


@tm.reward
def hashed(prompt: str, completion: str) -> float:
    """A meaningless number in [0, 1), the same for equal completions."""
    digest = hashlib.blake2b(f"{prompt}\0{completion}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
