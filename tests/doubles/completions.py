"""Completions whose tokens say which sample, position and version they are of."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

from tidemill.core.records import ITEM_BYTES, LogprobBuffer, PolicyVersion, SampleId, TokenBuffer


class EncodedCompletions:
    """Tokens that encode sample, position and version, so that lost, repeated or swapped tokens are detected.

    Args:
        longest: lengths are uniform from 1 to this.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def length(self, sample_id: SampleId) -> int:
        return 1 + _completion_key(sample_id) % self._longest

    def tokens(
        self, sample_id: SampleId, version: PolicyVersion, start: int, end: int
    ) -> tuple[TokenBuffer, LogprobBuffer]:
        tokens, logprobs = _encoded(_completion_key(sample_id), version.digest, self._longest)
        piece = slice(start * ITEM_BYTES, end * ITEM_BYTES)
        return tokens[piece], logprobs[piece]


@lru_cache(maxsize=65536)
def _completion_key(sample_id: SampleId) -> int:
    return sample_id.key


@lru_cache(maxsize=4096)
def _encoded(key: int, digest: str, length: int) -> tuple[TokenBuffer, LogprobBuffer]:
    """A completion of random bytes seeded by sample and version, and logprobs without meaning."""
    seed = hashlib.blake2b(f"{key} {digest}".encode(), digest_size=8).digest()
    rng = random.Random(seed)
    return rng.randbytes(length * ITEM_BYTES), rng.randbytes(length * ITEM_BYTES)
