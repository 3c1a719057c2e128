"""Engines use the trained model itself, or a copy that is updated at every load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters import teach
from tests.model_folders import save_folder
from tests.model_shapes import qwen3
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, pack_tokens
from tidemill.models.folder import DESCRIPTION
from tidemill.models.loading import probe_logprobs
from tidemill.models.lora import frozen_parameters, learned_parameters
from tidemill.models.model_source import ModelSource
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle

IDS = pack_tokens(range(2, 30))
V0, V1 = (PolicyVersion(number=number, digest=str(number)) for number in (0, 1))


def parts_of(folder: Path, *, rank: int, precision: str = "fp32", lag: int = 0) -> ModelBundle:
    spec = RunSpec.model_validate(
        {
            "model": {"source": str(save_folder(qwen3(), folder)), "lora": {"rank": rank}},
            "trainer": {"threads": 1, "device": "cpu", "precision": precision},
            "schedule": {"max_policy_lag": lag},
        }
    )
    return load_model_bundle(spec, progress=lambda _: None)


def test_a_reward_model_is_refused_as_policy(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text('{"kind": "reward_model"}')
    with pytest.raises(UserError, match="holds a reward model"):
        parts_of(tmp_path, rank=0)
    with pytest.raises(UserError, match="holds a reward model"):
        load_model_bundle(RunSpec(), progress=lambda _: None, model=ModelSource(kind="folder", source=str(tmp_path)))


@pytest.mark.parametrize("rank", [0, 4])
def test_at_lag_0_in_fp32_engines_use_the_trained_model(rank: int, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, rank=rank)
    assert parts.rollout_model is parts.model
    engine = parts.engine(V0, prompt_tokens=4)
    teach(parts.model)
    assert engine.probe(IDS) == probe_logprobs(parts.model, IDS)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("precision", "lag"), [("bf16", 0), ("fp32", 1), ("bf16", 1)])
def test_a_load_updates_the_copy(rank: int, precision: str, lag: int, tmp_path: Path) -> None:
    parts = parts_of(tmp_path, rank=rank, precision=precision, lag=lag)
    engine = parts.engine(V0, prompt_tokens=4)
    first = engine.probe(IDS)
    assert (first == probe_logprobs(parts.model, IDS)) is (precision == "fp32")
    teach(parts.model)
    assert engine.probe(IDS) == first
    engine.load(V1)
    assert engine.probe(IDS) != first
    for mine, its in zip(
        learned_parameters(parts.model).values(), learned_parameters(parts.rollout_model).values(), strict=True
    ):
        assert torch.equal(mine.to(parts.rollout_dtype), its)
        assert not its.requires_grad


def test_a_copy_of_the_same_dtype_shares_the_base_of_an_adapter(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, rank=4, lag=1)
    for mine, its in zip(
        frozen_parameters(parts.model).values(), frozen_parameters(parts.rollout_model).values(), strict=True
    ):
        assert mine is its
    assert all(parameter.dtype == torch.float32 for parameter in parts.model.parameters())
