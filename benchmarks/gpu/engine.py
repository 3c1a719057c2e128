"""Tokens per second of both engines, of vLLM alone and of transformers, and the time of a weight swap.

    python -m benchmarks.gpu.engine [--device cpu --tiny]

Qwen3 shapes with random weights in bf16; groups of 8 samples with a common prompt. *embedded* is Tidemill's own engine,
*vllm* Tidemill's vLLM engine, *vllm alone* `LLM.generate`, and *transformers* its continuous batching as it comes, with
the same prompts and numbers of tokens. Rows of vLLM are skipped where it is not installed. `share_of_bound` is a share
of the rate at which the measured bandwidth could read weights, keys and values, and a common prompt once. A swap is
binding a snapshot in host memory and loading it, then one token.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.gpu.check_rows import Skip
from benchmarks.gpu.device_peaks import share_of_bound
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
        bound = partial(share_of_bound, shape, sizes, rows.device)
        about = {
            "model": shape.name,
            "config": config_fields(shape),
            "samples": groups * size,
            "group_size": size,
            "prompt_tokens": prompt,
            "completion_tokens": new_tokens,
            "slots": SLOTS,
        }
        for name, generate in (
            ("embedded", partial(embedded, shape, asked, rows.device)),
            ("vllm", partial(vllm, shape, asked, rows.device)),
            ("vllm alone", partial(vllm_alone, shape, asked)),
            ("transformers", partial(transformers_batches, shape, asked, rows.device)),
        ):
            rows.measure("engine", partial(with_bound, generate, bound), engine=name, **about)
    return rows.finish()


def with_bound(generate: Callable[[], dict[str, Any]], bound: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    found = generate()
    return {**found, **bound(found["seconds"])}


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


def transformers_batches(shape: Shape, asked: Sequence[GenerateRequest], device: torch.device) -> dict[str, Any]:
    """Continuous batching of transformers, after one request for warming up.

    Raises:
        Skip: this version of transformers has none.
        RuntimeError: it stopped, or generated other numbers of tokens.
    """
    model = random_model(shape, device, DTYPE).eval()
    batches = getattr(model, "continuous_batching_context_manager", None)
    if batches is None:
        raise Skip("this version of transformers has no continuous batching")
    new_tokens = asked[0].sampling.max_new_tokens
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0
    )
    limits = None  # chosen by the memory of a GPU; a CPU would get a cache of gigabytes
    if device.type == "cpu":
        from transformers import ContinuousBatchingConfig

        limits = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    prompts = [unpack_tokens(request.prompt_ids) for request in asked]
    with batches(generation_config=sampling, continuous_batching_config=limits, block=True, timeout=5) as manager:
        lengths_of(manager, prompts[:1], new_tokens)
        wait(device)
        began = time.perf_counter()
        lengths = lengths_of(manager, prompts, new_tokens)
        took_s = time.perf_counter() - began
    if lengths != [new_tokens] * len(asked):
        raise RuntimeError(f"generated {sum(lengths)} tokens")
    rate = {"seconds": took_s, "tokens": sum(lengths), "tokens_per_s": sum(lengths) / took_s}
    return {**rate, "attention": model.config._attn_implementation, "peak_memory_gb": peak_gb(device)}


def lengths_of(manager: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
    """Generated tokens of each prompt, in the order in which they ended."""
    manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=new_tokens)
    lengths = list[int]()
    while len(lengths) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            lengths.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers stopped generating")
    return lengths


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
