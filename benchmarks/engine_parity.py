"""Whether vLLM draws the tokens of the embedded engine, and how fast both are. Runs where vLLM is installed:

    .venv-vllm/bin/python -m benchmarks.engine_parity [--model large-vocabulary] [--samples 128] [--tokens 80]

Both engines of one process generate the same samples in fp32 with one thread, with SmolLM2 or with a random model of
151,936 tokens. Up to a sample's first
difference both have the same input, so every token until there is one comparison of draws. For a difference the
margin is printed: the distance of the two best noisy logits, from one forward pass.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.measuring import exit_code, write_result
from benchmarks.models import quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_equal
from tidemill.core.protocols import Engine
from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    SampleId,
    SamplingParams,
    WeightManifest,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.loading import load_model
from tidemill.models.snapshots import snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.rollout.engines.vllm.engine import VllmEngine, VllmSettings
from tidemill.rollout.sampling import gumbel, noise_key
from tidemill.weights.snapshot import Snapshot, allocate

SLOTS, PROMPT_TOKENS = 32, 24
VERSION = PolicyVersion(number=0, digest="start")


def no_text(token_ids: Sequence[int]) -> str:
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws of vLLM and of the embedded engine.")
    parser.add_argument("--model", choices=("smollm2", "large-vocabulary"), default="smollm2")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=80)
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    folder, device = smollm2() if options.model == "smollm2" else large_vocabulary(), torch.device("cpu")
    model = load_model(folder, device=device)
    context = PROMPT_TOKENS + options.tokens
    embedded = EmbeddedEngine(model, decode=no_text, slots=SLOTS, context=context, version=VERSION)
    settings = VllmSettings(model=str(folder), dtype="float32", slots=SLOTS, context=context)
    vllm = VllmEngine(settings, decode=no_text, version=VERSION)
    layout = snapshot_layout(model, torch.float32)
    buffer = allocate(snapshot_bytes(layout))
    write_snapshot(model, layout, buffer)
    manifest = WeightManifest(version=VERSION, digest="start", nbytes=len(buffer), tensors=layout)
    vllm.bind([Snapshot(manifest=manifest, buffer=buffer)], "learned")
    vllm.load(VERSION)
    asked = requests(options.samples, options.tokens, model.config.vocab_size)
    sides: dict[str, Any] = {name: generated(engine, asked) for name, engine in (("ours", embedded), ("vllm", vllm))}
    found = compared(asked, sides["ours"], sides["vllm"], lambda known: logits_of(model, known))
    found |= {f"{name}_tokens_per_cpu_s": side["tokens"] / side["cpu_s"] for name, side in sides.items()}
    found["reached"] = found["equal_share"] == found["logprobs_within_1e-4"] == 1.0
    print(found)
    write_result("engine_parity" if options.model == "smollm2" else "engine_parity_large_vocabulary", found)
    return exit_code(found)


def large_vocabulary() -> Path:
    """A random two-layer Qwen2 with the vocabulary of Qwen2.5, whose tokens have different probabilities."""
    folder = smollm2()
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    made = Path(tempfile.mkdtemp())
    Qwen2ForCausalLM(config).save_pretrained(made)
    for file in folder.glob("*token*"):  # any tokenizer: ids are given
        shutil.copy(file, made)
    return made


def requests(samples: int, tokens: int, vocabulary: int) -> list[GenerateRequest]:
    """Different random prompts."""
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            sample_id=SampleId(run_seed=0, purpose="parity", prompt_id=str(index), epoch=0, index=0),
            lease_id="local",
            attempt=0,
            prompt_ids=pack_tokens(rng.integers(0, vocabulary, PROMPT_TOKENS).tolist()),
            sampling=SamplingParams(max_new_tokens=tokens),
        )
        for index in range(samples)
    ]


def generated(engine: Engine, asked: Sequence[GenerateRequest]) -> dict[str, Any]:
    tokens: dict[SampleId, list[int]] = {one.sample_id: [] for one in asked}
    logprobs: dict[SampleId, list[float]] = {one.sample_id: [] for one in asked}
    started_s, left = time.process_time(), len(asked)
    engine.submit(asked)
    while left:
        for delta in engine.poll(1.0):
            tokens[delta.sample_id] += unpack_tokens(delta.token_ids)
            logprobs[delta.sample_id] += unpack_logprobs(delta.logprobs)
            left -= delta.finish is not None
    count = sum(map(len, tokens.values()))
    return {"drawn": tokens, "logprobs": logprobs, "tokens": count, "cpu_s": time.process_time() - started_s}


def compared(
    asked: Sequence[GenerateRequest],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    logits: Callable[[list[int]], torch.Tensor],
) -> dict[str, Any]:
    """Draws with equal input, differences with their margins, and the differences of equal tokens' logprobs.

    Raises:
        RuntimeError: a side has not generated all tokens.
    """
    tokens = sum(one.sampling.max_new_tokens for one in asked)
    check_equal("numbers of tokens", {"asked": tokens, "ours": ours["tokens"], "vLLM": theirs["tokens"]})
    draws, margins, apart = 0, list[float](), list[float]()
    for one in asked:
        name, prompt = one.sample_id, unpack_tokens(one.prompt_ids)
        for at, (mine, other) in enumerate(zip(ours["drawn"][name], theirs["drawn"][name], strict=True)):
            draws += 1
            if mine != other:
                known = prompt + ours["drawn"][name][:at]
                scores = logits(known)
                noise = gumbel([noise_key(name.seed(), len(known) - 1)], len(scores), scores.device)[0]
                best = (scores + noise).topk(2).values
                margins.append(float(best[0] - best[1]))
                break
            apart.append(abs(ours["logprobs"][name][at] - theirs["logprobs"][name][at]))
    return {
        "draws": draws,
        "equal_share": 1 - len(margins) / draws,
        "margins_of_differences": margins,
        "logprob_difference_median": float(np.median(apart)),
        "logprob_difference_99.9%": float(np.quantile(apart, 0.999)),
        "logprob_difference_largest": max(apart),
        "logprobs_within_1e-4": float(np.mean(np.array(apart) <= 1e-4)),
    }


@torch.inference_mode()
def logits_of(model: Any, known: list[int]) -> torch.Tensor:
    from tidemill.models.attention import hidden_states, vocabulary_logits
    from tidemill.models.token_tree import build_tree
    from tidemill.models.tree_attention import TreePlan

    tree = build_tree([np.array(known, np.int32)])
    tokens, positions = torch.from_numpy(tree.token_ids), torch.from_numpy(tree.depths)
    hidden = hidden_states(model, tokens, positions, TreePlan(tree, tokens.device))
    return vocabulary_logits(model, hidden[-1:])[0]


if __name__ == "__main__":
    raise SystemExit(main())
