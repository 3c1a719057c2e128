"""No code of a model folder runs, nothing is asked, and a malformed configuration is one clear error."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import tidemill
from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.hardware.model_config import read_shape
from tidemill.models.auto import load_config
from tidemill.models.codec import load_codec
from tidemill.models.loading import load_model
from tidemill.models.snapshots import stored_context_limit, uninitialized_model

CPU = torch.device("cpu")
_OWN_CODE = """
from pathlib import Path
Path({marker!r}).write_text("executed")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    pass
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
_LOAD = """
import sys, torch
from pathlib import Path
from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.codec import load_codec
from tidemill.models.snapshots import uninitialized_model
from tidemill.models.loading import load_model
torch.set_num_threads(1)
cpu = torch.device("cpu")
for folder in map(Path, sys.argv[1:]):
    for load in (
        lambda: type(load_model(folder, device=cpu)).__module__,
        lambda: type(uninitialized_model(folder, ModelConfig(), device=cpu, dtype=torch.float32)).__module__,
        lambda: type(load_codec(folder)).__module__,
    ):
        try:
            print(load())
        except UserError as error:
            print("refused:", error.what)
"""


def with_fields(folder: Path, file: str = "config.json", **fields: Any) -> Path:
    """The folder, with fields of a JSON file replaced."""
    stored = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(stored | fields))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(llama(), tmp_path / "m")


_AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
_AUTO_TOKENIZER = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}}


@pytest.fixture(scope="module")
def with_code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By folder: what loading model, hollow model and codec print in a process whose standard input says yes."""
    folders = {name: save_folder(llama(), tmp_path_factory.mktemp(name) / "m") for name in ("type", "map", "tokenizer")}
    with_fields(folders["type"], model_type="own", auto_map=_AUTO_MAP)
    with_fields(folders["map"], auto_map=_AUTO_MAP)
    with_fields(folders["map"], "tokenizer_config.json", **_AUTO_TOKENIZER)
    with_fields(folders["tokenizer"], "tokenizer_config.json", tokenizer_class="OwnTokenizer", **_AUTO_TOKENIZER)
    for folder in folders.values():
        (folder / "own.py").write_text(_OWN_CODE.format(marker=str(folder / "marker")))
    command = [sys.executable, "-c", _LOAD, *map(str, folders.values())]
    done = subprocess.run(command, input="y\n" * 60, capture_output=True, text=True, timeout=90, check=True)
    for name, folder in folders.items():
        assert not (folder / "marker").exists(), f"code of the model folder {name} was executed"
    assert "Do you wish to run" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: lines[3 * number : 3 * number + 3] for number, name in enumerate(folders)}


@pytest.mark.xdist_group("model folders with code")
def test_an_unknown_model_type_with_code_is_refused_without_a_question(with_code: dict[str, list[str]]) -> None:
    model, hollow, _ = with_code["type"]
    for line in (model, hollow):
        assert line.startswith("refused: transformers ")
        assert "does not implement model_type 'own'" in line
        assert "code in the folder is never executed" in line


@pytest.mark.xdist_group("model folders with code")
def test_a_known_model_type_ignores_its_auto_map(with_code: dict[str, list[str]]) -> None:
    model, hollow, codec = with_code["map"]
    assert model == hollow == "transformers.models.llama.modeling_llama"
    assert codec == "tidemill.models.codec"


@pytest.mark.xdist_group("model folders with code")
def test_a_tokenizer_class_in_the_folder_is_not_loaded(with_code: dict[str, list[str]]) -> None:
    assert with_code["tokenizer"][2].startswith("refused: the tokenizer cannot be loaded")


def test_only_one_module_calls_the_auto_classes() -> None:
    root = Path(tidemill.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "Auto" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))).startswith("Auto")
    }
    assert users == {"models/auto.py"}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": -128}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": [64]}, "hidden_size"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, ""),
        ({"rope_parameters": {"rope_type": "no-such-type"}}, ""),
        ({"hidden_act": "no-such-activation"}, ""),
        ({"head_dim": "16"}, ""),
    ],
)
def test_a_malformed_configuration_names_file_and_field(fields: dict[str, Any], where: str, folder: Path) -> None:
    """Whoever reads it: the model, a worker's model without weights, the planner."""
    with_fields(folder, **fields)
    readers: list[Callable[[], object]] = [
        lambda: load_model(folder, device=CPU),
        lambda: uninitialized_model(folder, ModelConfig(), device=CPU, dtype=torch.float32),
    ]
    if where:
        readers += [lambda: load_config(folder), lambda: read_shape(folder)]
    for read in readers:
        with pytest.raises(UserError) as caught:
            read()
        assert caught.value.where.startswith(str(folder))
        assert where in caught.value.where
        assert len(str(caught.value).splitlines()) == 2


def test_quantized_weights_are_refused(folder: Path) -> None:
    with_fields(folder, quantization_config={"quant_method": "fp8"})
    for read in (lambda: load_model(folder, device=CPU), lambda: load_config(folder)):
        with pytest.raises(UserError, match="weights are quantized"):
            read()


def test_a_folder_with_weights_and_adapter_is_refused(folder: Path) -> None:
    """transformers would put it into the model, and take the model's weights from the base that it names."""
    adapted = peft.get_peft_model(llama(1), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(folder))
    with pytest.raises(UserError, match="a model and an adapter"):
        load_model(folder, device=CPU)


def test_a_model_without_a_stated_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match="has no max_position_embeddings"):
        stored_context_limit(tmp_path)


def test_a_config_cannot_choose_an_attention_that_is_downloaded(folder: Path) -> None:
    with_fields(folder, attn_implementation="someone/kernels", _attn_implementation="someone/kernels")
    load_model(folder, device=CPU)
    assert load_codec(folder).stop_token_ids
