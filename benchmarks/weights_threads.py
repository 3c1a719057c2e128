"""Encoding and applying a difference of two versions with one and with two threads.

    python -m benchmarks.weights_threads

Made-up bf16 weights of 0.25 GB, of which 1 % and 5 % changed by one unit, as in a step of training. Rounds alternate
between the two; every result is compared byte by byte. The benchmark fails if only one of two threads works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from benchmarks.measuring import BYTES_PER_GB, print_records, write_result
from benchmarks.origin import parsed
from tidemill.core.records import DeltaEntry, PolicyVersion, TensorEntry
from tidemill.weights.delta import Threads, apply_delta, encode_delta
from tidemill.weights.snapshot import Blob, allocate, checksum

T = TypeVar("T")
R = TypeVar("R")

ROUNDS, AIM = 10, 1.6
NBYTES, TENSORS = 1 << 28, 64
BASE = PolicyVersion(number=0, digest="")


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    cases = [measured(share) for share in (0.01, 0.05)]
    print_records("differences of 0.25 GB, one and two threads", cases)
    write_result("weights_threads", {"rounds": ROUNDS, "aim": AIM, "cases": cases})
    return 0 if all(case["reached"] for case in cases) else 1


class SeenThreads(Threads):
    """Threads that note who worked."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.seen: set[int] = set()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        def noted(item: T) -> R:
            self.seen.add(threading.get_ident())
            return function(item)

        return super().map(noted, items)


def measured(share: float) -> dict[str, Any]:
    """Raises RuntimeError: the results differ, or two threads did not share the work."""
    tensors, old, new = versions(share)
    one, two = SeenThreads(1), SeenThreads(2)
    seconds: dict[str, list[float]] = {"encode_1": [], "encode_2": [], "apply_1": [], "apply_2": []}
    ratios = []
    wanted = encode_delta(tensors, old, new)
    for _ in range(ROUNDS):
        spent = {}
        for name, threads in (("1", one), ("2", two)):
            began = time.perf_counter()
            delta, parts = encode_delta(tensors, old, new, threads)
            encoded = time.perf_counter()
            entry = DeltaEntry(base=BASE, base_digest="", nbytes=len(delta), checksum=checksum(delta), parts=parts)
            out = allocate(NBYTES)
            began_apply = time.perf_counter()
            apply_delta(tensors, delta, entry, old, out, threads)
            seconds[f"encode_{name}"].append(encoded - began)
            seconds[f"apply_{name}"].append(time.perf_counter() - began_apply)
            spent[name] = seconds[f"encode_{name}"][-1] + seconds[f"apply_{name}"][-1]
            if not np.array_equal(delta, wanted[0]) or parts != wanted[1] or not np.array_equal(out, new):
                raise RuntimeError("threads changed the result")
        ratios.append(spent["1"] / spent["2"])
    two.close()
    if (len(one.seen), len(two.seen)) != (1, 2):
        raise RuntimeError(f"{len(one.seen)} and {len(two.seen)} threads worked, expected 1 and 2")
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {
        "changed": share,
        "delta_share": len(wanted[0]) / NBYTES,
        **medians,
        "encode_gb_per_s_2": NBYTES / BYTES_PER_GB / medians["encode_2_s"],
        "apply_gb_per_s_2": NBYTES / BYTES_PER_GB / medians["apply_2_s"],
        "times_faster": statistics.median(ratios),
        "times_faster_low": min(ratios),
        "times_faster_high": max(ratios),
        "reached": statistics.median(ratios) >= AIM,
    }


def versions(share: float) -> tuple[list[TensorEntry], Blob, Blob]:
    """Equal tensors side by side, and the same with a share of the elements one unit higher or lower."""
    rng = np.random.default_rng(0)
    old, new = allocate(NBYTES), allocate(NBYTES)
    patterns = (rng.normal(0, 0.02, NBYTES // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    old[:] = patterns.view(np.uint8)
    changed = rng.random(len(patterns)) < share
    patterns[changed] += rng.choice(np.array([1, 0xFFFF], np.uint16), np.count_nonzero(changed))
    new[:] = patterns.view(np.uint8)
    size = NBYTES // TENSORS
    tensors = [
        TensorEntry(name=str(at), dtype="bfloat16", shape=(size // 2,), offset=at * size, nbytes=size, checksum=0)
        for at in range(TENSORS)
    ]
    return tensors, old, new


if __name__ == "__main__":
    sys.exit(main())
