"""Attention over token trees: every implementation computes what a dense mask computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.gpu.tree_attention import DensePlan
from tidemill.models import tree_attention
from tidemill.models.attention import AttentionPlan
from tidemill.models.token_tree import TokenTree, build_tree
from tidemill.models.tree_attention import (
    BLOCK,
    BlockPlan,
    FlexPlan,
    TreePlan,
    block_structure,
    blocks_of,
    buckets_of,
    tree_block_mask,
)

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6


def random_tree(seed: int, *, longest: int = 40) -> TokenTree:
    """A forest with shared prefixes, branches inside sequences, and sequences within others."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(rng.integers(1, 5)):
        prompt = rng.integers(0, 3, rng.integers(1, longest))
        for _ in range(rng.integers(1, 5)):
            tail = rng.integers(0, 3, rng.integers(0, longest))
            sequences.append(np.concatenate([prompt, tail]).astype(np.int32))
    return build_tree(sequences)


def attend(plan: AttentionPlan, tree: TokenTree, *, window: int | None, dtype: torch.dtype) -> list[Tensor]:
    """The output [1, HEADS, N, VALUE_WIDTH] and the gradients of query, key and value."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH)]
    states = [
        torch.randn(1, tree.size, *shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for shape in shapes
    ]
    out = plan.attend(0, states[0], states[1], states[2], 0.3, window)
    weights = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad((weights * out).sum(), states)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_compute_what_a_dense_mask_computes(
    seed: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "BLOCK_TOKENS", 7 if seed % 2 else 256)
    tree = random_tree(seed)
    ours = attend(BlockPlan(tree), tree, window=window, dtype=torch.float32)
    dense = attend(DensePlan(tree, CPU), tree, window=window, dtype=torch.float32)
    for found, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_shared_key_are_summed_in_float32() -> None:
    # 300 samples share their prompt: in bfloat16 a sum stops growing where its step exceeds the summands.
    tree = build_tree([np.array([0, 1, 2 + sample], np.int32) for sample in range(300)])
    ours = attend(BlockPlan(tree), tree, window=None, dtype=torch.bfloat16)
    exact = attend(DensePlan(tree, CPU), tree, window=None, dtype=torch.float32)
    for found, expected in zip(ours[2:], exact[2:], strict=True):
        difference = (found.float() - expected)[:, :, 0].abs().max()
        assert difference < 0.02 * expected[:, :, 0].abs().max()


def test_a_block_has_the_keys_of_its_path_only() -> None:
    sequences = [[0, 1, 2, 3], [0, 1, 4, 5, 6], [7, 8]]
    tree = build_tree([np.array(sequence, np.int32) for sequence in sequences])
    assert [(block.size, block.path.tolist()) for block in blocks_of(tree)] == [
        (4, [0, 1, 2, 3]),
        (3, [0, 1, 4, 5, 6]),
        (2, [7, 8]),
    ]


def test_a_long_chain_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "BLOCK_TOKENS", 2)
    tree = build_tree([np.arange(5, dtype=np.int32)])
    assert [block.path.tolist() for block in blocks_of(tree)] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("seed", range(10))
def test_padding_of_a_bucket_is_limited(seed: int) -> None:
    blocks = blocks_of(random_tree(seed, longest=200))
    buckets = buckets_of(blocks)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(blocks)))
    for bucket in buckets:
        sizes, lengths = zip(*((blocks[index].size, len(blocks[index].path)) for index in bucket), strict=True)
        needed = sum(size * length for size, length in zip(sizes, lengths, strict=True))
        assert len(bucket) * max(sizes) * max(lengths) <= tree_attention.PADDING * needed


@pytest.mark.parametrize("seed", range(200))
def test_block_masks_equal_those_of_the_library(seed: int) -> None:
    tree = random_tree(seed, longest=40 if seed % 4 else 200)
    window = 5 if seed % 10 == 0 else None
    ours = tree_block_mask(tree, CPU, window=window)
    size = ours.seq_lengths[0]
    assert size == max(2, -(-tree.size // BLOCK)) * BLOCK
    theirs = create_block_mask(ours.mask_mod, None, None, size, size, device="cpu", BLOCK_SIZE=BLOCK)
    if window is None:
        partial, full = block_structure(tree)
        assert theirs.full_kv_num_blocks is not None
        assert theirs.full_kv_indices is not None
        assert torch.equal(listed(theirs.kv_num_blocks, theirs.kv_indices), torch.from_numpy(partial))
        assert torch.equal(listed(theirs.full_kv_num_blocks, theirs.full_kv_indices), torch.from_numpy(full))
    nodes, zero = torch.arange(size), torch.tensor(0)
    dense = ours.mask_mod(zero, zero, nodes[:, None], nodes[None])[: tree.size, : tree.size]
    assert torch.equal(dense, tree.ancestor_mask(CPU, window=window))


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """bool [B, B] of a list of blocks."""
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[row, indices[0, 0, row, :count].long()] = True
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("seed", "width", "value_width"), [(0, 16, 16), (1, 16, 16), (2, 8, 6), (3, 16, 12)])
def test_flex_attention_computes_what_a_dense_mask_computes(
    seed: int, width: int, value_width: int, window: int | None
) -> None:
    tree = random_tree(seed, longest=120)
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(1, heads, tree.size, width, generator=generator) for heads in (HEADS, KV_HEADS))
    value = torch.randn(1, KV_HEADS, tree.size, value_width, generator=generator)
    found = FlexPlan(tree, CPU).attend(0, query, key, value, 0.3, window)
    expected = DensePlan(tree, CPU).attend(0, query, key, value, 0.3, window)
    assert float((found - expected).abs().max()) <= 1e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("plan", [TreePlan, FlexPlan])
def test_one_token_is_a_tree(plan: Callable[[TokenTree, torch.device], AttentionPlan]) -> None:
    tree = build_tree([np.array([3], np.int32)])
    value = torch.randn(1, KV_HEADS, 1, WIDTH)
    out = plan(tree, CPU).attend(
        0, torch.randn(1, HEADS, 1, WIDTH), torch.randn(1, KV_HEADS, 1, WIDTH), value, 1.0, None
    )
    torch.testing.assert_close(out[:, ::2], value)


def test_a_gpu_uses_flex_attention_in_small_trees_too() -> None:
    plan = TreePlan(build_tree([np.array([3], np.int32)]), torch.device("cuda"))
    assert isinstance(plan._plan, FlexPlan)  # a dense mask would not repeat the bits of its gradients there
