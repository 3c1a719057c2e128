"""A meaningless reward that rarely gives two samples the same value, so every group has signal."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

_calls = itertools.count()


async def varied_reward(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """In [0, 1). Equal completions of a prompt get different rewards, because calls are counted."""
    digest = hashlib.blake2b(f"{prompt}\0{completion}\0{next(_calls)}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
