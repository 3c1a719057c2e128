"""Models and snapshots: out bit by bit, in without a copy, never written to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.model_shapes import MODEL_SHAPES, llama, qwen3
from tidemill.core.errors import WeightsError
from tidemill.core.records import TensorEntry, count, pack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.loading import probe_logprobs
from tidemill.models.snapshots import Bytes, bind_snapshot, empty_copy, snapshot_bytes, snapshot_layout, write_snapshot

IDS = pack_tokens(range(2, 40))


def exported(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> tuple[tuple[TensorEntry, ...], Bytes]:
    """Layout and a read-only snapshot."""
    tensors = snapshot_layout(model, dtype)
    buffer = np.zeros(snapshot_bytes(tensors), np.uint8)
    write_snapshot(model, tensors, buffer)
    buffer.flags.writeable = False
    return tensors, buffer


def test_every_parameter_once_side_by_side_and_aligned() -> None:
    tied, untied = snapshot_layout(llama(), torch.bfloat16), snapshot_layout(qwen3(), torch.float32)
    assert "lm_head.weight" not in {entry.name for entry in tied}
    assert "lm_head.weight" in {entry.name for entry in untied}
    for tensors, width in ((tied, 2), (untied, 4)):
        assert all(entry.offset % 64 == 0 for entry in tensors)
        assert all(entry.nbytes == width * int(np.prod(entry.shape)) for entry in tensors)
        ends = [entry.offset + entry.nbytes for entry in tensors]
        assert all(0 <= after.offset - end < 64 for after, end in zip(tensors[1:], ends, strict=False))
        assert snapshot_bytes(tensors) == ends[-1]
    assert {entry.dtype for entry in tied} == {"bfloat16"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_the_parameters_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    model = llama()
    tensors, buffer = exported(model, dtype)
    for entry, parameter in zip(tensors, model.parameters(), strict=True):
        expected = parameter.detach().to(dtype).view(torch.uint8).numpy().tobytes()
        assert buffer[entry.offset : entry.offset + entry.nbytes].tobytes() == expected


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_equal_weights_give_equal_logits(shape: str) -> None:
    model = MODEL_SHAPES[shape]()
    use_packed_attention(model)
    tensors, buffer = exported(model)
    twin = empty_copy(model, torch.float32)
    bind_snapshot(twin, tensors, buffer)
    assert type(twin) is type(model)
    assert not twin.training
    said = probe_logprobs(model, IDS)
    assert count(said) == 37
    assert probe_logprobs(twin, IDS) == said

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert probe_logprobs(model, IDS) != said
    assert probe_logprobs(twin, IDS) == said  # it shares nothing with the trained model


def test_an_empty_twin_has_no_weights_and_a_bound_one_only_views() -> None:
    model = llama()
    tensors, buffer = exported(model)
    before = buffer.tobytes()
    twin = empty_copy(model, torch.float32)
    assert sum(parameter.numel() for parameter in twin.parameters()) == 0
    for _ in range(2):
        bind_snapshot(twin, tensors, buffer)
        start = buffer.ctypes.data
        for entry, parameter in zip(tensors, twin.parameters(), strict=True):
            assert parameter.data_ptr() == start + entry.offset
            assert parameter.shape == entry.shape
            assert not parameter.requires_grad
        assert twin.get_output_embeddings().weight is twin.get_input_embeddings().weight
    assert {b.data_ptr() for b in twin.buffers()}.isdisjoint({b.data_ptr() for b in model.buffers()})
    assert buffer.tobytes() == before


def test_the_snapshot_lives_as_long_as_the_twin_needs_it() -> None:
    model = llama()
    use_packed_attention(model)
    said = probe_logprobs(model, IDS)
    tensors, buffer = exported(model)
    twin = empty_copy(model, torch.float32)
    bind_snapshot(twin, tensors, buffer)
    del buffer
    assert probe_logprobs(twin, IDS) == said


def test_a_snapshot_of_another_model_is_refused_before_anything_changes() -> None:
    twin = empty_copy(llama(), torch.float32)
    tensors, buffer = exported(qwen3())
    with pytest.raises(WeightsError, match=r"not of this model \(LlamaForCausalLM\)"):
        bind_snapshot(twin, tensors, buffer)
    assert sum(parameter.numel() for parameter in twin.parameters()) == 0


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_the_probe_agrees_with_the_library(shape: str) -> None:
    model, reference = MODEL_SHAPES[shape](), MODEL_SHAPES[shape]()
    use_packed_attention(model)
    tokens = torch.frombuffer(bytearray(IDS), dtype=torch.int32).long()
    with torch.no_grad():
        logits = reference(input_ids=tokens[None], use_cache=False).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    said = torch.frombuffer(bytearray(probe_logprobs(model, IDS)), dtype=torch.float32)
    torch.testing.assert_close(said, expected, rtol=0, atol=1e-4)
