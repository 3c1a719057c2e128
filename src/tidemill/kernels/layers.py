"""RMSNorm, rotary embeddings and SwiGLU, each in one kernel that rounds where transformers' Llama does. No gradients.

A program computes one row, one head or 1,024 elements, so the bits of a row do not depend on the other rows.

Tested in Triton's interpreter and compiled for compute capabilities 8.0 and 9.0; not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * states / rms(states)` [..., W], rounded before the product. Source: arXiv 1910.07467."""
    states, width = states.contiguous(), states.shape[-1]
    out = torch.empty_like(states, dtype=torch.promote_types(states.dtype, weight.dtype))
    padded = triton.next_power_of_2(width)
    warps = max(1, min(8, padded // 512))
    _rms_norm[(out.numel() // width,)](states, weight, out, epsilon, WIDTH=width, PADDED=padded, num_warps=warps)
    return out


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of transformers for [1, heads, N, D], or [1, N, heads, D] if `unsqueeze_dim` is 2.

    The last dimension is contiguous. `cos` and `sin` are contiguous [1, N, D]. Source: arXiv 2104.09864.
    """
    tokens, width = cos.shape[1:]
    head_dim, token_dim = unsqueeze_dim, 3 - unsqueeze_dim
    heads = [query.shape[head_dim], key.shape[head_dim]]
    out = query.new_empty((1, tokens, sum(heads), width), dtype=torch.promote_types(query.dtype, cos.dtype))
    strides = (each.stride(dim) for each in (query, key) for dim in (token_dim, head_dim))
    _rotate[(tokens, sum(heads))](
        query, key, cos, sin, out, heads[0], *strides, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=1,
        enable_fp_fusion=False,  # torch rounds both products
    )  # fmt: skip
    rotated_query, rotated_key = out.transpose(1, token_dim).split(heads, head_dim)
    return rotated_query, rotated_key


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of one shape and dtype, rounded before the product. Source: arXiv 2002.05202."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _read(places, inside):
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm(states, weight, out, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    start, columns = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, PADDED)
    inside = columns < WIDTH
    x = _read(states + start + columns, inside)
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = x.to(states.dtype.element_ty).to(tl.float32) * _read(weight + columns, inside)
    tl.store(out + start + columns, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    query, key, cos, sin, out, heads, query_token, query_head, key_token, key_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < heads:
        source = query + token * query_token + head * query_head
    else:
        source = key + token * key_token + (head - heads) * key_head
    dims, angles = tl.arange(0, PADDED), token * WIDTH + tl.arange(0, PADDED)
    inside, opposite = dims < WIDTH, (dims + WIDTH // 2) % WIDTH
    x, y = _read(source + dims, inside), _read(source + opposite, inside)
    x = (x * _read(cos + angles, inside)).to(out.dtype.element_ty).to(tl.float32)
    y = (y * _read(sin + angles, inside)).to(out.dtype.element_ty).to(tl.float32)
    result = tl.where(dims < WIDTH // 2, x - y, x + y)
    target = out + (token * tl.num_programs(1) + head) * WIDTH
    tl.store(target + dims, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate, up, out, elements, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < elements
    x = _read(gate + places, inside)
    silu = tl.div_rn(x, 1.0 + tl.exp(-x)).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + places, (silu * _read(up + places, inside)).to(out.dtype.element_ty), mask=inside)
