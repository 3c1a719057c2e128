"""A weight file written tensor by tensor, and the families for which that is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_families import FAMILIES, build_family
from tests.model_folders import save_folder
from tidemill.core.errors import UserError
from tidemill.models.snapshots import check_shardable
from tidemill.models.streamed_weights import stored_state, write_tensors

REFUSED = {
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_neox",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
def test_the_file_is_that_of_the_library(family: str, tmp_path: Path) -> None:
    model = build_family(family, FAMILIES[family])
    folder = save_folder(model, tmp_path / "library")
    check_shardable(folder)
    write_tensors(tmp_path / "ours.safetensors", stored_state(model))
    assert (tmp_path / "ours.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_with_other_names_in_files_are_refused(family: str, tmp_path: Path) -> None:
    folder = save_folder(build_family(family, FAMILIES[family]), tmp_path / "library")
    with pytest.raises(UserError, match="stores its weights under other names than its modules") as refused:
        check_shardable(folder)
    assert refused.value.where == "trainer.shards"
