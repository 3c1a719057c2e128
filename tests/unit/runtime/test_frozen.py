"""Roles that name the same folder share one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model_folders import save_folder
from tests.model_shapes import llama, qwen3
from tidemill.models.loading import weights_digest
from tidemill.runtime.frozen import FrozenModels


def test_a_folder_is_loaded_once_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, other = save_folder(llama(), tmp_path / "judge"), save_folder(qwen3(), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    frozen = FrozenModels(torch.device("cpu"))
    first = frozen.load(judge)
    assert frozen.load(Path("judge")) is first
    assert frozen.load(other) is not first
    assert weights_digest(first) == weights_digest(llama())
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_weights_that_somebody_holds_already_are_not_loaded(tmp_path: Path) -> None:
    frozen, mine = FrozenModels(torch.device("cpu")), llama()
    frozen.keep(tmp_path / "nothing is there", mine)
    assert frozen.load(tmp_path / "nothing is there") is mine
