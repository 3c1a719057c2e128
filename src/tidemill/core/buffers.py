"""Packed token and logprob buffers: what a million tokens in flight travel and rest as.

Both are plain little-endian bytes, so that they serialise without conversion; numpy and torch read them with
`frombuffer`, this module with the standard library's `array`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

TokenBuffer: TypeAlias = bytes
"""Token ids, little-endian int32 [T]."""

LogprobBuffer: TypeAlias = bytes
"""Natural-log probabilities, little-endian float32 [T]."""

ITEM_BYTES = 4
assert sys.byteorder == "little", "packed buffers are little-endian; this machine is not"


def pack_tokens(token_ids: Iterable[int]) -> TokenBuffer:
    return array("i", token_ids).tobytes()


def unpack_tokens(buffer: TokenBuffer) -> list[int]:
    return array("i", buffer).tolist()


def view_tokens(buffer: TokenBuffer | bytearray) -> Sequence[int]:
    """As `unpack_tokens`, but nothing is copied; a buffer cannot grow while somebody holds a view of it."""
    return memoryview(buffer).cast("i")


def pack_logprobs(logprobs: Iterable[float]) -> LogprobBuffer:
    return array("f", logprobs).tobytes()


def unpack_logprobs(buffer: LogprobBuffer) -> list[float]:
    return array("f", buffer).tolist()


def count(buffer: bytes) -> int:
    """Items in a packed buffer."""
    return len(buffer) // ITEM_BYTES
