"""What deltas cost, their arithmetic by hand, and the threads that share them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tidemill.core.records import DeltaEntry, PolicyVersion, TensorEntry
from tidemill.weights.delta import Threads, _folded, _ordered, apply_delta, encode_delta
from tidemill.weights.snapshot import Blob, checksum


def one_tensor(buffer: Blob, dtype: str) -> tuple[TensorEntry, ...]:
    return (TensorEntry(name="w", dtype=dtype, shape=(-1,), offset=0, nbytes=len(buffer), checksum=0),)


def test_ordered_patterns_follow_the_floats() -> None:
    values = np.array([-np.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 2.5, np.inf], np.float32)
    numbers = _ordered(values.view(np.uint32))
    assert (np.diff(numbers.astype(np.int64)) > 0).all()
    assert int(numbers[4]) - int(numbers[3]) == 1  # the two zeros are neighbours


def test_small_differences_are_small_numbers() -> None:
    differences = np.array([1, -1, 2, -2, 32767, -32768], np.int16).view(np.uint16)
    assert _folded(differences).tolist() == [1, 0, 3, 2, 65533, 65534]


def test_a_small_update_is_below_a_twentieth() -> None:
    """4.5 % of a million bf16 elements move by one unit: log2(e/0.045) = 5.9 bits for where, 1 for the sign: 1/51."""
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16
    changed = rng.random(1 << 20) < 0.045
    new = old + np.where(changed, rng.choice([1, -1], 1 << 20), 0)
    before, after = (part.astype(np.uint16).view(np.uint8) for part in (old, new))
    delta, _ = encode_delta(one_tensor(before, "bfloat16"), before, after)
    assert len(before) / len(delta) > 45


def test_equal_versions_take_four_bytes_per_chunk() -> None:
    same = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)
    assert len(encode_delta(one_tensor(same, "float32"), same, same)[0]) == 5 * 4


def test_big_tensors_and_every_element_changed() -> None:
    rng = np.random.default_rng(1)
    old, new = (rng.integers(0, 256, 3 << 20, dtype=np.uint8) for _ in range(2))
    for dtype in ("bfloat16", "float32"):
        entries = one_tensor(old, dtype)
        delta, parts = encode_delta(entries, old, new)
        base = PolicyVersion(number=0, digest="")
        entry = DeltaEntry(base=base, base_digest="", nbytes=len(delta), checksum=checksum(delta), parts=parts)
        out = np.empty_like(old)
        apply_delta(entries, delta, entry, old, out)
        assert np.array_equal(out, new)
        assert len(delta) < 1.5 * len(new)  # random numbers do not get smaller, and not much larger either


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_are_in_order(count: int) -> None:
    threads = Threads(count)

    assert threads.map(lambda number: number**2, range(20)) == [number**2 for number in range(20)]
    threads.close()


def test_two_threads_work_at_the_same_time() -> None:
    threads, meeting = Threads(2), threading.Barrier(2, timeout=10)

    assert len(threads.map(lambda _: meeting.wait(), range(2))) == 2
    threads.close()


def test_a_failure_is_raised_when_nobody_works_any_more() -> None:
    threads, running = Threads(2), []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("broken")
        running.append(number)
        time.sleep(0.1)
        running.remove(number)

    with pytest.raises(ValueError, match="broken"):
        threads.map(work, range(4))
    assert running == []
    threads.close()
