"""The cache of the embedded engine grows with its rows; two products give what the library's attention gives."""

from __future__ import annotations

import pytest
import torch

from tidemill.rollout.engines.embedded.cache import GROWTH_TOKENS, SlotCache
from tidemill.rollout.engines.embedded.decode_attention import DecodeAttention, decode_attention


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("longest", "capacity"), [(9, 10), (9, 40)])
def test_products_equal_the_librarys_attention(window: int | None, longest: int, capacity: int) -> None:
    lengths = torch.tensor([longest - 1, 0, 4])
    query, keys, values = torch.randn(1, 6, 3, 8), torch.randn(4, 2, capacity, 8), torch.randn(4, 2, capacity, 5)
    positions = torch.arange(capacity)
    mask = positions <= lengths[:, None]
    if window is not None:
        mask &= positions > lengths[:, None] - window
    expected = decode_attention(query, keys[:3], values[:3], mask[:, None, None], 0.3)
    attention = DecodeAttention(lengths, longest=longest, capacity=capacity)
    found = attention.attend(query, keys, values, 0.3, window)
    torch.testing.assert_close(found, expected)
    half = attention.attend(query.half(), keys.half(), values.half(), 0.3, window)
    torch.testing.assert_close(half.float(), expected, atol=2e-3, rtol=2e-2)


def test_rows_keep_their_content_when_the_cache_grows_up_to_its_context() -> None:
    cache = SlotCache(rows=2, context=100, device=torch.device("cpu"))
    cache.reserve(5)
    assert cache.capacity == GROWTH_TOKENS
    keys, _ = cache.layer(0, torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
    keys[1, :, :5] = 7.0
    cache.reserve(GROWTH_TOKENS + 1)
    grown, _ = cache.layer(0, keys, keys)
    assert grown.shape == (2, 3, 2 * GROWTH_TOKENS, 4)
    assert (grown[1, :, :5] == 7.0).all() and grown.sum() == 7.0 * 3 * 5 * 4
    assert cache.row_bytes == 2 * 3 * 4 * 4 * 100  # of a whole context
    cache.reserve(99)
    assert cache.capacity == 100
    cache.forget()
    assert cache.capacity == 0


def test_on_a_gpu_the_cache_has_its_final_size_from_the_start() -> None:
    cache = SlotCache(rows=2, context=100, device=torch.device("cuda"))
    cache.reserve(5)
    assert cache.capacity == 100
    cache.reserve(101)  # with the place of padding tokens
    assert cache.capacity == 101
