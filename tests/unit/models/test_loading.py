"""From a folder to a model in memory, and the digest of its weights."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from tests.model_folders import save_folder
from tests.model_shapes import CONTEXT, MODEL_SHAPES, llama
from tidemill.core.errors import UserError
from tidemill.models.attention import IMPLEMENTATION
from tidemill.models.auto import quiet
from tidemill.models.checkpoint_manifest import seal
from tidemill.models.loading import context_limit, load_model
from tidemill.models.weights_digest import weights_digest

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_every_shape_comes_back_bit_for_bit(shape: str, shard_size: str, tmp_path: Path) -> None:
    saved = MODEL_SHAPES[shape]()
    folder = save_folder(saved, tmp_path / "m", shard_size=shard_size)
    loaded = load_model(folder, device=CPU)
    assert weights_digest(loaded) == weights_digest(saved)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training
    assert loaded.config._attn_implementation == IMPLEMENTATION
    assert context_limit(loaded) == CONTEXT
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == saved.config.tie_word_embeddings


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    saved = llama()
    loaded = load_model(save_folder(saved, tmp_path / "m"), device=CPU, dtype=torch.bfloat16)
    for (name, ours), theirs in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name
    back = load_model(save_folder(loaded, tmp_path / "b"), device=CPU)
    assert all(parameter.dtype == torch.float32 for parameter in back.parameters())


def test_a_loaded_model_does_not_follow_its_file(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    loaded = load_model(folder, device=CPU)
    before = weights_digest(loaded)
    with (folder / "model.safetensors").open("r+b") as file:  # in place: a memory map would see it, or crash
        file.seek(4096)
        file.write(b"\x55" * 20_000)
        file.truncate(50_000)
    assert weights_digest(loaded) == before


def test_a_tensor_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, device=CPU)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(UserError) as caught:
        load_model(folder, device=CPU)
    assert caught.value.where == str(folder)


def test_an_unknown_architecture_is_a_user_error(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UserError, match="does not implement model_type 'no-such-thing'") as caught:
        load_model(folder, device=CPU)
    assert len(str(caught.value).splitlines()) == 2


def test_a_damaged_folder_never_reaches_the_library(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="weight file is damaged"):
        load_model(folder, device=CPU)


def test_a_checkpoint_is_loaded_only_as_it_was_written(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "moments").write_bytes(b"moments")
    seal(folder, step=3, score=None)
    (folder / "trainer_state" / "moments").unlink()  # a model is not loaded from that
    load_model(folder, device=CPU)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(9000)
        file.write(bytes(99))
    with pytest.raises(UserError, match=r"model\.safetensors does not match its checksum") as caught:
        load_model(folder, device=CPU)
    assert caught.value.where == str(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    broken = llama()
    with torch.no_grad():
        broken.get_parameter("model.layers.1.mlp.down_proj.weight")[2, 3] = value
    folder = save_folder(broken, tmp_path / "m")
    with pytest.raises(UserError, match=r"not finite: model\.layers\.1\.mlp\.down_proj\.weight") as caught:
        load_model(folder, device=CPU, dtype=dtype)
    assert caught.value.where == str(folder)


def test_loading_is_silent(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "m")
    code = (
        "import torch; from pathlib import Path; from tidemill.models.loading import load_model;"
        f"load_model(Path({str(folder)!r}), device=torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "" and done.stderr == ""


def test_quiet_puts_the_librarys_settings_back() -> None:
    verbosity = transformers_logging.get_verbosity()
    try:
        transformers_logging.set_verbosity(logging.INFO)
        with quiet():
            assert transformers_logging.get_verbosity() == logging.CRITICAL
            assert not transformers_logging.is_progress_bar_enabled()
            warnings.warn("not an error in here", UserWarning, stacklevel=1)
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
        with pytest.raises(KeyError), quiet():
            raise KeyError
        assert transformers_logging.get_verbosity() == logging.INFO
    finally:
        transformers_logging.set_verbosity(verbosity)
