"""Attention of one query per entry over rows of the KV cache; entries of a group read a common prefix once.

A program computes one part of the tokens of one entry and key-value head ("split KV", Flash-Decoding), and before it
the same part of the prefix of one group, for the queries of all its entries. A second kernel combines the parts in a
fixed order. Which token belongs to which part, and the shapes of all tiles, depend on nothing but the entry's own
length and prefix: its bits do not depend on the other entries, nor on the size of its group.

Tested in Triton's interpreter and compiled for compute capabilities 8.0 and 9.0; not run on a GPU yet, so that the
sizes of spans and tiles follow from registers and shared memory, not from measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 256  # consecutive tokens of a part; spans go to the parts in turn
_PARTS = 8
_BLOCK_ELEMENT_BYTES = 128  # of an element of the keys of the tokens that are loaded at once
_BLOCK_BYTES = 1 << 14  # of their keys
_TILE = 32  # queries of a group that are computed at once
_MIN_TILE = 16  # of a matrix product
_WARPS = 4
_STAGES = 2
_REGISTERS = 168  # of a thread: three programs on a multiprocessor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Which tokens of which row of the cache each of B entries attends to. All tensors are on the device.

    The first `prefix_lengths` tokens are read from `prefix_rows`, the others, at the same positions, from `rows`. An
    entry with a prefix is in exactly one group. The entries of a group are adjacent and have the same prefix.
    """

    rows: Tensor  # int64 [B]
    lengths: Tensor  # int32 [B], tokens with the newest; 0 for padding, whose output is 0
    prefix_rows: Tensor  # int64 [B]
    prefix_lengths: Tensor  # int32 [B]; 0 = no prefix
    group_first: Tensor  # int32 [G], G <= B: the first entry of a group; of no group, any entry
    group_size: Tensor  # int32 [G]; 0 = no group


def decode(
    query: Tensor, keys: Tensor, values: Tensor, layout: DecodeLayout, *, scaling: float, window: int | None
) -> Tensor:
    """[B, heads, W], the attention of the newest token of each entry.

    Args:
        query: [B, heads, D].
        keys: [N, kv_heads, C, D], with the keys of the newest tokens.
        values: [N, kv_heads, C, W].
        window: tokens that a query attends to, with itself; None for all.

    The last dimension of each is contiguous. Partial results take 2 B heads parts W floats of memory, where parts is
    up to 8, one for each 256 tokens of C.
    """
    entries, heads, width = query.shape
    kv_heads, capacity = keys.shape[1:3]
    value_width = values.shape[-1]
    parts = min(_PARTS, triton.next_power_of_2(triton.cdiv(capacity, _SPAN)))
    padded = max(_MIN_TILE, triton.next_power_of_2(width))
    padded_value = max(_MIN_TILE, triton.next_power_of_2(value_width))
    block_bytes = min(_BLOCK_ELEMENT_BYTES, _BLOCK_BYTES // max(padded, padded_value))
    block = max(_MIN_TILE, block_bytes // keys.element_size())
    repeats = heads // kv_heads
    partial = torch.empty((2, entries, heads, parts, value_width), dtype=torch.float32, device=query.device)
    statistics = torch.empty((2, 2, entries, heads, parts), dtype=torch.float32, device=query.device)
    out = torch.empty((entries, heads, value_width), dtype=query.dtype, device=query.device)
    _attend_part[(parts, kv_heads, entries)](
        query, keys, values, partial, statistics,
        layout.rows, layout.lengths, layout.prefix_rows, layout.prefix_lengths, layout.group_first, layout.group_size,
        len(layout.group_first), scaling * math.log2(math.e),
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        KEY_TOKEN=keys.stride(2), VALUE_TOKEN=values.stride(2), REPEATS=repeats, D=width, W=value_width,
        PADDED_D=padded, PADDED_W=padded_value, WINDOW=window or 0, SPAN=_SPAN, BLOCK=block,
        TILE=_TILE, OWN_TILE=_MIN_TILE if repeats <= _MIN_TILE else _TILE,
        num_warps=_WARPS, num_stages=_STAGES, maxnreg=_REGISTERS,
    )  # fmt: skip
    _combine_parts[(entries, heads)](
        partial, statistics, out, layout.lengths, layout.prefix_lengths,
        PARTS=parts, W=value_width, PADDED_W=padded_value, WINDOW=window or 0, SPAN=_SPAN, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _own_begin(length, prefix_length, WINDOW: tl.constexpr):
    """The first token that an entry reads from its own row."""
    if WINDOW:
        prefix_length = tl.maximum(prefix_length, length - WINDOW)
    return prefix_length


@triton.jit
def _blocks_of_part(blocks, part, PARTS, SPAN_BLOCKS: tl.constexpr):
    """How many of the first `blocks` blocks belong to a part."""
    turn = PARTS * SPAN_BLOCKS
    rest = tl.minimum(tl.maximum(blocks % turn - part * SPAN_BLOCKS, 0), SPAN_BLOCKS)
    return blocks // turn * SPAN_BLOCKS + rest


@triton.jit
def _attend_tokens(
    source, first, size, begin, end, keys, values,
    query, query_entry, query_head, lengths, partial, statistics, scale,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr, REPEATS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_W: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The part of tokens begin..end of one row, for the queries of `size` entries from `first` on."""
    part, parts, kv_head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    heads, entries = tl.num_programs(1) * REPEATS, tl.num_programs(2)
    SPAN_BLOCKS: tl.constexpr = SPAN // BLOCK
    dims, value_dims, steps = tl.arange(0, PADDED_D), tl.arange(0, PADDED_W), tl.arange(0, BLOCK)
    blocks = _blocks_of_part(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), part, parts, SPAN_BLOCKS)
    for tile in range(tl.where(blocks > 0, tl.cdiv(size * REPEATS, TILE), 0)):
        queries = tile * TILE + tl.arange(0, TILE)
        real = queries < size * REPEATS
        entry = (first + queries // REPEATS).to(tl.int64)
        head = kv_head * REPEATS + queries % REPEATS
        places = query + entry * query_entry + head * query_head
        tile_query = tl.load(places[:, None] + dims[None, :], mask=real[:, None] & (dims < D)[None, :], other=0.0)
        seen_from = tl.zeros([TILE], tl.int32) + begin
        skipped = 0
        if WINDOW:
            seen_from = tl.load(lengths + entry, mask=real, other=2147483647) - WINDOW
            earliest = tl.maximum(tl.min(seen_from, 0) - begin, 0)
            skipped = _blocks_of_part(earliest // BLOCK, part, parts, SPAN_BLOCKS)
        top = tl.full([TILE], -float("inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        out = tl.zeros([TILE, PADDED_W], tl.float32)
        for block in range(skipped, blocks):
            span = block // SPAN_BLOCKS * parts + part
            start = begin + span * SPAN + block % SPAN_BLOCKS * BLOCK
            tokens = start + steps
            inside = tokens < end
            key = tl.load(
                keys + start.to(tl.int64) * KEY_TOKEN + steps[None, :] * KEY_TOKEN + dims[:, None],
                mask=inside[None, :] & (dims < D)[:, None], other=0.0,
            )  # fmt: skip
            value = tl.load(
                values + start.to(tl.int64) * VALUE_TOKEN + steps[:, None] * VALUE_TOKEN + value_dims[None, :],
                mask=inside[:, None] & (value_dims < W)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(tile_query, key, input_precision="ieee") * scale
            visible = inside[None, :] & (tokens[None, :] >= seen_from[:, None])
            scores = tl.where(visible, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(weights, 1)
            out = out * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            top = new_top
        place = ((source * entries + entry) * heads + head) * parts + part
        tl.store(statistics + place, top, mask=real)
        tl.store(statistics + 2 * entries * heads * parts + place, total, mask=real)
        tl.store(
            partial + place[:, None] * W + value_dims[None, :], out, mask=real[:, None] & (value_dims < W)[None, :]
        )


@triton.jit(do_not_specialize=["groups"])
def _attend_part(
    query, keys, values, partial, statistics,
    rows, lengths, prefix_rows, prefix_lengths, group_first, group_size, groups,
    scale, query_entry, query_head, key_row, key_head, value_row, value_head,
    KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr, REPEATS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_W: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, OWN_TILE: tl.constexpr,
):  # fmt: skip
    kv_head, entry = tl.program_id(1).to(tl.int64), tl.program_id(2)
    keys += kv_head * key_head
    values += kv_head * value_head
    # All before the loops, so that programs without tokens wait for memory only twice.
    size = tl.load(group_size + entry, mask=entry < groups, other=0)
    first = tl.load(group_first + entry, mask=entry < groups, other=0)
    own_row, length = tl.load(rows + entry), tl.load(lengths + entry)
    own_begin = _own_begin(length, tl.load(prefix_lengths + entry), WINDOW)
    prefix_row, prefix_length = tl.load(prefix_rows + first), tl.load(prefix_lengths + first)
    _attend_tokens(
        0, first, size, 0, prefix_length, keys + prefix_row * key_row, values + prefix_row * value_row,
        query, query_entry, query_head, lengths, partial, statistics, scale,
        KEY_TOKEN, VALUE_TOKEN, REPEATS, D, W, PADDED_D, PADDED_W, WINDOW, SPAN, BLOCK, TILE,
    )  # fmt: skip
    _attend_tokens(
        1, entry, 1, own_begin, length, keys + own_row * key_row, values + own_row * value_row,
        query, query_entry, query_head, lengths, partial, statistics, scale,
        KEY_TOKEN, VALUE_TOKEN, REPEATS, D, W, PADDED_D, PADDED_W, WINDOW, SPAN, BLOCK, OWN_TILE,
    )  # fmt: skip


@triton.jit
def _combine_parts(
    partial, statistics, out, lengths, prefix_lengths,
    PARTS: tl.constexpr, W: tl.constexpr, PADDED_W: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    place = entry * tl.num_programs(1) + tl.program_id(1)
    plane = tl.num_programs(0) * tl.num_programs(1) * PARTS
    parts, dims = tl.arange(0, 2 * PARTS), tl.arange(0, PADDED_W)
    own = parts // PARTS == 1
    length, prefix_length = tl.load(lengths + entry), tl.load(prefix_lengths + entry)
    tokens = tl.where(own, length - _own_begin(length, prefix_length, WINDOW), prefix_length)
    written = parts % PARTS < tl.cdiv(tokens, SPAN)
    places = parts // PARTS * plane + place * PARTS + parts % PARTS
    top = tl.load(statistics + places, mask=written, other=-float("inf"))
    shift = tl.max(top, 0)
    fade = tl.exp2(top - tl.where(shift == -float("inf"), 0.0, shift))
    total = tl.sum(fade * tl.load(statistics + 2 * plane + places, mask=written, other=0.0), 0)
    each = tl.load(
        partial + places[:, None] * W + dims[None, :], mask=written[:, None] & (dims < W)[None, :], other=0.0
    )
    result = tl.sum(fade[:, None] * each, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * W + dims, result.to(out.dtype.element_ty), mask=dims < W)
