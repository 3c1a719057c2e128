"""Speed of the digest of weights on the CPU, beside a hash (xxh3) of every row in Python.

    python -m benchmarks.weights_digest

fp32 weights of the shapes of SmolLM2-135M and of 2,048-wide layers; one and two threads. Rounds alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import xxhash
from torch import nn

from benchmarks.measuring import BYTES_PER_GB, print_records, write_result
from benchmarks.origin import parsed
from tidemill.models.weights_digest import weights_digest

ROUNDS = 7
SHAPES = {
    "135M": {"width": 576, "inner": 1536, "kv": 192, "vocabulary": 49152, "layers": 30},
    "wide": {"width": 2048, "inner": 6144, "kv": 1024, "vocabulary": 32000, "layers": 6},
}


def main() -> int:
    parsed(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    cases = [measured(name, threads) for name in SHAPES for threads in (1, 2)]
    print_records("digests of fp32 weights", cases)
    write_result("weights_digest", {"rounds": ROUNDS, "shapes": SHAPES, "cases": cases})
    return 0


def measured(name: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model = nn.ParameterList(torch.randn(shape) for shape in shapes(**SHAPES[name]))
    nbytes = sum(parameter.nbytes for parameter in model)
    seconds: dict[str, list[float]] = {"digest": [], "xxh3": []}
    for measure_round in range(-1, ROUNDS):  # the first warms up
        for kind, function in (("digest", weights_digest), ("xxh3", hash_of_rows)):
            began = time.perf_counter()
            function(model)
            if measure_round >= 0:
                seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "weights": name,
        "threads": threads,
        "gb": nbytes / BYTES_PER_GB,
        **{f"{kind}_s": value for kind, value in medians.items()},
        **{f"{kind}_gb_per_s": nbytes / BYTES_PER_GB / value for kind, value in medians.items()},
        "digest_gb_per_s_best": nbytes / BYTES_PER_GB / min(seconds["digest"]),
        "xxh3_gb_per_s_best": nbytes / BYTES_PER_GB / min(seconds["xxh3"]),
    }


def shapes(*, width: int, inner: int, kv: int, vocabulary: int, layers: int) -> list[tuple[int, ...]]:
    """Of a Llama with tied embeddings."""
    matrices = [(width, width)] * 2 + [(kv, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    return [(vocabulary, width), *[*matrices, (width,), (width,)] * layers, (width,)]


def hash_of_rows(model: nn.Module) -> int:
    """The sum of the hashes of all rows, with the number of the row as the seed."""
    total = 0
    for parameter in model.parameters():
        data = parameter.detach().view(-1).view(torch.uint8).numpy().data
        size = len(data) // len(parameter)
        starts = range(0, len(data), size)
        total += sum(xxhash.xxh3_64_intdigest(data[at : at + size], row) for row, at in enumerate(starts))
    return total % 2**64


if __name__ == "__main__":
    sys.exit(main())
