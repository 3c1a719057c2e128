"""A model without weights says what its original says, once it has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.records import pack_tokens
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model, probe_logprobs
from tidemill.models.lora import attach_adapter
from tidemill.models.snapshots import (
    Part,
    bind_snapshot,
    files_without_weights,
    snapshot_bytes,
    snapshot_layout,
    stored_context_limit,
    uninitialized_model,
    write_snapshot,
)


@pytest.fixture
def folder() -> Path:
    config = ModelConfig(source="char", char=CharModelConfig(hidden_size=32, layers=2, context=48))
    return resolve(config, progress=lambda _: None)


def test_a_shell_is_enough_to_compute_with_pulled_weights(folder: Path, tmp_path: Path) -> None:
    files = files_without_weights(folder)
    assert "config.json" in files
    assert "tokenizer.json" in files
    assert not any(name.endswith(".safetensors") for name in files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    hollow = uninitialized_model(tmp_path, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32)
    assert sum(parameter.numel() for parameter in hollow.parameters()) == 0

    original = load_model(folder, device=torch.device("cpu"))
    layout = snapshot_layout(original, torch.float32)
    buffer = np.empty(snapshot_bytes(layout), np.uint8)
    write_snapshot(original, layout, buffer)
    bind_snapshot(hollow, layout, buffer)
    token_ids = pack_tokens([3, 4, 5, 6])
    assert probe_logprobs(hollow, token_ids) == probe_logprobs(original, token_ids)


def test_a_shell_with_an_adapter_waits_for_two_snapshots(folder: Path) -> None:
    config = ModelConfig.model_validate({"lora": {"rank": 4}})
    hollow = uninitialized_model(folder, config, device=torch.device("cpu"), dtype=torch.float32)
    assert sum(parameter.numel() for parameter in hollow.parameters()) == 0
    original = load_model(folder, device=torch.device("cpu"))
    attach_adapter(original, config)
    parts: tuple[Part, ...] = ("base", "learned")
    for part in parts:
        layout = snapshot_layout(original, torch.float32, part=part)
        buffer = np.empty(snapshot_bytes(layout), np.uint8)
        write_snapshot(original, layout, buffer, part=part)
        bind_snapshot(hollow, layout, buffer, part=part)
    token_ids = pack_tokens([3, 4, 5, 6])
    assert probe_logprobs(hollow, token_ids) == probe_logprobs(original, token_ids)


def test_the_context_is_known_without_loading(folder: Path) -> None:
    assert stored_context_limit(folder) == 48


def test_a_configuration_of_something_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="cannot be loaded: Unrecognized configuration class"):
        uninitialized_model(tmp_path, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32)
