"""An adapter is what learns; the model under it is the one that was there before."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch

from tests.adapters import RANK, adapted, lora_config, teach
from tests.model_shapes import HIDDEN, MODEL_SHAPES, llama
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.records import pack_tokens, unpack_logprobs
from tidemill.models.attention import use_packed_attention
from tidemill.models.loading import probe_logprobs
from tidemill.models.lora import attach_adapter, frozen_parameters, learned_parameters, linear_layers
from tidemill.models.snapshots import (
    bind_snapshot,
    copy_on_base,
    empty_copy,
    release_snapshot,
    snapshot_bytes,
    snapshot_layout,
    write_snapshot,
)
from tidemill.models.weights_digest import base_digest, weights_digest

IDS = pack_tokens(range(2, 40))
PROJECTIONS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(params=MODEL_SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_at_first_it_adds_nothing(shape: str) -> None:
    plain = MODEL_SHAPES[shape]()
    use_packed_attention(plain)
    assert probe_logprobs(adapted(shape, learned=False), IDS) == probe_logprobs(plain, IDS)
    assert probe_logprobs(adapted(shape), IDS) != probe_logprobs(plain, IDS)


def test_logits_equal_those_of_peft_when_merged(shape: str) -> None:
    """Packed logprobs of the adapted model against plain ones of peft's own merged weights."""
    model = adapted(shape)
    ours = unpack_logprobs(probe_logprobs(model, IDS))
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.merge()  # type: ignore[operator]
    model.set_attn_implementation("eager")
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_only_the_adapter_gets_gradients(shape: str) -> None:
    model = adapted(shape)
    model(input_ids=torch.arange(2, 12)[None], use_cache=False, plan=_CausalPlan()).logits.square().sum().backward()
    learned = learned_parameters(model)
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in learned.values())  # type: ignore[union-attr]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == list(learned)
    assert all(parameter.grad is None for parameter in frozen_parameters(model).values())


class _CausalPlan:
    def attend(self, layer, query, key, value, scaling, window):  # type: ignore[no-untyped-def]
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)


def test_every_linear_layer_but_the_head_gets_one_unless_some_are_named() -> None:
    model = adapted("qwen3")  # its head is a matrix of its own
    assert linear_layers(MODEL_SHAPES["qwen3"]()) == PROJECTIONS
    assert len(learned_parameters(model)) == 2 * len(PROJECTIONS) * 2  # layers × matrices
    named = adapted(targets=["v_proj"])
    # 2 layers: 4 × 64 down, and 32 × 4 up to two key-value heads of 16
    assert [list(parameter.shape) for parameter in learned_parameters(named).values()] == [
        [RANK, HIDDEN],
        [32, RANK],
    ] * 2


def test_parameters_are_learned_or_frozen_under_the_names_they_had(shape: str) -> None:
    plain, model = MODEL_SHAPES[shape](), adapted(shape)
    assert list(frozen_parameters(model)) == [name for name, _ in plain.named_parameters()]
    assert len(learned_parameters(model)) + len(frozen_parameters(model)) == len(list(model.parameters()))
    assert list(learned_parameters(plain)) == [name for name, _ in plain.named_parameters()]
    assert frozen_parameters(plain) == {}


def test_its_numbers_depend_on_its_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = adapted(learned=False)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert weights_digest(adapted(learned=False)) == weights_digest(first)
    assert weights_digest(adapted(learned=False, seed=1)) != weights_digest(first)


def test_the_digest_names_the_base_and_the_adapter() -> None:
    model = adapted()
    assert base_digest(model) == weights_digest(llama())
    assert base_digest(llama()) == ""
    digest = weights_digest(model)
    assert digest == weights_digest(adapted())
    teach(model, seed=1)
    assert weights_digest(model) != digest
    other = MODEL_SHAPES["llama"](1)
    attach_adapter(other, lora_config())
    teach(other)  # the adapter is the same, what lies under it is not
    assert weights_digest(other) != digest


def test_a_snapshot_is_the_adapter_alone_and_twins_share_the_base() -> None:
    model = adapted()
    twin = copy_on_base(model, torch.float32)
    tensors = snapshot_layout(model, torch.float32)
    buffer = np.zeros(snapshot_bytes(tensors), np.uint8)
    write_snapshot(model, tensors, buffer)
    bind_snapshot(twin, tensors, buffer)
    assert [entry.name for entry in tensors] == list(learned_parameters(model))
    assert sum(entry.nbytes for entry in tensors) == 4 * sum(p.numel() for p in learned_parameters(model).values())
    said = probe_logprobs(model, IDS)
    assert probe_logprobs(twin, IDS) == said
    for mine, theirs in zip(frozen_parameters(model).values(), frozen_parameters(twin).values(), strict=True):
        assert mine is theirs
    release_snapshot(twin)
    assert all(parameter.numel() == 0 for parameter in learned_parameters(twin).values())
    assert probe_logprobs(model, IDS) == said


def test_the_base_is_a_snapshot_of_its_own() -> None:
    model = adapted()
    hollow = empty_copy(model, torch.float32)
    for part in ("learned", "base"):
        tensors = snapshot_layout(model, torch.float32, part=part)
        buffer = np.zeros(snapshot_bytes(tensors), np.uint8)
        write_snapshot(model, tensors, buffer, part=part)
        bind_snapshot(hollow, tensors, buffer, part=part)
    assert probe_logprobs(hollow, IDS) == probe_logprobs(model, IDS)
    with pytest.raises(WeightsError, match="not of this model"):
        bind_snapshot(hollow, tensors, buffer)


def test_a_layer_the_model_does_not_have() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="LlamaForCausalLM has no linear layer 'query'") as caught:
        attach_adapter(model, lora_config(targets=["q_proj", "query"]))
    assert caught.value.where == "model.lora.targets"
    assert ", ".join(PROJECTIONS) in caught.value.hint
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(UserError, match="lm_head"):  # it is the embedding, too
        attach_adapter(model, lora_config(targets=["lm_head"]))


def test_without_the_package_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="needs the package peft") as caught:
        attach_adapter(llama(), lora_config())
    assert 'pip install "peft>=' in caught.value.hint
