"""The work of a simulated run: prompts, completions and scores as functions of the sample."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from tidemill.core.records import (
    ITEM_BYTES,
    LogprobBuffer,
    Message,
    PolicyVersion,
    Prompt,
    Record,
    Reward,
    SampleId,
    TokenBuffer,
    Trajectory,
    pack_tokens,
)
from tidemill.hardware.completion_lengths import NORMAL, Lengths

SHARE_BITS = 52
"""Of a key: as many as make a float below 1 exactly."""


class Workload(Record):
    """The law of samples. Lengths and rewards do not depend on who generates them, or when."""

    lengths: Lengths
    prompt_tokens: int = 256
    different_prompts: int = 100_000  # then they come again, in another epoch
    prompt_correlation: float = 0.0  # between the lengths of a prompt's samples, as normal scores
    solved: float = 0.5  # share of samples with reward 1; the others have 0
    score_s: float = 0.0  # to judge a sample
    held_out: int = 0  # prompts of an evaluation; 0: the run has none

    @property
    def longest(self) -> int:
        """Completion tokens of the longest sample there can be."""
        return self.lengths.quantile(_share(2**64 - 1))

    def length(self, sample_id: SampleId) -> int:
        share = _share(sample_id.key)
        if self.prompt_correlation:
            prompt = _share(_key(sample_id.run_seed, "prompt", sample_id.prompt_id))
            score = math.sqrt(self.prompt_correlation) * NORMAL.inv_cdf(prompt)
            score += math.sqrt(1 - self.prompt_correlation) * NORMAL.inv_cdf(share)
            share = min(max(NORMAL.cdf(score), _share(0)), _share(2**64 - 1))
        return self.lengths.quantile(share)

    def reward(self, sample_id: SampleId) -> Reward:
        return Reward(value=float(_share(_key("reward", sample_id.key)) < self.solved))


def _share(key: int) -> float:
    """A 64-bit number as a share, 0 < share < 1."""
    return ((key >> (64 - SHARE_BITS)) + 0.5) / float(2**SHARE_BITS)


def _key(*fields: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little")


class Completions(Protocol):
    """A sample's completion is a function of the sample, and of the versions that make it."""

    def length(self, sample_id: SampleId) -> int:
        """Tokens until the model ends it; a limit may end it before."""

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        """Completion tokens [start, end) as `version` makes them, and their logprobs."""


class BlankCompletions:
    """Only lengths matter: every token is 0."""

    def __init__(self, length: Callable[[SampleId], int]) -> None:
        self._length = length

    def length(self, sample_id: SampleId) -> int:
        return self._length(sample_id)

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        blank = bytes((end - start) * ITEM_BYTES)
        return blank, blank


class TellingCompletions:
    """Every token tells of its sample, its place and its version: whatever is lost, repeated or exchanged shows.

    Args:
        longest: lengths are spread evenly from 1 to this.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def length(self, sample_id: SampleId) -> int:
        return 1 + _completion_key(sample_id) % self._longest

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        tokens, logprobs = _telling(_completion_key(sample_id), version.digest, self._longest)
        piece = slice(start * ITEM_BYTES, end * ITEM_BYTES)
        return tokens[piece], logprobs[piece]


@lru_cache(maxsize=65536)
def _completion_key(sample_id: SampleId) -> int:
    return sample_id.key


@lru_cache(maxsize=4096)
def _telling(key: int, digest: str, length: int) -> tuple[TokenBuffer, LogprobBuffer]:
    """A whole completion; the logprobs are no numbers that mean anything."""
    seed = hashlib.blake2b(f"{key} {digest}".encode(), digest_size=8).digest()
    rng = random.Random(seed)
    return rng.randbytes(length * ITEM_BYTES), rng.randbytes(length * ITEM_BYTES)


class SimulatedPrompts:
    """Implements `core.protocols.PromptSource`: the same `different` prompts in every epoch.

    Args:
        per_step: groups of a batch.
        prompt_tokens: length of each.
    """

    def __init__(self, per_step: int, *, different: int, prompt_tokens: int, held_out: int = 0) -> None:
        self._per_step, self._different = per_step, different
        self._token_ids = pack_tokens([1] * prompt_tokens)
        self._held_out = [self._prompt(f"h{at}") for at in range(held_out)]

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        first = (step - 1) * self._per_step
        return [
            (position // self._different, self._prompt(f"p{position % self._different}"))
            for position in range(first, first + self._per_step)
        ]

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def _prompt(self, name: str) -> Prompt:
        return Prompt(prompt_id=name, token_ids=self._token_ids, text="", answer="")


class SimulatedScorer:
    """Implements `core.protocols.Scorer`.

    Args:
        seconds: what judging a sample takes.
        reward: of a sample.
    """

    def __init__(self, seconds: Callable[[Trajectory], float], reward: Callable[[Trajectory], Reward]) -> None:
        self._seconds, self._reward = seconds, reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        await asyncio.sleep(self._seconds(trajectory))
        return self._reward(trajectory)

    async def close(self) -> None:
        pass


class NoText:
    """Implements `core.protocols.Codec`."""

    stop_token_ids: tuple[int, ...] = (0,)

    def encode(self, text: str) -> list[int]:
        return []

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        return "", []

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
