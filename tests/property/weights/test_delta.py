"""Deltas lose nothing and hide nothing, whatever the bits."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tidemill.core.records import DeltaEntry, PolicyVersion, TensorEntry
from tidemill.weights import delta as module
from tidemill.weights.delta import INLINE, PATTERNS, Threads, apply_delta, encode_delta
from tidemill.weights.snapshot import Blob, Damaged, checksum

# Zeros, infinities, quiet and signalling NaN, the largest and smallest numbers: by sign, as bf16 patterns.
SPECIAL = [
    sign | pattern for sign in (0, 0x8000) for pattern in (0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF)
]
TWO = Threads(2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few elements make several chunks."""
    monkeypatch.setattr(module, "CHUNK", 7)


def described(blob: Blob, parts: tuple[int, ...]) -> DeltaEntry:
    base = PolicyVersion(number=1, digest="one")
    return DeltaEntry(base=base, base_digest="x", nbytes=len(blob), checksum=checksum(blob), parts=parts)


def tensors(dtype: str, elements: int, cut: int) -> tuple[TensorEntry, ...]:
    """Two tensors side by side, the second possibly empty."""
    width, cut = np.dtype(PATTERNS[dtype]).itemsize, min(cut, elements)
    return tuple(
        TensorEntry(
            name=str(start),
            dtype=dtype,
            shape=(end - start,),
            offset=start * width,
            nbytes=(end - start) * width,
            checksum=0,
        )
        for start, end in ((0, cut), (cut, elements))
    )


@st.composite
def changes(draw: st.DrawFn) -> tuple[tuple[TensorEntry, ...], Blob, Blob]:
    """Before and after: anything, or equal but for a few elements."""
    dtype = draw(st.sampled_from(sorted(PATTERNS)))
    patterns = np.dtype(PATTERNS[dtype])
    size = draw(st.integers(1, 60))
    shift = 16 if dtype == "float32" else 0
    element = st.integers(0, np.iinfo(patterns).max) | st.sampled_from([pattern << shift for pattern in SPECIAL])
    old = draw(arrays.arrays(patterns, size, elements=element))
    new = draw(arrays.arrays(patterns, size, elements=element))
    if draw(st.booleans()):
        few = draw(st.sets(st.integers(0, size - 1), max_size=4))
        new = np.where(np.isin(np.arange(size), list(few)), new, old).astype(patterns)
    return tensors(dtype, size, draw(st.integers(0, 20))), old.view(np.uint8), new.view(np.uint8)


@settings(max_examples=100)
@given(change=changes())
def test_every_bit_pattern_round_trips(change: tuple[tuple[TensorEntry, ...], Blob, Blob]) -> None:
    entries, old, new = change
    blob, parts = encode_delta(entries, old, new)
    shared, shared_parts = encode_delta(entries, old, new, TWO)
    assert (shared.tobytes(), shared_parts) == (blob.tobytes(), parts)
    for threads in (INLINE, TWO):
        out = np.full_like(old, 0xA5)
        apply_delta(entries, blob, described(blob, parts), old, out, threads)
        assert out.tobytes() == new.tobytes()
    in_place = old.copy()
    apply_delta(entries, blob, described(blob, parts), in_place, in_place)
    assert in_place.tobytes() == new.tobytes()


@settings(max_examples=100)
@given(change=changes(), data=st.data())
def test_every_truncation_and_flipped_bit_is_detected(
    change: tuple[tuple[TensorEntry, ...], Blob, Blob], data: st.DataObject
) -> None:
    entries, old, new = change
    blob, parts = encode_delta(entries, old, new)
    if data.draw(st.booleans(), label="cut"):
        wrong = blob[: data.draw(st.integers(0, len(blob) - 1))]
    else:
        wrong = blob.copy()
        wrong[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged, match="delta from version 1 is torn or corrupt"):
        apply_delta(entries, wrong, described(blob, parts), old, np.empty_like(old))


@settings(max_examples=100)
@given(change=changes(), data=st.data())
def test_garbage_with_a_valid_checksum_is_refused_or_harmless(
    change: tuple[tuple[TensorEntry, ...], Blob, Blob], data: st.DataObject
) -> None:
    """Whoever writes deltas by another rule gets an error that says so, or a result; nothing else."""
    entries, old, new = change
    blob, parts = encode_delta(entries, old, new)
    wrong = blob.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        wrong[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    wrong = wrong[: data.draw(st.integers(0, len(blob)))]
    with suppress(Damaged):
        apply_delta(entries, wrong, described(wrong, parts), old, np.empty_like(old))


def test_a_varint_longer_than_its_type_is_refused() -> None:
    """Planes that all say "goes on" would otherwise nest without end."""
    entries = tensors("bfloat16", 1, 1)
    endless = np.frombuffer(
        struct.pack("<I", 1) + b"".join(module._planes(np.array([2**31 - 1], np.uint32))) * 9, np.uint8
    )
    assert endless[4:].size  # gaps of up to five planes, then more
    old = np.zeros(2, np.uint8)
    with pytest.raises(Damaged, match="not decodable"):
        apply_delta(entries, endless, described(endless, (len(endless),)), old, old.copy())
