"""Attention in token trees on a GPU: FlexAttention against one dense mask, forward and backward.

    python -m benchmarks.gpu.tree_attention [--device cpu --tiny]

For trees of 500 to 16,000 nodes: largest differences of the output and the gradients, whether two backward passes give
the same bits, and times. On a CPU only the forward pass of FlexAttention exists.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import print_records, write_result
from benchmarks.origin import parsed
from tidemill.models.attention import AttentionPlan, masked_attention
from tidemill.models.token_tree import TokenTree, build_tree
from tidemill.models.tree_attention import FlexPlan

HEADS, KV_HEADS, WIDTH = 16, 8, 128
ROUNDS = 10
SCALING = WIDTH**-0.5
SHAPES = [(4, 100, 100), (8, 200, 150), (8, 900, 700), (16, 1000, 1000)]
"""Samples, and tokens of the prompt and of each completion."""


class DensePlan:
    """Attends with one mask of all pairs of nodes."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree, self._device = tree, device
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        if window not in self._masks:
            self._masks[window] = self._tree.ancestor_mask(self._device, window=window)[None, None]
        return masked_attention(query, key, value, self._masks[window], scaling)


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention in token trees on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="trees of 200 nodes, one round")
    options = parsed(parser)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU; use --device cpu --tiny", file=sys.stderr)
        return 2
    shapes = [(2, 20, 20)] if options.tiny else SHAPES
    records = [measured(*shape, device=device, rounds=1 if options.tiny else ROUNDS) for shape in shapes]
    print_records(f"attention in token trees, {device}", records)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    partial = "-quick" if options.tiny else ""
    write_result(f"gpu_tree_attention{partial}", {"device": name, "trees": records})
    return 0


def measured(samples: int, prompt: int, completion: int, *, device: torch.device, rounds: int) -> dict[str, Any]:
    """FlexAttention against a dense mask in the tree of one group."""
    tree = _group(samples, prompt, completion)
    backward = device.type == "cuda"
    dtype = torch.bfloat16 if backward else torch.float32
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, tree.size, WIDTH, generator=generator).to(device, dtype).requires_grad_(backward)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    plans: dict[str, AttentionPlan] = {"dense": DensePlan(tree, device), "flex": FlexPlan(tree, device)}
    dense, flex = (_pass(plan, states, backward=backward) for plan in plans.values())
    record: dict[str, Any] = {"nodes": tree.size, "unpacked_tokens": samples * (prompt + completion)}
    for name, expected, found in zip(("output", "d_query", "d_key", "d_value"), dense, flex, strict=False):
        difference = found.float() - expected.float()
        record[f"{name}_difference"] = float(difference.abs().max())
        record[f"{name}_relative"] = float(difference.norm() / expected.float().norm())
    if backward:
        again = _pass(plans["flex"], states, backward=True)
        record["different_bits"] = sum(not torch.equal(one, two) for one, two in zip(flex, again, strict=True))
    for name, plan in plans.items():
        record[f"{name}_ms"] = 1e3 * _seconds(partial(_pass, plan, states, backward=backward), device, rounds)
    record["speedup"] = record["dense_ms"] / record["flex_ms"]
    return record


def _group(samples: int, prompt: int, completion: int) -> TokenTree:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50_000, prompt)
    sequences = [np.concatenate([shared, rng.integers(0, 50_000, completion)]) for _ in range(samples)]
    return build_tree([sequence.astype(np.int32) for sequence in sequences])


def _pass(plan: AttentionPlan, states: list[Tensor], *, backward: bool) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    with torch.set_grad_enabled(backward):
        out = plan.attend(0, states[0], states[1], states[2], SCALING, None)
    return [out.detach(), *(torch.autograd.grad(out.float().square().sum(), states) if backward else ())]


def _seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of a call, after one that is not measured."""
    call()
    times = []
    for _ in range(rounds):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
