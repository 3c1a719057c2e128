"""Run by `test_interpreter.py` in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernel_references import decode_reference
from tests.triton_interpreter import multiply_bf16
from tidemill.kernels import decode as module
from tidemill.kernels.decode import DecodeLayout, decode

multiply_bf16()
CAPACITY = 330


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several spans for each part, in a few hundred tokens."""
    for name, value in (("_SPAN", 64), ("_PARTS", 2), ("_BLOCK_BYTES", 32 * 4 * 128)):
        monkeypatch.setattr(module, name, value)


def layout_of(entries: list[tuple[int, int, int, int]], groups: list[tuple[int, int]]) -> DecodeLayout:
    """Of (row, length, prefix row, prefix length) of each entry, and (first, size) of each group."""
    rows, lengths, prefix_rows, prefix_lengths = zip(*entries, strict=True)
    first, size = zip(*groups, strict=True)
    return DecodeLayout(
        rows=torch.tensor(rows),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        prefix_rows=torch.tensor(prefix_rows),
        prefix_lengths=torch.tensor(prefix_lengths, dtype=torch.int32),
        group_first=torch.tensor(first, dtype=torch.int32),
        group_size=torch.tensor(size, dtype=torch.int32),
    )


GROUPED = layout_of(
    [
        (2, 300, 2, 200),  # owns its prefix
        (5, 201, 2, 200),
        (0, 290, 2, 200),
        (7, 0, 0, 0),  # padding
        (1, 330, 0, 0),  # without a prefix
        (3, 40, 6, 20),  # a group of one
        (4, 1, 0, 0),
    ],
    [(0, 3), (5, 1), (0, 0)],
)


def tensors(
    entries: int, *, dtype: torch.dtype, width: int, repeats: int, kv_heads: int = 1, value_width: int = 0
) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return SimpleNamespace(
        query=normal(entries, kv_heads * repeats, width),
        keys=normal(8, kv_heads, CAPACITY, width),
        values=normal(8, kv_heads, CAPACITY, value_width or width),
    )


def run(case: SimpleNamespace, layout: DecodeLayout, *, window: int | None = None) -> torch.Tensor:
    scaling = case.query.shape[-1] ** -0.5
    return decode(case.query, case.keys, case.values, layout, scaling=scaling, window=window)


def check(case: SimpleNamespace, layout: DecodeLayout, *, window: int | None = None) -> None:
    scaling = case.query.shape[-1] ** -0.5
    out = run(case, layout, window=window)
    expected = decode_reference(case.query, case.keys, case.values, layout, scaling=scaling, window=window)
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(out, expected, atol=1e-5 if out.dtype == torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "width", "repeats", "kv_heads", "window"),
    [
        (torch.float32, 16, 1, 1, None),
        (torch.float32, 80, 7, 1, 70),
        (torch.float32, 128, 2, 1, 250),
        (torch.float32, 64, 17, 1, 1),
        (torch.bfloat16, 128, 4, 2, None),
        (torch.bfloat16, 64, 7, 1, 130),
        (torch.bfloat16, 16, 2, 1, 64),
    ],
)
@pytest.mark.usefixtures("short_spans")
def test_attention_is_that_of_the_reference(
    dtype: torch.dtype, width: int, repeats: int, kv_heads: int, window: int | None
) -> None:
    check(tensors(7, dtype=dtype, width=width, repeats=repeats, kv_heads=kv_heads), GROUPED, window=window)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 330])
def test_lengths_near_the_limits_of_a_span(length: int) -> None:
    case = tensors(2, dtype=torch.float32, width=16, repeats=1)
    check(case, layout_of([(1, length, 0, 0), (2, 330, 3, length - 1)], [(1, 1 if length > 1 else 0)]))


@pytest.mark.usefixtures("short_spans")
def test_values_may_be_narrower_than_keys() -> None:
    check(tensors(7, dtype=torch.float32, width=48, repeats=2, value_width=24), GROUPED)


@pytest.mark.usefixtures("short_spans")
def test_a_query_in_the_order_of_transformers_is_read_in_place() -> None:
    case = tensors(7, dtype=torch.float32, width=16, repeats=2)
    out = run(case, GROUPED)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.query.is_contiguous()
    assert torch.equal(run(case, GROUPED), out)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.usefixtures("short_spans")
def test_what_old_samples_left_in_the_cache_is_not_read(window: int | None) -> None:
    case = tensors(7, dtype=torch.float32, width=16, repeats=2)
    out = run(case, GROUPED, window=window)
    used = torch.zeros(8, CAPACITY, dtype=torch.bool)
    for row, length, prefix_row, prefix_length in zip(
        *(x.tolist() for x in (GROUPED.rows, GROUPED.lengths, GROUPED.prefix_rows, GROUPED.prefix_lengths)), strict=True
    ):
        used[prefix_row, :prefix_length] = True
        used[row, prefix_length:length] = True
    for tensor in (case.keys, case.values):
        tensor[~used[:, None].expand(tensor.shape[:3])] = math.nan
    assert torch.equal(run(case, GROUPED, window=window), out)
    assert bool((out[3] == 0).all())  # padding


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 100), (torch.bfloat16, None)])
@pytest.mark.usefixtures("short_spans")
def test_bits_depend_on_no_other_entry_and_not_on_the_size_of_the_group(dtype: torch.dtype, window: int | None) -> None:
    # 6 entries with 7 queries each are two tiles
    case = tensors(6, dtype=dtype, width=16, repeats=7)
    entries = [(row, 205 + 9 * row, 3, 200) for row in range(6)]
    together = run(case, layout_of(entries, [(0, 6)]), window=window)
    for kept in ([5], [1, 5, 0]):
        some = replace_query(case, kept)
        out = run(some, layout_of([entries[at] for at in kept], [(0, len(kept))]), window=window)
        assert torch.equal(out, together[kept])
    # among entries without a prefix, in groups of other positions
    other = replace_query(case, [0, 3, 1, 5])
    layout = layout_of([(0, 90, 0, 0), entries[3], (1, 330, 0, 0), entries[5]], [(3, 1), (1, 1)])
    assert torch.equal(run(other, layout, window=window)[[1, 3]], together[[3, 5]])


def replace_query(case: SimpleNamespace, entries: list[int]) -> SimpleNamespace:
    return SimpleNamespace(query=case.query[entries], keys=case.keys, values=case.values)


def test_queries_of_a_prefix_that_no_window_reaches_see_their_own_tokens_only() -> None:
    case = tensors(7, dtype=torch.float32, width=16, repeats=1)
    out = run(case, GROUPED, window=80)
    case.keys[2, :, :200] += 5.0
    case.values[2, :, :200] += 5.0
    changed = run(case, GROUPED, window=80)
    assert torch.equal(changed[0], out[0])  # 300 tokens: the window begins at 220
    assert not torch.equal(changed[1], out[1])  # 201 tokens: at 121
    without = replace(GROUPED, prefix_lengths=torch.zeros(7, dtype=torch.int32))
    torch.testing.assert_close(run(case, without, window=80)[0], out[0], atol=1e-6, rtol=0)
