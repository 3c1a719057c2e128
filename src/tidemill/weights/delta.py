"""Encodes and applies lossless deltas between two versions of the same tensors.

A reinforcement-learning step changes few elements of a bf16 tensor, most of them by one unit in the last place. A delta
stores the gap to the previous changed element and the change: the difference of the bit patterns as integers in the
order of the floats, with the sign folded into the lowest bit. Both are small integers, written in groups of 7 bits, one
byte plane per group; each plane is entropy-coded separately. Every bit pattern is preserved, including NaN payloads
and negative zeros.

Layout, little-endian, tensor after tensor, `CHUNK` elements at a time: uint32 number of changed elements; if any, the
planes of the gaps and those of the differences. A plane is uint32 length and deflated bytes; the high bit of a byte
marks a number that continues in the next plane. A chunk is a part of the delta: several threads share the parts.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tidemill.core.records import DeltaEntry, TensorEntry
from tidemill.weights.snapshot import Blob, Damaged, checksum

CHUNK = 1 << 20
"""Elements per chunk: limits temporaries to tens of megabytes."""

Patterns: TypeAlias = npt.NDArray[Any]  # uint16 or uint32, the bit patterns of floats
Numbers: TypeAlias = npt.NDArray[Any]  # unsigned

PATTERNS: dict[str, type[np.unsignedinteger[Any]]] = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
}
_LENGTH = struct.Struct("<I")
_STRATEGY = zlib.Z_RLE
"""Huffman codes and run lengths: among the smallest and fastest of zlib's strategies for both dtypes."""


T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """Threads that share one job (numpy and zlib release the interpreter's lock); one thread runs it in the caller."""

    def __init__(self, count: int = 1) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weights") if count > 1 else None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results, in order. The first exception is raised when no thread works on the job any more."""
        if self._pool is None:
            return [function(item) for item in items]
        futures = [self._pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


INLINE = Threads()


def encode_delta(
    tensors: Sequence[TensorEntry], old: Blob, new: Blob, threads: Threads = INLINE
) -> tuple[Blob, tuple[int, ...]]:
    """The change of `tensors` from `old` to `new`, and the lengths of its parts."""
    chunks = zip(_chunks(tensors, old), _chunks(tensors, new), strict=True)
    parts = threads.map(lambda chunk: b"".join(_encoded(*chunk)), chunks)
    return np.frombuffer(b"".join(parts), np.uint8), tuple(map(len, parts))


def apply_delta(
    tensors: Sequence[TensorEntry],
    delta: Blob,
    entry: DeltaEntry,
    old: Blob,
    out: Blob,
    threads: Threads = INLINE,
) -> None:
    """Write the tensors of `old` plus `delta` to `out`, which may be `old` itself.

    Raises:
        Damaged: `delta` does not match `entry`; the contents of `out` are then undefined.
    """
    if len(delta) != entry.nbytes or checksum(delta) != entry.checksum:
        raise Damaged(f"the delta from version {entry.base.number} is torn or corrupt ({len(delta)} bytes)")
    ends = list(itertools.accumulate(entry.parts))

    def apply_part(part: tuple[Patterns, Patterns, int, int]) -> None:
        source, target, nbytes, end = part
        if out is not old:
            target[:] = source
        reader = _Reader(delta[end - nbytes : end])
        if changed := reader.length():
            places = np.cumsum(reader.numbers(changed, np.uint32), dtype=np.int64) + np.arange(changed)
            differences = _unfolded(reader.numbers(changed, target.dtype.type))
            target[places] = _unordered(_ordered(target[places]) + differences)

    try:
        parts = zip(_chunks(tensors, old), _chunks(tensors, out), entry.parts, ends, strict=True)
        threads.map(apply_part, parts)
    except (zlib.error, struct.error, IndexError, ValueError) as error:
        raise Damaged(f"the delta from version {entry.base.number} is not decodable: {error}") from error


def _encoded(before: Patterns, after: Patterns) -> Iterator[bytes]:
    """The encoding of one chunk."""
    places = np.flatnonzero(before != after)
    yield _LENGTH.pack(len(places))
    if len(places):
        yield from _planes((np.diff(places, prepend=-1) - 1).astype(np.uint32))
        yield from _planes(_folded(_ordered(after[places]) - _ordered(before[places])))


def _chunks(tensors: Sequence[TensorEntry], buffer: Blob) -> Iterator[Patterns]:
    for entry in tensors:
        patterns = buffer[entry.offset : entry.offset + entry.nbytes].view(PATTERNS[entry.dtype])
        for start in range(0, len(patterns), CHUNK):
            yield patterns[start : start + CHUNK]


def _top(patterns: Patterns) -> Any:
    return patterns.dtype.type(1 << (8 * patterns.itemsize - 1))


def _ordered(patterns: Patterns) -> Numbers:
    """Map bit patterns to unsigned integers in the order of the floats."""
    top = _top(patterns)
    numbers: Numbers = np.where(patterns & top, ~patterns, patterns | top)
    return numbers


def _unordered(numbers: Numbers) -> Patterns:
    top = _top(numbers)
    patterns: Patterns = np.where(numbers & top, numbers ^ top, ~numbers)
    return patterns


def _folded(differences: Numbers) -> Numbers:
    """Map +1, -1, +2, -2, ... to 1, 0, 3, 2, ...; a difference is never zero."""
    signed = differences.view(f"i{differences.itemsize}")
    folded: Numbers = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    unsigned: Numbers = folded.view(differences.dtype) - differences.dtype.type(1)
    return unsigned


def _unfolded(numbers: Numbers) -> Numbers:
    folded = numbers + numbers.dtype.type(1)
    differences: Numbers = (folded >> 1) ^ (~(folded & 1) + folded.dtype.type(1))
    return differences


def _planes(numbers: Numbers) -> Iterator[bytes]:
    while len(numbers):
        more = numbers > 127
        deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, _STRATEGY)
        plane = ((numbers & 127) | np.where(more, 128, 0)).astype(np.uint8)
        packed = deflate.compress(plane.data) + deflate.flush()
        yield _LENGTH.pack(len(packed)) + packed
        numbers = numbers[more] >> 7


class _Reader:
    """Reads numbers sequentially from a delta."""

    def __init__(self, delta: Blob) -> None:
        self._delta, self._at = delta.data, 0

    def length(self) -> int:
        (length,) = _LENGTH.unpack_from(self._delta, self._at)
        self._at += _LENGTH.size
        return int(length)

    def numbers(self, count: int, dtype: type[np.unsignedinteger[Any]], *, shift: int = 0) -> Numbers:
        if shift >= 8 * np.dtype(dtype).itemsize:
            raise ValueError("a number longer than its type")
        packed = self.length()
        start, self._at = self._at, self._at + packed
        inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(self._delta[start : self._at], count)
        plane = np.frombuffer(inflated, np.uint8)
        if len(plane) != count:
            raise ValueError(f"expected {count} numbers, found {len(plane)}")
        found = (plane & 127).astype(dtype)
        if further := int(np.count_nonzero(more := plane > 127)):
            found[more] |= self.numbers(further, dtype, shift=shift + 7) << dtype(7)
        return found
