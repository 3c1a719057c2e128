"""One training step: time, memory and MFU of token trees and of a Hugging Face step on the same samples.

    python -m benchmarks.gpu.train_step [--device cpu --tiny]

Qwen3 shapes with random weights; fp32 weights, bf16 computation, AdamW; the 8B shape with LoRA on bf16 weights. Groups
of 8 samples with a common prompt. *shared*: the prompt of a group is computed once. *unshared*: the same path, a tree
for each sample. *padded*: transformers' own forward pass with SDPA; all samples are equally long, so that nothing is
padded, which favours it. `mean_logprob` must be equal. MFU counts computed tokens, each once, against a bf16
product measured in the same run; what is computed again is counted apart, as `recomputed_tflops`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.device_peaks import peak_tflops
from benchmarks.gpu.qwen_shapes import SHAPES, TINY, Shape, config_fields, random_model, recomputed_flops, step_flops
from benchmarks.gpu.rows import Rows, options, peak_gb, seconds
from tidemill.config.learning import TrainerConfig
from tidemill.models.attention import use_packed_attention
from tidemill.models.recomputation import keep_products_of_mlps
from tidemill.models.token_logprobs import Targets
from tidemill.models.token_tree import TokenTree, build_tree
from tidemill.models.tree_forward import TreeForward

GROUPS, GROUP_SIZE, PROMPT, COMPLETION = 4, 8, 512, 512
MICROBATCH_TOKENS = 16_384
ROUNDS = 3
LORA_RANK = 16
RECOMPUTATION = ("nothing", "mlp activations", "layers")
"""In the backward pass; the first that fits is measured."""
Samples: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids, [samples, prompt + completion]."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Samples of a step, and an advantage for each."""

    tokens: Samples
    advantages: list[float]
    group_size: int
    prompt: int

    @property
    def trained(self) -> int:
        return len(self.tokens) * int(self.tokens.shape[1] - self.prompt)


def main() -> int:
    found = options("One training step in token trees and padded.")
    if found is None:
        return 2
    rows = Rows("gpu_train_step", found)
    peak = peak_tflops(rows.device) if rows.device.type == "cuda" else None
    for shape in (TINY,) if rows.tiny else SHAPES.values():
        work = random_work(shape, tiny=rows.tiny)
        lora = shape.name == "8B"
        for name in ("shared", "unshared", "padded"):
            measure = partial(step, shape, work, name, rows.device, peak, lora=lora)
            rows.measure("train_step", measure, model=shape.name, way=name, lora=lora, **about(shape, work))
    return rows.finish()


def about(shape: Shape, work: Work) -> dict[str, Any]:
    """The model and the samples of a row."""
    samples, length = work.tokens.shape
    return {
        "config": config_fields(shape),
        "samples": samples,
        "group_size": work.group_size,
        "prompt_tokens": work.prompt,
        "completion_tokens": length - work.prompt,
        "microbatch_tokens": MICROBATCH_TOKENS,
    }


def random_work(shape: Shape, *, tiny: bool, completion: int = COMPLETION) -> Work:
    groups, size, prompt, completion = (2, 3, 12, 8) if tiny else (GROUPS, GROUP_SIZE, PROMPT, completion)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, shape.vocabulary, (groups, 1, prompt)).repeat(size, 1)
    completions = rng.integers(1, shape.vocabulary, (groups, size, completion))
    tokens = np.concatenate([prompts, completions], 2).reshape(groups * size, -1).astype(np.int32)
    return Work(tokens=tokens, advantages=rng.normal(size=len(tokens)).tolist(), group_size=size, prompt=prompt)


def step(shape: Shape, work: Work, way: str, device: torch.device, peak: float | None, *, lora: bool) -> dict[str, Any]:
    """Time of a whole step with as little recomputation as its memory allows."""
    for again in RECOMPUTATION:
        try:
            return _step(shape, work, way, device, peak, lora=lora, again=again)
        except torch.OutOfMemoryError:
            if again == RECOMPUTATION[-1]:
                raise
        gc.collect()  # outside of the handler, whose traceback holds the model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    raise AssertionError("unreachable")


def _step(
    shape: Shape, work: Work, way: str, device: torch.device, peak: float | None, *, lora: bool, again: str
) -> dict[str, Any]:
    """Time of a whole step: forward, backward and update."""
    model = random_model(shape, device, torch.bfloat16 if lora else torch.float32)
    model.config.use_cache = False
    if again == "layers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif again == "mlp activations":
        keep_products_of_mlps(model)
    model.train()
    if lora:
        adapted = with_adapter(model)
        model = adapted.get_base_model()  # the same model, with the adapter in its layers
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type == "cuda")
    autocast = torch.bfloat16 if device.type == "cuda" else None
    if way == "padded":
        computed, attended = padded_work(work)
        microbatches: Callable[[], Iterator[Tensor]] = partial(padded_logprobs, model, work, device, autocast)
    else:
        use_packed_attention(model)
        forward = TreeForward(model, autocast=autocast, device=device)
        parts = list(split(work, share=way == "shared"))
        trees = [tree_of(part, share=way == "shared") for part in parts]
        computed, attended = tree_work(trees)
        microbatches = partial(tree_logprobs, forward, parts, trees, work.prompt, device)
    advantages = torch.tensor(work.advantages, device=device)

    def whole() -> float:
        total, at = 0.0, 0
        for logprobs in microbatches():  # [samples, completion]
            loss = -(logprobs * advantages[at : at + len(logprobs), None]).sum() / work.trained
            loss.backward()
            total, at = total + float(logprobs.detach().sum()), at + len(logprobs)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / work.trained

    first = whole()  # before any update
    took_s = seconds(whole, device, 1 if device.type == "cpu" else ROUNDS)
    flops = step_flops(shape, tokens=computed, attended=attended)
    rate = flops / took_s / 1e12
    again_flops = recomputed_flops(shape, tokens=computed, attended=attended) if again == "layers" else 0.0
    return {
        "seconds": took_s,
        "recomputes": again == "layers",
        "recomputation": again,
        "recomputed_tflops": again_flops / took_s / 1e12,
        "computed_tokens": computed,
        "trained_tokens_per_s": work.trained / took_s,
        "sample_tokens_per_s": work.tokens.size / took_s,
        "tflops": rate,
        "mfu": None if peak is None else rate / peak,
        "peak_memory_gb": peak_gb(device),
        "mean_logprob": first,
    }


def with_adapter(model: PreTrainedModel) -> Any:
    """Add LoRA to all linear layers. Raises ImportError: peft is missing."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear"))


def split(work: Work, *, share: bool) -> Iterator[Samples]:
    """Samples of each microbatch: whole groups that share their prompt, or samples one by one, up to the budget."""
    length = work.tokens.shape[1]
    nodes = work.prompt + work.group_size * (length - work.prompt) if share else length
    at_once = max(1, MICROBATCH_TOKENS // nodes) * (work.group_size if share else 1)
    for start in range(0, len(work.tokens), at_once):
        yield work.tokens[start : start + at_once]


def tree_of(samples: Samples, *, share: bool) -> TokenTree:
    """One tree in which equal prefixes are one node, or a tree for each sample."""
    if share:
        return build_tree(list(samples))
    count, length = samples.shape
    starts = np.arange(count) * length
    return TokenTree(
        token_ids=samples.reshape(-1).astype(np.int64),
        depths=np.tile(np.arange(length), count),
        ends=np.repeat(starts + length, length),
        paths=tuple(start + np.arange(length) for start in starts),
    )


def tree_work(trees: Sequence[TokenTree]) -> tuple[int, int]:
    """Computed tokens, and pairs of a token and one that it attends to."""
    return sum(tree.size for tree in trees), sum(int((tree.depths + 1).sum()) for tree in trees)


def padded_work(work: Work) -> tuple[int, int]:
    samples, length = work.tokens.shape
    return samples * length, samples * length * (length + 1) // 2


def tree_logprobs(
    forward: TreeForward, parts: Sequence[Samples], trees: Sequence[TokenTree], prompt: int, device: torch.device
) -> Iterator[Tensor]:
    """Logprobs of the completions of each microbatch, [samples, completion], with gradient."""
    for samples, tree in zip(parts, trees, strict=True):
        predicting = np.stack([path[prompt - 1 : -1] for path in tree.paths])
        nodes, rows = np.unique(predicting, return_inverse=True)
        order = np.argsort(rows.reshape(-1), kind="stable")
        targets = Targets(
            torch.from_numpy(rows.reshape(-1)[order]).to(device),
            torch.from_numpy(samples[:, prompt:].reshape(-1)[order].astype(np.int64)).to(device),
            1.0,
            TrainerConfig().logits_bytes(on_gpu=device.type == "cuda"),
        )
        found = forward(tree, torch.from_numpy(nodes).to(device), targets).logprobs
        back = torch.from_numpy(np.argsort(order, kind="stable")).to(device)
        yield found[back].view(predicting.shape)


def padded_logprobs(
    model: PreTrainedModel, work: Work, device: torch.device, autocast: torch.dtype | None
) -> Iterator[Tensor]:
    """The same by transformers' own forward pass, whose logits are of the completion only."""
    length = work.tokens.shape[1]
    at_once = max(1, MICROBATCH_TOKENS // length)
    for start in range(0, len(work.tokens), at_once):
        tokens = torch.from_numpy(work.tokens[start : start + at_once].astype(np.int64)).to(device)
        keep = length - work.prompt + 1
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = model(input_ids=tokens, logits_to_keep=keep).logits[:, :-1]
        yield torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, work.prompt :, None]).squeeze(-1)


if __name__ == "__main__":
    sys.exit(main())
