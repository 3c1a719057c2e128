"""Activations of a microbatch, against what the layers of transformers keep for the backward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.model import LoraConfig, ModelConfig
from tidemill.hardware.process_memory import FP32, kept_numbers
from tidemill.models.attention import hidden_states, use_packed_attention
from tidemill.models.lora import attach_adapter
from tidemill.models.shapes import shape_of_folder
from tidemill.models.token_tree import build_tree
from tidemill.models.tree_attention import TreePlan


@pytest.mark.parametrize(
    ("rows", "length", "adapter"), [(8, 64, False), (2, 256, False), (1, 1024, False), (8, 64, True)]
)
def test_layers_keep_what_the_formula_counts(tmp_path: Path, rows: int, length: int, adapter: bool) -> None:
    model = llama()
    shape = shape_of_folder(save_folder(model, tmp_path))
    use_packed_attention(model)
    if adapter:
        attach_adapter(model, ModelConfig(source=str(tmp_path), lora=LoraConfig(rank=1)))
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Rows differ from their first token on, so that they share no prefix.
    tree = build_tree([np.full(length, number, np.int32) for number in range(rows)])
    tokens, positions = torch.from_numpy(tree.token_ids), torch.from_numpy(tree.depths)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = hidden_states(model, tokens, positions, TreePlan(tree, torch.device("cpu")))
    assert states.requires_grad
    assert shape is not None
    expected = FP32 * rows * length * kept_numbers(shape, context=length, recompute=False, frozen=adapter)
    assert expected == pytest.approx(sum(kept.values()), rel=0.1)
