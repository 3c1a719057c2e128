"""Roles that name the same folder share one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters import lora_config, teach
from tests.model_folders import save_folder
from tests.model_shapes import llama, qwen3
from tidemill.core.records import pack_tokens
from tidemill.models.loading import probe_logprobs
from tidemill.models.lora import frozen_parameters, learned_parameters
from tidemill.models.weights_digest import base_digest, weights_digest
from tidemill.runtime.model_bundle import FrozenModels

IDS = pack_tokens(range(2, 30))


def test_a_folder_is_loaded_once_under_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, other = save_folder(llama(), tmp_path / "judge"), save_folder(qwen3(), tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    frozen = FrozenModels(torch.device("cpu"))
    first = frozen.load(judge)
    assert frozen.load(Path("judge")) is first
    assert frozen.load(other) is not first
    assert weights_digest(first) == weights_digest(llama())
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_adapters_of_several_roles_share_one_base(tmp_path: Path) -> None:
    folder, frozen = save_folder(llama(), tmp_path), FrozenModels(torch.device("cpu"))
    policy, critic = (frozen.with_adapter(folder, lora_config(seed=seed)) for seed in (0, 1))
    base = {id(parameter) for parameter in frozen.load(folder).parameters()}
    for model in (policy, critic):
        assert {id(parameter) for parameter in frozen_parameters(model).values()} == base
        assert base_digest(model) == weights_digest(llama())
    assert not {id(p) for p in learned_parameters(policy).values()} & {
        id(p) for p in learned_parameters(critic).values()
    }
    before = probe_logprobs(critic, IDS)
    assert before == probe_logprobs(policy, IDS)  # new adapters change nothing
    teach(policy)
    assert probe_logprobs(critic, IDS) == before != probe_logprobs(policy, IDS)
