"""The agreement checks of a GPU session find planted faults, also those that are smaller than the rounding of bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.check_rows import CheckRows, Settings
from benchmarks.gpu.checks import engine_agreement, tree_agreement
from tidemill.models import attention, token_logprobs, tree_attention
from tidemill.rollout.engines.embedded import scheduler
from tidemill.rollout.sampling import noise_key


def rounded_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).bfloat16().to(value.dtype).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def one_flipped_weight(model: PreTrainedModel) -> None:
    attention.use_packed_attention(model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] *= -1


def shifted_noise(seed: int, position: int) -> int:
    return noise_key(seed, position + 1)


def scaled_gradient(gradient: Tensor, token_grad: Tensor, *rest: Any) -> None:
    TO_GRADIENT(gradient, 1.002 * token_grad, *rest)


TO_GRADIENT = token_logprobs._to_gradient
FAULTS: list[tuple[Callable[[CheckRows], None], Any, str, Any, str]] = [
    (engine_agreement.engine_agreement, tree_attention, "masked_attention", rounded_scores, "mean_to_own_error"),
    (engine_agreement.engine_agreement, engine_agreement, "use_packed_attention", one_flipped_weight, "max"),
    (engine_agreement.engine_agreement, scheduler, "noise_key", shifted_noise, "other_draws"),
    (tree_agreement.small_trees, tree_attention, "masked_attention", rounded_scores, "gradient_to_own_error"),
    (tree_agreement.small_trees, tree_agreement, "use_packed_attention", one_flipped_weight, "max"),
    (tree_agreement.small_trees, token_logprobs, "_to_gradient", scaled_gradient, "gradient_to_own_error"),
]


@pytest.mark.parametrize(("check", "module", "name", "fault", "figure"), FAULTS)
def test_a_planted_fault_is_wrong_in_fp32(
    check: Callable[[CheckRows], None],
    module: Any,
    name: str,
    fault: Any,
    figure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, fault)
    check(CheckRows(tmp_path / "rows.jsonl", Settings(device_type="cpu", tiny=True)))
    rows = {row["row"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert rows["float32"]["verdict"] == "wrong"
    assert f"{figure} is " in rows["float32"]["why"]
