"""What a simulated model says: how long each completion is, and its tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from tidemill.core.buffers import ITEM_BYTES, LogprobBuffer, TokenBuffer
from tidemill.core.records import PolicyVersion, SampleId


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
        return 1 + _key(sample_id) % self._longest

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        tokens, logprobs = _telling(_key(sample_id), version.digest, self._longest)
        piece = slice(start * ITEM_BYTES, end * ITEM_BYTES)
        return tokens[piece], logprobs[piece]


@lru_cache(maxsize=65536)
def _key(sample_id: SampleId) -> int:
    return sample_id.key


@lru_cache(maxsize=4096)
def _telling(key: int, digest: str, length: int) -> tuple[TokenBuffer, LogprobBuffer]:
    """A whole completion; the logprobs are no numbers that mean anything."""
    seed = hashlib.blake2b(f"{key} {digest}".encode(), digest_size=8).digest()
    rng = random.Random(seed)
    return rng.randbytes(length * ITEM_BYTES), rng.randbytes(length * ITEM_BYTES)
