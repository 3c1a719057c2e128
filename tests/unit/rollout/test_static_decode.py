from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.glm import modeling_glm
from transformers.models.mistral import modeling_mistral

from tests.engine_requests import engine, finish_all, request
from tests.gpu_without_numbers import GPU, Operations, gpu_without_numbers, move_to_gpu
from tests.model_families import FAMILIES, build_family
from tests.model_shapes import MODEL_SHAPES, llama
from tests.torch_kernels import TORCH_KERNELS
from tests.triton_compiler import Launch, record
from tests.triton_interpreter import run_cases
from tidemill.kernels import layers
from tidemill.models.attention import _WINDOW, use_packed_attention
from tidemill.models.recomputation import keep_products_of_mlps
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.static_decode import (
    DecodeState,
    StepKernels,
    bucket,
    decode_step,
    fused_layers,
)

SLOTS, CONTEXT = 256, 1024
LAYERS = 28
QWEN3_06B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def test_buckets_are_powers_of_2_then_multiples() -> None:
    assert [bucket(entries) for entries in (1, 2, 3, 5, 16, 17, 33, 64, 65, 250)] == [
        *(1, 2, 4, 8, 16),
        *(32, 48, 64, 96, 256),
    ]
    for slots, sizes in ((70, [96, 64, 48, 32, 16, 8, 4, 2, 1]), (3, [4, 2, 1])):
        assert DecodeState(slots, (0, 0), torch.device("cpu")).sizes == sizes


def allocated(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty((*query.shape[:2], values.shape[-1]))


def drawn(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))


def operations_of_a_step(model: PreTrainedModel, *, fused: bool = False) -> Counter[str]:
    """Of torch. Each is possible without numbers, and none copies from or to the host."""
    with gpu_without_numbers():
        move_to_gpu(model, torch.bfloat16)
        cache = SlotCache(rows=SLOTS + 1, context=CONTEXT, device=GPU)
        cache.reserve(CONTEXT)
        entries = DecodeState(SLOTS, (SLOTS, CONTEXT - 1), GPU).entries(SLOTS)
        kernels = StepKernels(allocated, drawn, fused_layers if fused else nullcontext)
        decode_step(model, cache, entries, kernels)  # allocates the cache
        with Operations() as operations:
            decode_step(model, cache, entries, kernels)
        names: Counter[str] = operations.names
    return names


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of the kernels of layers, which do not run."""
    return record(monkeypatch, layers, "_rms_norm", "_rotate", "_swiglu")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_a_step_does_not_wait_for_the_gpu(shape: str, fused: bool, launches: list[Launch]) -> None:
    model = MODEL_SHAPES[shape]()
    finish_all(engine(model), [request([5, 6], max_new_tokens=1)])  # a first prompt determines windows
    assert operations_of_a_step(model, fused=fused)
    assert bool(launches) == fused


@pytest.mark.parametrize(
    ("fused", "of_a_layer", "launched"),
    [
        # 7 matrix products; 4 norms of 6 to 8; RoPE 11; 2 writes to the cache; SwiGLU and sums 4.
        (False, 57, 0),
        # 7 matrix products, 2 writes to the cache, 2 sums; launched: 4 norms, RoPE, SwiGLU, and the last norm.
        (True, 12, 6 * LAYERS + 1),
    ],
)
def test_a_step_of_28_layers(fused: bool, of_a_layer: int, launched: int, launches: list[Launch]) -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(QWEN3_06B).eval()
    use_packed_attention(model)
    for layer in model.model.layers:
        setattr(layer.self_attn, _WINDOW, None)
    operations = operations_of_a_step(model, fused=fused)
    assert (of_a_layer - 2) * LAYERS < operations.total() <= of_a_layer * LAYERS
    assert operations["aten::index_put_"] == 2 * LAYERS
    assert len(launches) == 2 * launched  # of two steps


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", {"Attention", "MLP", "RMSNorm"}),
        ("mistral", {"Attention", "MLP", "RMSNorm"}),
        ("qwen2", {"Attention", "MLP", "RMSNorm"}),
        ("qwen3", {"Attention", "MLP", "RMSNorm"}),
        ("smollm3", {"Attention", "MLP", "RMSNorm"}),
        ("mixtral", {"Attention", "RMSNorm"}),  # its experts are no MLPs
        ("phi3", {"RMSNorm"}),  # one projection for gates and values; rotates a part of a head
        ("glm", {"RMSNorm"}),  # rotates pairs of neighbours
        ("gemma", {"Attention"}),  # GELU; norms times 1 + weight
        ("gemma3_text", {"Attention"}),
        ("olmo2", {"MLP"}),  # norms and rotary embeddings that round later
        ("gpt2", set()),
    ],
)
def test_layers_that_compute_something_else_stay(family: str, parts: set[str]) -> None:
    model = build_family(family, FAMILIES[family])
    with fused_layers(model):
        names = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    assert {part for part in ("Attention", "MLP", "RMSNorm") if any(name.endswith(part) for name in names)} == parts
    assert all(name.endswith(tuple(parts)) for name in names)


def test_a_rotation_that_differs_only_in_its_halves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_mistral, "rotate_half", modeling_glm.rotate_half)
    model = build_family("mistral", FAMILIES["mistral"])
    with fused_layers(model):
        assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)


def test_layers_are_fused_within_the_context_only() -> None:
    model = llama()
    keep_products_of_mlps(model)  # as a trainer of the same model does
    mlps = {layer.mlp: layer.mlp.forward for layer in model.model.layers}
    with suppress(KeyError), fused_layers(model):
        assert "forward" in vars(model.model.norm)
        assert [mlp.forward for mlp in mlps] == list(mlps.values())
        raise KeyError
    assert {module: module.forward for module in model.modules() if "forward" in vars(module)} == mlps


@pytest.mark.timeout(300)
def test_steps_with_fused_layers_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("static_decode_cases.py"))


def test_padding_writes_where_it_must_and_stays_there() -> None:
    model = llama()
    use_packed_attention(model)
    with torch.inference_mode():
        cache = SlotCache(rows=4, context=16, device=torch.device("cpu"), fixed=True)
        cache.reserve(16)
        state = DecodeState(3, (3, 15), torch.device("cpu"))
        state.upload(4, {"tokens": [5] * 4})  # the keys of token 0 are zeros
        for _ in range(2):
            decode_step(model, cache, state.entries(4), TORCH_KERNELS)
    entries = state.entries(4)
    assert (entries.positions.tolist(), entries.layout.lengths.tolist()) == ([15] * 4, [0] * 4)
    for tensor in (*cache._keys, *cache._values):
        written = tensor.abs().sum((1, 3)).nonzero().tolist()
        assert written == [[3, 15]]


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_on_the_device_move_to_other_entries(size: int) -> None:
    state = DecodeState(4, (3, 15), torch.device("cpu"))
    state.upload(4, {"tokens": [10, 11, 12, 13]})
    state.upload(size, {"tokens": [20, 21], "temperatures": [0.5, 1.0]}, sources=[3, -1])
    entries = state.entries(size)
    assert entries.tokens.tolist()[:2] == [13, 21]
    assert entries.temperatures.tolist()[:2] == [0.5, 1.0]
