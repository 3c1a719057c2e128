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
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn
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


class Pair(nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


def test_digest_by_hand() -> None:
    model = Pair(torch.tensor([[1.0, -2.0], [-2.0, 1.0]]), torch.tensor([0.5, 2.0], dtype=torch.bfloat16))
    # float32, little-endian: 1 = 3f800000, -2 = c0000000; bfloat16: 0.5 = 3f00, 2 = 4000
    matrix = [bytes.fromhex("0000803f 000000c0"), bytes.fromhex("000000c0 0000803f")]
    vector = [bytes.fromhex("003f"), bytes.fromhex("0040")]
    sums = [sum(xxhash.xxh3_64_intdigest(row, at) for at, row in enumerate(rows)) % 2**64 for rows in (matrix, vector)]
    expected = f"a\0torch.float32\0(2, 2)\0{sums[0]}\0b\0torch.bfloat16\0(2,)\0{sums[1]}\0"
    assert weights_digest(model) == xxhash.xxh3_128(expected.encode()).hexdigest()


def test_digest_tells_rows_in_another_order_apart() -> None:
    rows = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert weights_digest(Pair(rows, rows)) != weights_digest(Pair(rows.flip(0), rows))


def test_digest_tells_models_apart() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    base = weights_digest(Pair(ones, zeros))
    assert weights_digest(Pair(ones.clone(), zeros.clone())) == base
    assert weights_digest(Pair(zeros, ones)) != base
    assert weights_digest(Pair(ones.view(2, 2), zeros)) != base
    assert weights_digest(Pair(ones, -zeros)) != base  # -0 is other bytes
    assert weights_digest(Pair(ones.double(), zeros)) != base
    nudged = ones.clone()
    nudged[3] = torch.nextafter(nudged[3], torch.tensor(2.0))
    assert weights_digest(Pair(nudged, zeros)) != base


def test_digest_reads_strided_and_frozen_parameters() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    strided, contiguous = Pair(matrix.t(), matrix), Pair(matrix.t().contiguous(), matrix)
    assert weights_digest(strided.requires_grad_(False)) == weights_digest(contiguous)


def test_digest_counts_tied_parameters_once() -> None:
    model = Pair(torch.ones(2), torch.ones(2))
    model.b = model.a
    total = sum(xxhash.xxh3_64_intdigest(bytes.fromhex("0000803f"), row) for row in (0, 1)) % 2**64
    assert weights_digest(model) == xxhash.xxh3_128(f"a\0torch.float32\0(2,)\0{total}\0".encode()).hexdigest()
