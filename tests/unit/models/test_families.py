"""Every supported family computes what transformers computes, in the trainer and in both modes of the engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.engine_requests import engine, finish_all, prompts, request
from tests.model_families import FAMILIES, UNSUPPORTED, VOCABULARY, WINDOW, build_family
from tests.model_folders import save_folder
from tests.model_shapes import gemma3, llama
from tests.rotation import daily
from tidemill.core.errors import UserError
from tidemill.models.attention import LibraryMask, hidden_states, use_packed_attention, vocabulary_logits
from tidemill.models.forward_check import TOLERANCE, check_forward, check_layers, forward_difference
from tidemill.models.loading import load_model
from tidemill.models.token_tree import build_tree
from tidemill.models.tree_attention import TreePlan

TOKENS = 64  # eight windows
CPU = torch.device("cpu")


@torch.inference_mode()
def own_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[N, vocabulary], from transformers' eager attention."""
    model.set_attn_implementation("eager")
    logprobs: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_transformers(family: str) -> None:
    """In the trainer: two sequences of 64 tokens that share a prefix. In the engine: prompts that share one, 40 tokens
    sampled after each."""
    model = build_family(family, FAMILIES[family])
    sequences = prompts(2, length=TOKENS, shared=20)
    expected = [own_logprobs(model, sequence) for sequence in sequences]
    use_packed_attention(model)
    tree = build_tree([np.array(sequence, np.int32) for sequence in sequences])
    tokens, positions = torch.from_numpy(tree.token_ids), torch.from_numpy(tree.depths)
    with torch.inference_mode():
        packed = vocabulary_logits(model, hidden_states(model, tokens, positions, TreePlan(tree, CPU))).log_softmax(-1)
    for path, own in zip(tree.paths, expected, strict=True):
        torch.testing.assert_close(packed[torch.from_numpy(path)], own, rtol=0, atol=1e-4)

    requests = [
        request(tokens, index=i, max_new_tokens=40) for i, tokens in enumerate(prompts(3, length=24, shared=10))
    ]
    for batch_invariant in (False, True):
        done = finish_all(engine(model, slots=3, context=TOKENS, batch_invariant=batch_invariant), requests)
        for one in requests:
            prompt = np.frombuffer(one.prompt_ids, np.int32).tolist()
            completion, reported = done.tokens[one.sample_id], done.logprobs[one.sample_id]
            assert len(completion) == 40
            own = own_logprobs(model, prompt + completion)[len(prompt) - 1 : -1]
            theirs = own.gather(-1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(reported), theirs, rtol=0, atol=1e-4)
            use_packed_attention(model)


@pytest.mark.parametrize("family", daily(list(FAMILIES), len(FAMILIES) // 3))
def test_a_supported_family_loads(family: str, tmp_path: Path) -> None:
    folder = save_folder(build_family(family, FAMILIES[family]), tmp_path / "m")
    load_model(folder, device=CPU)
    check_layers(folder)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_architecture_that_would_be_computed_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    family, fields, says = UNSUPPORTED[name]
    folder = save_folder(build_family(family, fields), tmp_path / "m")
    for check in (lambda: load_model(folder, device=CPU), lambda: check_layers(folder)):
        with pytest.raises(UserError) as caught:
            check()
        assert says in caught.value.what
        assert caught.value.where == str(folder)
        assert caught.value.hint


class _Neighbours(nn.Module):
    """A layer's MLP that also reads the token before: what a convolution or a recurrence does."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(states + states.roll(1, 1))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forward_check_finds_models_that_mix_packed_sequences(dtype: torch.dtype) -> None:
    for build in (llama, gemma3):
        check_forward(build().to(dtype))  # type: ignore[arg-type, call-arg, unused-ignore]
    mixing: Any = llama().to(dtype)  # type: ignore[arg-type, call-arg, unused-ignore]
    mixing.model.layers[-1].mlp = _Neighbours(mixing.model.layers[-1].mlp)
    transformed: Any = llama().to(dtype)  # type: ignore[arg-type, call-arg, unused-ignore]
    transformed.forward = _with_head_transform(transformed)
    for model in (mixing, transformed):
        assert forward_difference(model) > 1.5 * TOLERANCE[dtype]
        with pytest.raises(UserError, match="computes other logits when sequences are packed"):
            check_forward(model)


def _with_head_transform(model: Any) -> Any:
    """The forward of a model whose head applies an activation before the output embedding."""

    def forward(**given: Any) -> Any:
        output = model.model(**given)
        output.logits = model.lm_head(nn.functional.gelu(output.last_hidden_state))
        return output

    return forward


@pytest.mark.parametrize("size", [1, 2, WINDOW, 4096])
def test_the_window_is_read_from_the_mask_of_transformers(size: int) -> None:
    masking_utils: Any = importlib.import_module("transformers.masking_utils")
    window = LibraryMask(masking_utils.sliding_window_causal_mask_function(size), size, CPU)
    assert window.window() == size
    assert LibraryMask(masking_utils.causal_mask_function, None, CPU).window() is None
    chunks = LibraryMask(masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64)), size, CPU)
    if size > 1:  # chunks of one token are windows of one
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            chunks.window()
    with pytest.raises(ValueError, match="later tokens"):
        LibraryMask(masking_utils.bidirectional_mask_function, None, CPU).window()


def test_the_documented_families_are_the_tested_ones() -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "models.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert rows[1:] == sorted(FAMILIES)


def test_tiny_models_are_far_from_uniform() -> None:
    """Otherwise a wrong forward could agree by accident."""
    for family, fields in FAMILIES.items():
        logprobs = own_logprobs(build_family(family, fields), prompts(1, length=TOKENS)[0])
        assert float(logprobs.exp().max(-1).values.mean()) > 3 / VOCABULARY, family
