"""Headers of safetensors files, written here by hand, byte for byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.model_folders import save_folder
from tests.model_shapes import qwen3
from tidemill.core.errors import UserError
from tidemill.models.folder import StoredTensor, stored_tensors, weight_files

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}


def write(folder: Path, header: object = HEADER, *, data: int = 26, name: str = "model.safetensors") -> Path:
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return folder / name


def test_dtypes_and_shapes_are_read(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert stored_tensors(tmp_path) == {
        "a": StoredTensor(file=file, dtype="F32", shape=(2, 3)),
        "b": StoredTensor(file=file, dtype="BF16", shape=()),
    }


def test_shards_are_read_together(tmp_path: Path) -> None:
    model = qwen3()
    save_folder(model, tmp_path, shard_size="200KB")
    assert len(weight_files(tmp_path)) > 1
    found = stored_tensors(tmp_path)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_folder(qwen3(), tmp_path, shard_size="200KB")
    gone = weight_files(tmp_path)[1]
    gone.unlink()
    with pytest.raises(UserError, match="missing") as caught:
        stored_tensors(tmp_path)
    assert caught.value.where == str(gone)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    assert stored_tensors(tmp_path) == {}


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(index: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(UserError, match="index of the weight files is not readable") as caught:
        weight_files(tmp_path)
    assert caught.value.where == str(path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(UserError, match="outside its folder"):
        weight_files(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 8, 20, -1])
def test_a_file_cut_short_is_refused(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="the weight file is damaged") as caught:
        stored_tensors(tmp_path)
    assert caught.value.where == str(file)
    assert caught.value.hint


def test_a_file_with_bytes_to_spare_is_refused(tmp_path: Path) -> None:
    write(tmp_path, data=27)
    with pytest.raises(UserError, match="the weight file is damaged"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 26]},  # 26 bytes are not 6 floats
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]},
        {"dtype": "F32", "shape": [2, 3]},
        {"dtype": "F32", "shape": "23", "data_offsets": [0, 26]},
        [0, 26],
    ],
)
def test_a_header_of_the_wrong_form_is_refused(entry: object, tmp_path: Path) -> None:
    file = write(tmp_path, {"a": entry})
    with pytest.raises(UserError, match="the weight file is damaged") as caught:
        stored_tensors(tmp_path)
    assert caught.value.where == str(file)


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"\xff\x00{}")
    with pytest.raises(UserError, match="damaged"):
        stored_tensors(tmp_path)


def test_a_text_file_under_the_name_of_weights_is_refused(tmp_path: Path) -> None:
    # What a checkout without large files leaves; its first 8 bytes read as a length are astronomic.
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match="is a pointer of Git LFS"):
        stored_tensors(tmp_path)
