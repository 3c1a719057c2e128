"""A long training step and decoding of 64 samples as shares of what the machine's matrix products allow.

    python -m benchmarks.matrix_rate [--only fp32|bf16]

SmolLM2, one thread. Training: forward and backward over 8 prompts of 20 tokens x 8 samples of 64 tokens. The matrix
rate is that of the same layers' products alone (forward and both of the backward pass), with a microbatch's number of
rows. Decoding: one token of each of 64 running samples, relative to the larger of its products alone (64 rows) and
reading weights and caches once at the measured bandwidth. Rounds of both sides alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.measuring import exit_code, print_records, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.stopping import interruptible
from benchmarks.turns import ONE_THREAD
from tidemill.core.records import GenerateRequest, PolicyVersion, SampleId, SamplingParams, pack_tokens
from tidemill.models.loading import load_model
from tidemill.models.tree_forward import TreeForward
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.trainer.packing import MaskedCompletion, PackedCompletions, pack_completions
from tidemill.trainer.scoring import token_logprobs

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 20, 64
MICROBATCH_GROUPS = 4  # about 2,100 packed tokens; by default at most 2,048
ROUNDS, DECODE_STEPS = 3, 10
TRAINING_AIM, DECODING_AIM = 0.75, 0.8
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description="Training and decoding relative to the machine's matrix rate.")
    parser.add_argument("--only", default=",".join(DTYPES), help="precisions, separated by commas")
    chosen = parsed(parser).only.split(",")
    os.environ |= ONE_THREAD
    torch.set_num_threads(1)
    quiet()
    records = [_record(name, DTYPES[name]) for name in chosen]
    print_records("SmolLM2, one thread", records)
    write_result("matrix_rate" + ("" if len(chosen) == len(DTYPES) else "-partial"), {"precisions": records})
    return exit_code(records)


def _record(name: str, dtype: torch.dtype) -> dict[str, Any]:
    model = load_model(smollm2(), device=CPU)
    training, products, flops = [], [], 0.0
    step = _training_step(model, dtype)
    step()
    for _ in range(ROUNDS):
        seconds, flops = _cpu_s(step)
        training.append(seconds)
        products.append(_products_s(model, dtype))
    rate, reached = statistics.median(products), flops / statistics.median(training)
    decoding = _decoding(load_model(smollm2(), device=CPU, dtype=dtype), dtype)
    return {
        "precision": name,
        "matrix_gflops": rate / 1e9,
        "training_s": statistics.median(training),
        "training_gflops": reached / 1e9,
        "training_share": reached / rate,
        "training_reached": reached / rate >= TRAINING_AIM,
        **decoding,
        "decoding_reached": decoding["decoding_share"] >= DECODING_AIM,
    }


def _cpu_s(call: Callable[[], float]) -> tuple[float, float]:
    started = time.thread_time()
    flops = call()
    return time.thread_time() - started, flops


def _layers(model: PreTrainedModel) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _training_step(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[], float]:
    """Forward and backward over the batch; returns the floating-point operations of its matrix products."""
    rng = np.random.default_rng(0)
    forward = TreeForward(model, autocast=None if dtype == torch.float32 else dtype)
    groups = []
    for _ in range(PROMPTS):
        prompt = pack_tokens(rng.integers(0, 49_152, PROMPT_TOKENS).tolist())
        completions = [pack_tokens(rng.integers(0, 49_152, NEW_TOKENS).tolist()) for _ in range(GROUP_SIZE)]
        groups.append([MaskedCompletion(prompt, completion) for completion in completions])
    batches = [list(chain(*groups[at : at + MICROBATCH_GROUPS])) for at in range(0, PROMPTS, MICROBATCH_GROUPS)]

    def step() -> float:
        flops = 0.0
        for batch in batches:
            packed = pack_completions(batch, CPU)
            output = token_logprobs(forward, packed, temperature=1.0, logits_budget_bytes=256 << 20)
            (0.01 * output.logprobs).sum().backward()
            flops += _flops(model, packed)
        check_gradients(model)
        model.zero_grad(set_to_none=True)
        return flops

    return step


def check_gradients(model: nn.Module) -> None:
    """Raises RuntimeError: the backward pass has not reached all weights, as the products do."""
    if missing := [name for name, parameter in model.named_parameters() if parameter.grad is None]:
        raise RuntimeError(f"no gradient of {missing[0]} and {len(missing) - 1} other weights")


def _flops(model: PreTrainedModel, packed: PackedCompletions) -> float:
    """Of the forward pass and both products of the backward pass; without attention."""
    head = model.get_output_embeddings()
    rows = {layer: len(packed.head_nodes) if layer is head else packed.tree.size for layer in _layers(model)}
    return sum(6.0 * count * layer.weight.numel() for layer, count in rows.items())


def _products_s(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Rate of the products of all distinct shapes of layers, weighted by their number; FLOP/s."""
    rows = MICROBATCH_GROUPS * (PROMPT_TOKENS + GROUP_SIZE * NEW_TOKENS)
    shapes = [tuple(layer.weight.shape) for layer in _layers(model)]
    flops = seconds = 0.0
    for shape in sorted(set(shapes)):
        weight, states, gradient = (
            torch.randn(*size).to(dtype) for size in (shape, (rows, shape[1]), (rows, shape[0]))
        )
        times = []
        for _ in range(2):  # the first is not measured
            started = time.thread_time()
            _ = states @ weight.T, gradient @ weight, gradient.T @ states
            times.append(time.thread_time() - started)
        seconds += shapes.count(shape) * times[1]
        flops += shapes.count(shape) * 6.0 * rows * weight.numel()
    return flops / seconds


def _decoding(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    version = PolicyVersion(number=0, digest="start")
    samples = PROMPTS * GROUP_SIZE
    engine = EmbeddedEngine(model, decode=lambda ids: "", slots=samples, context=256, version=version)
    rng = np.random.default_rng(0)
    prompts = [pack_tokens(rng.integers(0, 49_152, PROMPT_TOKENS).tolist()) for _ in range(PROMPTS)]
    sampling = SamplingParams(max_new_tokens=200)
    engine.submit(
        [
            GenerateRequest(
                sample_id=SampleId(run_seed=0, purpose="train", prompt_id=str(prompt), epoch=0, index=index),
                lease_id="",
                attempt=0,
                prompt_ids=prompts[prompt],
                sampling=sampling,
            )
            for prompt in range(PROMPTS)
            for index in range(GROUP_SIZE)
        ]
    )
    for _ in range(5):
        engine.poll(0.0)
    weights = [layer.weight for layer in _layers(model)]
    states = {size: torch.randn(samples, size).to(dtype) for size in {weight.shape[1] for weight in weights}}
    step_s, products_s, bandwidth = [], [], []
    before = engine.status().tokens_generated
    with torch.inference_mode():
        for _ in range(ROUNDS):
            step_s.append(_cpu_s(lambda: _steps(engine))[0] / DECODE_STEPS)
            products_s.append(_cpu_s(lambda: _products(weights, states))[0])
            bandwidth.append(_bandwidth())
    check_decoded(engine.status().tokens_generated - before)
    work = engine.status().work
    config = model.config
    row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    context = work.context_tokens / max(work.passes, 1)
    nbytes = sum(weight.numel() for weight in weights) * dtype.itemsize + context * row_bytes
    step, products = statistics.median(step_s), statistics.median(products_s)
    read_s = nbytes / statistics.median(bandwidth)
    return {
        "decode_step_s": step,
        "decode_products_s": products,
        "decode_read_s": read_s,
        "bandwidth_gb_s": statistics.median(bandwidth) / 1e9,
        "decoding_share": max(products, read_s) / step,
    }


def check_decoded(tokens: int) -> None:
    """Raises RuntimeError: not every measured step decoded a token of each sample, as the products do."""
    expected = ROUNDS * DECODE_STEPS * PROMPTS * GROUP_SIZE
    if tokens != expected:
        raise RuntimeError(f"the measured steps decoded {tokens} tokens, expected {expected}")


def _steps(engine: EmbeddedEngine) -> float:
    for _ in range(DECODE_STEPS):
        engine.poll(0.0)
    return 0.0


def _products(weights: list[torch.Tensor], states: dict[int, torch.Tensor]) -> float:
    for weight in weights:
        nn.functional.linear(states[weight.shape[1]], weight)
    return 0.0


def _bandwidth() -> float:
    """Bytes per second of reading 512 MB."""
    data = torch.ones(128 << 20)
    started = time.thread_time()
    data.sum()
    return data.nbytes / (time.thread_time() - started)


if __name__ == "__main__":
    sys.exit(interruptible(main))
