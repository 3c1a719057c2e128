"""Triton kernels against torch: the same tokens, attention and gradients, the same bits in other batches, and speed.

On a CPU Triton's interpreter computes them, which proves neither races nor speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings, Skip
from benchmarks.gpu.device_peaks import bandwidth
from benchmarks.gpu.rows import seconds
from tidemill.core.records import SamplingParams
from tidemill.kernels.availability import missing
from tidemill.rollout.sampling import draw, noise_key, seed_state

if TYPE_CHECKING:
    from tidemill.kernels.decode import DecodeLayout

SAME = "a row's bits depend on nothing but the row"
FP32, BF16 = 1e-5, 0.02
"""Largest relative difference of attention: other order of sums; 8 bits of inputs and output."""
LAYERS_BF16 = 1e-3
"""Largest relative difference of a norm or SwiGLU: one bit of 8, in few of the elements."""
ROUNDS = 10


def kernels(rows: CheckRows) -> None:
    draws(rows)
    decoding(rows)
    layers(rows)


def draws(rows: CheckRows) -> None:
    rows.measure(
        "draw",
        partial(_drawn, rows.settings),
        [
            Limit("tokens_differ", 1, "a tie within an ulp of the noise"),
            Limit("logprob_difference", 1e-5, "fp32 logsumexp"),
            Limit("other_batch_differ", 0, SAME),
        ],
    )


def decoding(rows: CheckRows) -> None:
    settings = rows.settings
    for name, dtype, shared, window in (
        ("bf16, common prompts", torch.bfloat16, True, None),
        ("bf16, prompts apart", torch.bfloat16, False, None),
        ("bf16, window", torch.bfloat16, True, 300),
        ("fp32, common prompts", torch.float32, True, None),
    ):
        limits = [
            Limit("relative_difference", FP32 if dtype == torch.float32 else BF16, "torch in float32"),
            Limit("other_batch_differ", 0, SAME),
            Limit("repeated_differ", 0, "no atomic sums"),
        ]
        if settings.device.type == "cuda" and window is None and dtype == torch.bfloat16:
            limits.append(
                Limit("times_sdpa", 1.0, "the faster of SDPA with a mask and over the whole cache", least=True)
            )
        measure = partial(_decoded, settings, dtype, shared=shared, window=window)
        rows.measure(f"decode, {name}", measure, limits)


def layers(rows: CheckRows) -> None:
    for name, dtype, largest in (("bf16", torch.bfloat16, LAYERS_BF16), ("fp32", torch.float32, FP32)):
        limits = [
            Limit("relative_difference", largest, "transformers' modules; order of sums, `exp`"),
            Limit("rotations_differ", 0, "sums of two rounded products"),
            Limit("other_batch_differ", 0, SAME),
        ]
        rows.measure(f"layers, {name}", partial(_layers, rows.settings, dtype), limits)


def head_kernels(rows: CheckRows) -> None:
    settings = rows.settings
    for softcap in (None, 30.0):
        rows.measure(
            "output layer" if softcap is None else "output layer, soft cap",
            partial(_head, settings, softcap),
            [
                Limit("largest_difference", 1e-4, "float64; order of sums over the vocabulary"),
                Limit("gradient_difference", 1e-5, "float64, of the largest"),
                Limit("argmax_differ", 1, "a tie of two logits"),
                Limit("other_rows_differ", 0, SAME),
            ],
        )


def _available(settings: Settings) -> None:
    if why := missing(settings.device):
        raise Skip(why)


def _seconds(settings: Settings, call: Any) -> float | None:
    """None on a CPU, where the interpreter's time means nothing."""
    return seconds(call, settings.device, ROUNDS) if settings.device.type == "cuda" else None


def _drawn(settings: Settings) -> dict[str, Any]:
    _available(settings)
    from tidemill.kernels.draw import draw_tokens

    device, (count, vocabulary) = settings.device, (6, 2500) if settings.tiny else (256, 151_936)
    logits = 3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    seeds = [(0x9E3779B97F4A7C15 * (row + 1)) & ((1 << 64) - 1) for row in range(count)]
    positions = [row * 7919 for row in range(count)]
    warmth = [(1.0, 0.7, 0.0)[row % 3] for row in range(count)]
    states = torch.from_numpy(np.array([seed_state(seed) for seed in seeds], np.uint32).view(np.int32)).to(device)
    places, temperatures = torch.tensor(positions, device=device), torch.tensor(warmth, device=device)
    tokens, logprobs = draw_tokens(logits, states, places, temperatures)
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    params = [SamplingParams(max_new_tokens=1, temperature=each) for each in warmth]
    expected = draw(logits, keys, params)
    same = tokens == expected.token_ids
    some = slice(1, None, 3)
    alone = draw_tokens(*(each[some].contiguous() for each in (logits, states, places, temperatures)))
    took_s = _seconds(settings, lambda: draw_tokens(logits, states, places, temperatures))
    return {
        "tokens_differ": int((~same).sum()),
        "logprob_difference": float((logprobs - expected.logprobs).abs()[same].max()),
        "other_batch_differ": int(((alone[0] != tokens[some]) | (alone[1] != logprobs[some])).sum()),
        "seconds": took_s,
        "share_of_bandwidth": took_s and logits.nbytes / took_s / bandwidth(device),
        "torch_s": _seconds(settings, lambda: draw(logits, keys, params)),
    }


def _decoded(settings: Settings, dtype: torch.dtype, *, shared: bool, window: int | None) -> dict[str, Any]:
    """A step of groups of samples, each with another number of tokens after its prompt."""
    _available(settings)
    from tidemill.kernels.decode import DecodeLayout, decode

    device = settings.device
    dtype = dtype if device.type == "cuda" else torch.float32  # the interpreter multiplies the bits of bf16
    groups, size, prompt, own, heads, kv_heads, width = (2, 3, 40, 9, 4, 2, 16)
    if not settings.tiny:
        groups, size, prompt, own, heads, kv_heads, width = 32, 8, 512, 512, 16, 8, 128
    count, capacity = groups * size, prompt + own
    window = window and min(window, capacity // 2)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(count, kv_heads, capacity, width, generator=generator).to(device, dtype) for _ in "kv")
    query = torch.randn(count, heads, width, generator=generator).to(device, dtype)
    entries = torch.arange(count)
    lengths = prompt + 1 + entries * 37 % own
    first = entries // size * size if shared else entries

    def layout(chosen: Sequence[int]) -> DecodeLayout:
        """Of the entries of some groups."""
        kept = torch.tensor([entry for group in chosen for entry in range(group * size, (group + 1) * size)])
        starts = torch.arange(len(chosen)) * size
        parts = {
            "rows": kept,
            "lengths": lengths[kept].int(),
            "prefix_rows": first[kept],
            "prefix_lengths": torch.full_like(kept, prompt if shared else 0).int(),
            "group_first": starts.int(),
            "group_size": torch.full_like(starts, size if shared else 0).int(),
        }
        return DecodeLayout(**{name: each.to(device) for name, each in parts.items()})

    whole, chosen = layout(range(groups)), list(range(0, groups, 2))
    call = partial(decode, query, keys, values, whole, scaling=width**-0.5, window=window)
    found, again = call(), call()
    kept = torch.cat([torch.arange(group * size, (group + 1) * size) for group in chosen]).to(device)
    alone = decode(query[kept], keys, values, layout(chosen), scaling=width**-0.5, window=window)
    if shared:  # every sample has a copy of its prompt
        keys, values = keys.clone(), values.clone()
        for each in (keys, values):
            each[:, :, :prompt] = each[first.to(device), :, :prompt]
    places = torch.arange(capacity)
    visible = places < lengths[:, None]
    if window is not None:
        visible &= places >= lengths[:, None] - window
    mask = visible[:, None, None].to(device)

    def sdpa(query: Tensor, keys: Tensor, values: Tensor, *, masked: bool = True) -> Tensor:
        attend, allowed = functional.scaled_dot_product_attention, mask if masked else None
        return attend(query[:, :, None], keys, values, attn_mask=allowed, scale=width**-0.5, enable_gqa=True)[:, :, 0]

    expected = sdpa(query.float(), keys.float(), values.float())
    took_s, sdpa_s = _seconds(settings, call), _seconds(settings, partial(sdpa, query, keys, values))
    # Without a mask SDPA reads the whole cache, but may use its fastest kernel.
    whole_s = _seconds(settings, partial(sdpa, query, keys, values, masked=False))
    read = int(lengths.sum()) - (count - groups) * prompt * int(shared)
    nbytes = 2 * read * kv_heads * width * keys.element_size()
    return {
        "relative_difference": float((found.float() - expected).norm() / expected.norm()),
        "other_batch_differ": int((alone != found[kept]).any(-1).sum()),
        "repeated_differ": int((again != found).any(-1).sum()),
        "seconds": took_s,
        "share_of_bandwidth": took_s and nbytes / took_s / bandwidth(device),
        "times_sdpa": took_s and sdpa_s and whole_s and min(sdpa_s, whole_s) / took_s,
    }


def _layers(settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Norms of rows and of heads, rotary embeddings and SwiGLU of a step."""
    _available(settings)
    from tidemill.kernels.layers import rms_norm, rotate, swiglu

    device = settings.device
    dtype = dtype if device.type == "cuda" else torch.float32  # the interpreter truncates to bf16
    count, hidden, heads, kv_heads, width, inner = (6, 96, 4, 2, 16, 160)
    if not settings.tiny:
        count, hidden, heads, kv_heads, width, inner = 256, 1024, 16, 8, 128, 3072
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, count, *shape, generator=generator).to(device, dtype)

    states, head_states, gate, up = random(hidden), random(heads + kv_heads, width), random(inner), random(inner)
    query, key = head_states.transpose(1, 2).split([heads, kv_heads], 1)
    phases = random(width).float()
    cos, sin = phases.cos().to(dtype), phases.sin().to(dtype)
    norms = [LlamaRMSNorm(size).to(device, dtype).requires_grad_(False) for size in (hidden, width)]
    for norm in norms:
        norm.weight.copy_(random(len(norm.weight))[0, 0])

    def fused(rows: Tensor | slice = slice(None)) -> tuple[Tensor, ...]:
        normed = [
            rms_norm(each[:, rows], norm.weight, norm.variance_epsilon)
            for each, norm in zip((states, head_states), norms, strict=True)
        ]
        rotated = rotate(query[:, :, rows], key[:, :, rows], cos[:, rows], sin[:, rows])
        return *normed, swiglu(gate[:, rows], up[:, rows]), *(each.transpose(1, 2) for each in rotated)

    def torch_layers() -> tuple[Tensor, ...]:
        rotated = apply_rotary_pos_emb(query, key, cos, sin)
        normed = norms[0](states), norms[1](head_states)
        return *normed, functional.silu(gate) * up, *(each.transpose(1, 2) for each in rotated)

    found, expected = fused(), torch_layers()
    some = torch.arange(1, count, 3, device=device)
    differences = [
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(found, expected, strict=True)
    ]
    took_s, torch_s = _seconds(settings, fused), _seconds(settings, torch_layers)
    return {
        "relative_difference": max(differences[:3]),
        "rotations_differ": sum(int((found[at] != expected[at]).sum()) for at in (3, 4)),
        "other_batch_differ": sum(
            int((alone != whole[:, some]).sum()) for alone, whole in zip(fused(some), found, strict=True)
        ),
        "seconds": took_s,
        "torch_s": torch_s,
    }


def _head(settings: Settings, softcap: float | None) -> dict[str, Any]:
    """Logprobs, entropy, argmax and their gradient of rows of logits, two tokens a row."""
    _available(settings)
    from tidemill.kernels.head import HeadStatistics, HeadTokens, head_gradient, head_statistics

    device, (count, vocabulary) = settings.device, (5, 2500) if settings.tiny else (1024, 151_936)
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(count, vocabulary, generator=generator)).to(device)
    tokens = HeadTokens(
        torch.arange(0, 2 * count + 1, 2, device=device),
        torch.randint(vocabulary, (2 * count,), generator=generator).to(device),
    )
    grads = [torch.randn(2 * count, generator=generator).to(device) for _ in range(2)]
    scale: dict[str, Any] = {"temperature": 0.7, "softcap": softcap}

    def statistics(rows: slice) -> HeadStatistics:
        found = HeadStatistics.empty(count, 2 * count, device)
        head_statistics(logits[rows], rows.start, tokens, found, **scale)
        return found

    found, part = statistics(slice(0, count)), statistics(slice(2, 4))
    gradient = partial(head_gradient, logits, 0, tokens, found.normalizers, found.entropy, *grads, **scale)
    exact = logits.double().requires_grad_()
    z = (exact if softcap is None else softcap * torch.tanh(exact / softcap)) / 0.7
    logs = torch.log_softmax(z, -1)
    entropy = -(logs.exp() * logs).sum(-1)
    chosen = logs.repeat_interleave(2, 0).gather(1, tokens.token_ids[:, None])[:, 0]
    ((chosen * grads[0]).sum() + (entropy.repeat_interleave(2) * grads[1]).sum()).backward()
    assert exact.grad is not None
    with torch.no_grad():
        gaps = [found.logprobs - chosen, found.entropy - entropy, found.normalizers - z.logsumexp(-1)]
        largest = max(float(gap.abs().max()) for gap in gaps)
        error = (gradient(dtype=torch.float32) - exact.grad).abs().max() / exact.grad.abs().max()
    read_s = _seconds(settings, lambda: statistics(slice(0, count)))
    written_s = _seconds(settings, lambda: gradient(dtype=torch.bfloat16))
    return {
        "largest_difference": largest,
        "gradient_difference": float(error),
        "argmax_differ": int((found.argmax != z.argmax(-1)).sum()),
        "other_rows_differ": int((part.normalizers[2:4] != found.normalizers[2:4]).sum()),
        "statistics_share_of_bandwidth": read_s and logits.nbytes / read_s / bandwidth(device),
        "gradient_share_of_bandwidth": written_s and 1.5 * logits.nbytes / written_s / bandwidth(device),
        "log_softmax_s": _seconds(settings, lambda: torch.log_softmax(logits, -1)),
        "statistics_s": read_s,
    }
