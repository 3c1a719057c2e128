"""Tokens per second of both engines, of vLLM alone, and the time of a weight swap.

    python -m benchmarks.gpu.engine [--device cpu --tiny]

Qwen3 shapes with random weights in bf16; groups of 8 samples with a common prompt. *embedded* is Tidemill's own engine,
*vllm* Tidemill's vLLM engine, and *vllm alone* `LLM.generate` with the same prompts and numbers of tokens; rows of vLLM
are skipped where it is not installed. A swap is binding a snapshot in host memory and loading it, then one token.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.qwen_shapes import SHAPES, TINY, Shape, config_fields, random_model
from benchmarks.gpu.rows import Rows, options, peak_gb, seconds, wait
from tidemill.core.protocols import Engine
from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    SampleId,
    SamplingParams,
    WeightManifest,
    pack_tokens,
    unpack_tokens,
)
from tidemill.models.attention import use_packed_attention
from tidemill.models.snapshots import bind_snapshot, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.weights.snapshot import Snapshot, allocate

GROUPS, GROUP_SIZE, PROMPT, NEW_TOKENS = 32, 8, 512, 512
SLOTS = 256
DECODED = 3  # steps
FIRST, SECOND = (PolicyVersion(number=number, digest=str(number)) for number in range(2))
DTYPE = torch.bfloat16


def main() -> int:
    found = options("Tokens per second of engines.")
    if found is None:
        return 2
    rows = Rows("gpu_engine", found)
    for shape in (TINY,) if rows.tiny else (SHAPES["0.6B"], SHAPES["1.7B"], SHAPES["4B"]):
        sizes = (2, 3, 12, 8) if rows.tiny else (GROUPS, GROUP_SIZE, PROMPT, NEW_TOKENS)
        asked = requests(shape, *sizes)
        groups, size, prompt, new_tokens = sizes
        about = {
            "model": shape.name,
            "config": config_fields(shape),
            "samples": groups * size,
            "group_size": size,
            "prompt_tokens": prompt,
            "completion_tokens": new_tokens,
            "slots": SLOTS,
        }
        rows.measure("engine", partial(embedded, shape, asked, rows.device), engine="embedded", **about)
        rows.measure("engine", partial(vllm, shape, asked, rows.device), engine="vllm", **about)
        rows.measure("engine", partial(vllm_alone, shape, asked), engine="vllm alone", **about)
    return rows.finish()


def requests(shape: Shape, groups: int, size: int, prompt: int, new_tokens: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, shape.vocabulary, prompt).tolist() for _ in range(groups)]
    return [
        GenerateRequest(
            sample_id=SampleId(run_seed=0, purpose="benchmark", prompt_id=str(group), epoch=0, index=index),
            lease_id="benchmark",
            attempt=0,
            prompt_ids=pack_tokens(prompts[group]),
            sampling=SamplingParams(max_new_tokens=new_tokens),
        )
        for group in range(groups)
        for index in range(size)
    ]


def embedded(shape: Shape, asked: Sequence[GenerateRequest], device: torch.device) -> dict[str, Any]:
    model = random_model(shape, device, DTYPE)
    use_packed_attention(model.eval())
    snapshot = snapshot_of(model)
    engine = EmbeddedEngine(model, decode=no_text, slots=SLOTS, context=context_of(asked), version=FIRST)
    rate = generated(engine, asked, device)

    def bind() -> None:
        bind_snapshot(model, snapshot.manifest.tensors, snapshot.buffer)

    with torch.no_grad():
        return {**rate, "swap_s": swap(engine, bind, asked[0], device), "peak_memory_gb": peak_gb(device)}


def vllm(shape: Shape, asked: Sequence[GenerateRequest], device: torch.device) -> dict[str, Any]:
    """Raises ImportError: vLLM is not installed."""
    import vllm as _  # noqa: F401 -- to skip the row

    from tidemill.rollout.engines.vllm.engine import VllmEngine, VllmSettings

    with tempfile.TemporaryDirectory() as folder:
        settings = VllmSettings(
            model=config_folder(shape, Path(folder)),
            dtype="bfloat16",
            slots=SLOTS,
            context=context_of(asked),
            memory_fraction=0.6,
        )
        engine = VllmEngine(settings, decode=no_text, version=FIRST)
        snapshot = snapshot_of(random_model(shape, torch.device("cpu"), DTYPE))
        engine.bind([snapshot], "learned")
        engine.load(FIRST)
        rate = generated(engine, asked, device)
        found = {**rate, "swap_s": swap(engine, partial(engine.bind, [snapshot], "learned"), asked[0], device)}
        del engine
        gc.collect()
        return found


def vllm_alone(shape: Shape, asked: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Raises ImportError: vLLM is not installed."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=config_folder(shape, Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=SLOTS,
            max_model_len=context_of(asked),
            gpu_memory_utilization=0.6,
        )
        prompts = [{"prompt_token_ids": unpack_tokens(request.prompt_ids)} for request in asked]
        new_tokens = asked[0].sampling.max_new_tokens
        sampling = VllmSampling(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        llm.generate(prompts[:1], sampling, use_tqdm=False)
        began = time.perf_counter()
        done = llm.generate(prompts, sampling, use_tqdm=False)
        took_s = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in done)
        del llm
        gc.collect()
        return {"seconds": took_s, "tokens": tokens, "tokens_per_s": tokens / took_s}


def generated(engine: Engine, asked: Sequence[GenerateRequest], device: torch.device) -> dict[str, Any]:
    """Run all requests after one for warming up."""
    run(engine, asked[:1])
    wait(device)
    began = time.perf_counter()
    tokens = run(engine, asked)
    took_s = time.perf_counter() - began
    if tokens != sum(request.sampling.max_new_tokens for request in asked):
        raise RuntimeError(f"generated {tokens} tokens")
    return {"seconds": took_s, "tokens": tokens, "tokens_per_s": tokens / took_s}


def run(engine: Engine, asked: Sequence[GenerateRequest]) -> int:
    engine.submit(asked)
    left, tokens = len(asked), 0
    while left:
        for delta in engine.poll(1.0):
            tokens += len(unpack_tokens(delta.token_ids))
            left -= delta.finish is not None
    return tokens


def decode_step(shape: Shape, asked: Sequence[GenerateRequest], device: torch.device) -> dict[str, Any]:
    """Time of a step of the embedded engine that decodes all samples, and the device's part of it."""
    model = random_model(shape, device, DTYPE)
    use_packed_attention(model.eval())
    engine = EmbeddedEngine(model, decode=no_text, slots=SLOTS, context=context_of(asked), version=FIRST)
    engine.submit(asked)
    while engine.status().running < len(asked):
        engine.poll(0.0)  # one step at a time
    found: dict[str, Any] = {"rows": len(asked), "step_s": seconds(partial(engine.poll, 0.0), device, DECODED)}
    if device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.poll(0.0)
            wait(device)
        kernels = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
        found["device_s"] = sum(event.self_device_time_total for event in kernels) / 1e6
        found["kernels"] = sum(event.count for event in kernels)
    engine.abort([request.sample_id for request in asked])
    return found


def swap(engine: Engine, bind: Any, request: GenerateRequest, device: torch.device) -> float:
    """Seconds from a snapshot in host memory to the first token under it."""
    wait(device)
    began = time.perf_counter()
    bind()
    engine.load(SECOND)
    engine.submit([request])
    while not engine.poll(0.0):  # one step at a time
        pass
    took_s = time.perf_counter() - began
    engine.abort([request.sample_id])
    return took_s


def snapshot_of(model: PreTrainedModel) -> Snapshot:
    """The weights in host memory, as a puller prepares them."""
    layout = snapshot_layout(model, DTYPE)
    buffer = allocate(snapshot_bytes(layout))
    write_snapshot(model, layout, buffer)
    manifest = WeightManifest(version=SECOND, digest=SECOND.digest, nbytes=len(buffer), tensors=layout)
    return Snapshot(manifest=manifest, buffer=buffer)


def config_folder(shape: Shape, folder: Path) -> str:
    random_model(shape, torch.device("meta"), DTYPE).config.save_pretrained(folder)
    return str(folder)


def context_of(asked: Sequence[GenerateRequest]) -> int:
    return max(len(unpack_tokens(each.prompt_ids)) + each.sampling.max_new_tokens for each in asked)


def no_text(_: Sequence[int]) -> str:
    return ""


if __name__ == "__main__":
    sys.exit(main())
