"""Run by `test_layers.py` in Triton's interpreter: against the modules of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.triton_interpreter import round_to_bf16
from tidemill.kernels.layers import rms_norm, rotate, swiglu

round_to_bf16()
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = 5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def assert_close(made: Tensor, expected: Tensor) -> None:
    """In bf16 equal bits, except where another order of a sum or another `exp` falls on the other side of a tie."""
    assert made.dtype == expected.dtype
    if made.dtype == torch.bfloat16:
        assert float((made == expected).float().mean()) > 0.995
        torch.testing.assert_close(made, expected, rtol=2**-7, atol=0)
    else:
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


def norm_of(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-3)  # of which a missing one would show
    norm.weight.data = random(width, dtype=dtype, seed=1)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, TOKENS, 1024), (1, TOKENS, 576), (1, TOKENS, 4, 24), (1, TOKENS, 3, 128)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    states, norm = random(*shape, dtype=dtype), norm_of(shape[-1], dtype)
    states[0, 0] *= 0.01  # a row that epsilon changes
    assert_close(rms_norm(states, norm.weight, norm.variance_epsilon), norm(states))


def test_norms_of_views() -> None:
    """Heads before tokens, and queries in a row with keys and values."""
    norm = norm_of(16, torch.float32)
    both = random(1, TOKENS, 8 * 16, dtype=torch.float32)
    for view in (both.view(1, TOKENS, 8, 16).transpose(1, 2), both[..., : 4 * 16].unflatten(-1, (4, 16))):
        assert_close(rms_norm(view, norm.weight, norm.variance_epsilon), norm(view))


def test_a_norm_in_float32_of_bf16_states() -> None:
    states, norm = random(1, TOKENS, 80, dtype=torch.bfloat16), norm_of(80, torch.float32)
    made, expected = rms_norm(states, norm.weight, norm.variance_epsilon), norm(states)
    assert made.dtype == expected.dtype == torch.float32
    assert float((made == expected).float().mean()) > 0.99  # rounded to bf16 before the product


def angles(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [1, N, D] that differ between the halves."""
    phases = random(1, TOKENS, width, dtype=torch.float32, seed=2)
    return phases.cos().to(dtype), phases.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 80), (2, 2, 128), (1, 3, 12)])
def test_rotary_embeddings(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Bits are equal: there are no sums of more than two numbers."""
    projected = random(1, TOKENS, (heads + kv_heads) * width, dtype=dtype).unflatten(-1, (-1, width))
    query, key = projected.transpose(1, 2).split([heads, kv_heads], 1)  # views, as of fused projections
    made = rotate(query, key, *angles(width, dtype))
    for one, expected in zip(made, apply_rotary_pos_emb(query, key, *angles(width, dtype)), strict=True):
        assert torch.equal(one, expected)
    made = rotate(query.transpose(1, 2), key.transpose(1, 2), *angles(width, dtype), unsqueeze_dim=2)
    for one, expected in zip(made, apply_rotary_pos_emb(query, key, *angles(width, dtype)), strict=True):
        assert torch.equal(one, expected.transpose(1, 2))


def test_rotary_embeddings_in_float32_of_bf16_queries() -> None:
    query, key = random(2, 1, 2, TOKENS, 16, dtype=torch.bfloat16)
    made = rotate(query, key, *angles(16, torch.float32))
    for one, expected in zip(made, apply_rotary_pos_emb(query, key, *angles(16, torch.float32)), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1024, 1100])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    gate, up = random(2, 1, TOKENS, width, dtype=dtype)
    assert_close(swiglu(gate, up), SiLUActivation()(gate) * up)


@pytest.mark.filterwarnings("ignore:overflow")
def test_swiglu_of_large_numbers_and_views() -> None:
    both = torch.tensor([[-1e4, 1.0], [-200.0, -2.0], [-90.0, 3.0], [0.0, 4.0], [90.0, 5.0], [1e4, -6.0]])
    gate, up = both.unbind(1)
    assert_close(swiglu(gate, up), SiLUActivation()(gate) * up)


@pytest.mark.parametrize("rows", [[2], [4, 0], [3, 3, 1, 0, 2, 4, 1, 0, 2]])
def test_a_row_has_the_same_bits_in_other_batches(rows: list[int]) -> None:
    states, norm = random(1, TOKENS, 100, dtype=torch.float32), norm_of(100, torch.float32)
    normed = rms_norm(states, norm.weight, 1e-6)
    assert torch.equal(rms_norm(states[:, rows], norm.weight, 1e-6), normed[:, rows])
    gate, up = states, random(1, TOKENS, 100, dtype=torch.float32, seed=3)
    assert torch.equal(swiglu(gate[:, rows], up[:, rows]), swiglu(gate, up)[:, rows])
    query, key = random(2, 1, 3, TOKENS, 16, dtype=torch.float32)
    cos, sin = angles(16, torch.float32)
    others = rotate(query[:, :, rows], key[:, :, rows], cos[:, rows], sin[:, rows])
    for other, one in zip(others, rotate(query, key, cos, sin), strict=True):
        assert torch.equal(other, one[:, :, rows])
