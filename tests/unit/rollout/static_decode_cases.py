"""Run by `test_static_decode.py` in Triton's interpreter: steps with fused layers against transformers' modules."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine_requests import engine, finish_all, prompts, request
from tests.model_families import FAMILIES, build_family
from tests.model_shapes import MODEL_SHAPES
from tests.torch_kernels import TORCH_KERNELS
from tests.triton_interpreter import round_to_bf16
from tidemill.models.attention import use_packed_attention
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.static_decode import (
    DecodeState,
    decode_logits,
    decode_step,
    fused_layers,
)

round_to_bf16()
FUSED = TORCH_KERNELS._replace(layers=fused_layers)
ROWS, STEPS = 4, 3
CPU = torch.device("cpu")


@torch.inference_mode()
def logits_of_both(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Of the fourth tokens of four samples, with fused layers and without."""
    use_packed_attention(model)
    finish_all(engine(model), [request([5, 6], max_new_tokens=1)])  # a first prompt determines windows
    cache = SlotCache(rows=ROWS + 1, context=16, device=CPU, fixed=True)
    cache.reserve(16)
    state = DecodeState(ROWS, (ROWS, 15), CPU)
    rows = list(range(ROWS))
    state.upload(ROWS, {"rows": rows, "lengths": [1] * ROWS, "positions": [0] * ROWS, "tokens": [7, 9, 11, 13]})
    entries = state.entries(ROWS)
    for _ in range(STEPS):
        decode_step(model, cache, entries, TORCH_KERNELS)
    unfused = decode_logits(model, cache, entries, TORCH_KERNELS)
    return decode_logits(model, cache, entries, FUSED), unfused


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_those_of_transformers(family: str) -> None:
    fused, unfused = logits_of_both(build_family(family, FAMILIES[family]))
    torch.testing.assert_close(fused, unfused, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_logits_in_bf16(shape: str) -> None:
    model = MODEL_SHAPES[shape]()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    fused, unfused = logits_of_both(model)
    assert unfused.std() > 0.5
    assert float((fused - unfused).abs().max()) <= 2**-5


def test_a_trainer_computes_the_shared_model_as_before() -> None:
    model = MODEL_SHAPES["qwen3"]()
    subject = engine(model, kernels=FUSED)
    tokens = torch.tensor([prompts(1)[0]])
    model.set_attn_implementation("eager")

    def trained() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        gradient = model.model.layers[0].input_layernorm.weight.grad
        return logits.detach(), gradient.clone()

    before = trained()
    use_packed_attention(model)
    made = finish_all(subject, [request(prompts(1)[0])])
    assert made.tokens == finish_all(engine(MODEL_SHAPES["qwen3"]()), [request(prompts(1)[0])]).tokens
    model.set_attn_implementation("eager")
    for now, then in zip(trained(), before, strict=True):
        assert torch.equal(now, then)
    assert TORCH_KERNELS.layers is nullcontext
