"""Adapters on the disk: read back bit by bit, by peft as well, and merged into plain models."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.adapters import teach
from tests.model_folders import save_folder
from tests.model_shapes import MODEL_SHAPES, llama
from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.auto import quiet
from tidemill.models.catalog import merged_folder, resolve
from tidemill.models.checkpoint_manifest import seal
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import load_model
from tidemill.models.lora import adapter_of, attach_adapter
from tidemill.models.saving import ORIGIN, WEIGHTS, export_merged, load_adapter, read_origin, save_model, write_origin
from tidemill.models.weights_digest import weights_digest

CPU = torch.device("cpu")
TOKENS = torch.arange(2, 40)[None]


def config(base: Path, **lora: object) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(base), "lora": {"rank": 4, "alpha": 8, **lora}})


def resolved(model: ModelConfig) -> Path:
    return resolve(model, progress=lambda _: None)


def loaded(base: Path, **lora: object) -> PreTrainedModel:
    model = load_model(base, device=CPU)
    attach_adapter(model, config(base, **lora))
    return model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_folder(llama(), tmp_path / "base")


@pytest.fixture
def model(base: Path) -> PreTrainedModel:
    model = loaded(base)
    teach(model)
    return model


@pytest.fixture
def stored(model: PreTrainedModel, base: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "stored"
    folder.mkdir()
    save_model(model, folder, source=base)
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def test_it_comes_back_bit_by_bit(model: PreTrainedModel, base: Path, stored: Path) -> None:
    again = loaded(base, seed=9)
    assert weights_digest(again) != weights_digest(model)
    load_adapter(stored, again)
    assert weights_digest(again) == weights_digest(model)


def test_the_folder_holds_the_adapter_and_a_tokenizer_but_no_base(stored: Path, base: Path) -> None:
    assert holds_adapter(stored)
    assert not holds_adapter(base)
    assert {path.name for path in stored.iterdir()} == {
        "adapter_config.json", WEIGHTS, ORIGIN, "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert (stored / WEIGHTS).stat().st_mode == (stored / ORIGIN).stat().st_mode
    origin = read_origin(stored)
    assert origin.model == config(base)
    assert origin.digest == weights_digest(load_model(base, device=CPU))


def test_a_local_base_is_named_by_its_whole_path_and_a_built_in_one_by_its_name(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "char").mkdir()
    adapter = adapter_of(model)
    assert adapter is not None
    for source, noted in (("base", str(tmp_path / "base")), ("char", "char"), ("some/hub-id", "some/hub-id")):
        adapter.made_from = ModelConfig(source=source)
        write_origin(model, tmp_path)
        assert read_origin(tmp_path).model.source == noted


def test_peft_and_transformers_load_it(model: PreTrainedModel, base: Path, stored: Path) -> None:
    expected = logits(model)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(plain, stored)), expected, rtol=0, atol=1e-6)
        found = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    torch.testing.assert_close(logits(found), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_a_merged_model_is_plain_with_equal_logits(shape: str, tmp_path: Path) -> None:
    base = save_folder(MODEL_SHAPES[shape](), tmp_path / "base")
    model = loaded(base)
    teach(model)
    stored, merged = tmp_path / "stored", tmp_path / "deep" / "merged"
    stored.mkdir()
    save_model(model, stored, source=base)
    export_merged(stored, merged, resolve_base=resolved)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(merged)
        AutoTokenizer.from_pretrained(merged)
    assert not holds_adapter(merged)
    assert [name for name, _ in plain.named_parameters()] == [n for n, _ in MODEL_SHAPES[shape]().named_parameters()]
    expected = logits(model)
    assert float((logits(MODEL_SHAPES[shape]()) - expected).abs().max()) > 0.1
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-5)
    load_model(merged, device=CPU)  # as a model.source would be


def test_merging_reads_neither_the_configuration_of_peft_nor_a_pickle(
    model: PreTrainedModel, stored: Path, tmp_path: Path
) -> None:
    (stored / "adapter_config.json").write_text(json.dumps({"peft_type": "of another library"}))
    export_merged(stored, tmp_path / "merged", resolve_base=resolved)
    torch.testing.assert_close(logits(load_model(tmp_path / "merged", device=CPU)), logits(model), rtol=1e-5, atol=1e-5)
    torch.save({"a": Path}, stored / "adapter_model.bin")
    (stored / WEIGHTS).unlink()
    with pytest.raises(UserError, match="weights cannot be read") as caught:
        export_merged(stored, tmp_path / "x", resolve_base=resolved)
    assert caught.value.where == str(stored / WEIGHTS)
    origin = json.loads((stored / ORIGIN).read_text())
    del origin["model"]["lora"]
    (stored / ORIGIN).write_text(json.dumps(origin))
    with pytest.raises(UserError, match="holds an adapter"):
        export_merged(stored, tmp_path / "x", resolve_base=resolved)


def test_as_a_source_it_is_merged_once(model: PreTrainedModel, base: Path, stored: Path) -> None:
    told: list[str] = []
    merged = resolve(ModelConfig(source=str(stored)), progress=told.append)
    assert told == [f"merging the adapter of {stored} into its base"]
    torch.testing.assert_close(logits(load_model(merged, device=CPU)), logits(model), rtol=1e-5, atol=1e-5)
    assert merged_folder(stored, progress=told.append) == merged
    assert len(told) == 1
    assert merged_folder(base, progress=told.append) == base
    teach(model, seed=1)
    save_model(model, stored, source=base)
    assert merged_folder(stored, progress=told.append) != merged


def test_merging_refuses_wrong_folders(stored: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter to merge"):
        export_merged(base, tmp_path / "x", resolve_base=resolved)
    with pytest.raises(UserError, match="the output folder is not empty"):
        export_merged(stored, base, resolve_base=resolved)
    save_folder(llama(1), base)
    with pytest.raises(UserError, match="trained on a base model with other weights"):
        export_merged(stored, tmp_path / "x", resolve_base=resolved)
    assert not (tmp_path / "x").exists()


def test_other_lora_settings_are_named(base: Path, stored: Path) -> None:
    with pytest.raises(UserError, match=r"model.lora.rank = 4, now 8\n"):
        load_adapter(stored, loaded(base, rank=8))
    with pytest.raises(UserError, match=r"alpha = 8.0, now 16.0; model.lora.targets = all linear layers, now q_proj"):
        load_adapter(stored, loaded(base, alpha=16, targets=["q_proj"]))


def test_another_base_is_refused(stored: Path, tmp_path: Path) -> None:
    other = save_folder(llama(1), tmp_path / "other")
    with pytest.raises(UserError, match="trained on a base model with other weights"):
        load_adapter(stored, loaded(other))


def test_adapter_and_whole_model_are_not_confused(base: Path, stored: Path) -> None:
    with pytest.raises(UserError, match="holds a whole model, but this run trains an adapter of rank 4"):
        load_adapter(base, loaded(base))
    with pytest.raises(UserError, match="holds an adapter, but this run trains the whole model"):
        load_adapter(stored, load_model(base, device=CPU))


def test_a_corrupt_adapter_is_neither_loaded_nor_merged(base: Path, stored: Path) -> None:
    seal(stored, step=3, score=None)
    written = (stored / WEIGHTS).read_bytes()
    (stored / WEIGHTS).write_bytes(written[:-99] + bytes(99))
    with pytest.raises(UserError, match=r"adapter_model\.safetensors does not match its checksum"):
        load_adapter(stored, loaded(base))
    with pytest.raises(UserError, match=r"adapter_model\.safetensors does not match its checksum"):
        merged_folder(stored, progress=lambda _: None)


def test_a_damaged_or_foreign_adapter_folder(base: Path, stored: Path) -> None:
    (stored / WEIGHTS).write_bytes((stored / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(UserError, match="weights cannot be read"):
        load_adapter(stored, loaded(base))
    (stored / ORIGIN).write_text(json.dumps({"digest": ""}))
    with pytest.raises(UserError, match=r"base_model\.json cannot be read"):
        load_adapter(stored, loaded(base))
    (stored / ORIGIN).unlink()
    with pytest.raises(UserError, match=r"base_model\.json is missing"):
        load_adapter(stored, loaded(base))
