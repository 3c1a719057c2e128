"""What a local model folder must hold, and what the user is told when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.core.errors import UserError
from tidemill.models.folder import check_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(llama(), tmp_path / "model")


def told(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        check_folder(folder)
    assert caught.value.hint
    return caught.value


def test_a_complete_folder_passes(folder: Path) -> None:
    assert check_folder(folder) == folder


def test_no_folder_and_a_file(folder: Path) -> None:
    assert told(folder / "nothing").what == "there is no such folder"
    assert told(folder / "model.safetensors").what == "is a file, not a model folder"


def test_no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert told(folder).what == "the folder has no config.json"
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in told(folder).what


def test_an_adapter_without_its_base(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "an adapter without its base" in told(folder).what
    assert "merge the adapter" in told(folder).hint


def test_a_broken_configuration_names_its_line(folder: Path) -> None:
    (folder / "config.json").write_text('{\n "model_type": "llama",\n "vocab_size": ,\n}')
    assert told(folder).where == f"{folder / 'config.json'}:3"


@pytest.mark.parametrize("text", ["[]", "{}"])
def test_a_configuration_of_no_model(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "model" in told(folder).what


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_with_a_way_out(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    error = told(folder)
    assert name in error.what and "pickle" in error.what
    assert "save_pretrained" in error.hint


def test_other_formats_and_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert "model.gguf" in told(folder).what
    (folder / "model.gguf").unlink()
    assert told(folder).what == "the folder has no model.safetensors"


def test_cut_weights_name_the_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert told(folder).where == str(file)


def test_no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert told(folder).what == "the folder has no tokenizer"
