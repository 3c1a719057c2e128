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
folder, cpu = Path(sys.argv[1]), torch.device("cpu")
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


def loaded_with_answer_yes(folder: Path, marker: Path) -> list[str]:
    """What loading model, hollow model and codec print in a process whose standard input says yes."""
    (folder / "own.py").write_text(_OWN_CODE.format(marker=str(marker)))
    command = [sys.executable, "-c", _LOAD, str(folder)]
    done = subprocess.run(command, input="y\n" * 20, capture_output=True, text=True, timeout=90, check=True)
    assert not marker.exists(), "code of the model folder was executed"
    assert "Do you wish to run" not in done.stdout + done.stderr
    return done.stdout.splitlines()


_AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


def test_an_unknown_model_type_with_code_is_refused_without_a_question(folder: Path, tmp_path: Path) -> None:
    with_fields(folder, model_type="own", auto_map=_AUTO_MAP)
    model, hollow, _ = loaded_with_answer_yes(folder, tmp_path / "marker")
    for line in (model, hollow):
        assert line.startswith("refused: transformers ")
        assert "does not implement model_type 'own'" in line
        assert "code in the folder is never executed" in line


def test_a_known_model_type_ignores_its_auto_map(folder: Path, tmp_path: Path) -> None:
    with_fields(folder, auto_map=_AUTO_MAP)
    with_fields(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]})
    model, hollow, codec = loaded_with_answer_yes(folder, tmp_path / "marker")
    assert model == hollow == "transformers.models.llama.modeling_llama"
    assert codec == "tidemill.models.codec"


def test_a_tokenizer_class_in_the_folder_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}}
    with_fields(folder, "tokenizer_config.json", **own)
    assert loaded_with_answer_yes(folder, tmp_path / "marker")[2].startswith("refused: the tokenizer cannot be loaded")


def test_only_one_module_calls_the_auto_classes() -> None:
    root = Path(tidemill.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
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
