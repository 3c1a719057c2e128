from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from tests.model_shapes import MODEL_SHAPES, VOCABULARY, llama, qwen3
from tidemill.config.learning import OptimizerConfig
from tidemill.config.model import CharModelConfig
from tidemill.core.errors import UserError
from tidemill.models.attention import use_packed_attention
from tidemill.models.builtin import build_char_model
from tidemill.models.checkpoint_manifest import MANIFEST
from tidemill.models.loading import load_model
from tidemill.models.weights_digest import weights_digest
from tidemill.trainer import checkpoint
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.update import build_optimizer, clip_and_step

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01)
COUNTERS = {"step": 2, "version": {"number": 2, "digest": "ab"}, "rate": 0.1}


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on data from the global random state of torch, which must be restored as well."""
    for _ in range(steps):
        ids = torch.randint(2, VOCABULARY, (2, 9))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0)


def state_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    moments = {f"{n}/{k}": v for n, p in named.items() for k, v in optimizer.state.get(p, {}).items()}
    return {name: tensor.detach().clone() for name, tensor in {**named, **moments}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of a model: tokenizer files, and files that must not be copied."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "pytorch_model.bin", "model.safetensors", ".cache", MANIFEST):
        (folder / name).write_text(f"of the source: {name}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("template")
    return folder


def saved(folder: Path, source: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Path:
    folder.mkdir()
    save_state(folder, model=model, optimizer=optimizer, source=source, counters=COUNTERS)
    return folder


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_training_after_a_restore_is_bit_identical(tmp_path: Path, source: Path, shape: str) -> None:
    model = MODEL_SHAPES[shape]()
    optimizer = build_optimizer(model, CONFIG)
    torch.manual_seed(1)
    train(model, optimizer, 2)
    saved(tmp_path / "c", source, model, optimizer)
    train(model, optimizer, 2)
    uninterrupted, random_state = state_of(model, optimizer), torch.get_rng_state()

    resumed = MODEL_SHAPES[shape](seed=9)  # as in a new process: other weights, no moments, another random state
    resumed_optimizer = build_optimizer(resumed, CONFIG)
    torch.manual_seed(99)
    assert restore_state(tmp_path / "c", model=resumed, optimizer=resumed_optimizer) == COUNTERS
    train(resumed, resumed_optimizer, 2)
    assert same(state_of(resumed, resumed_optimizer), uninterrupted)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_restoring_copies_into_existing_tensors(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, 1)
    saved(tmp_path / "c", source, model, optimizer)
    before = state_of(model, optimizer)
    train(model, optimizer, 1)
    places = [t.data_ptr() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    restore_state(tmp_path / "c", model=model, optimizer=optimizer)
    assert [t.data_ptr() for p in model.parameters() for t in (p, *optimizer.state[p].values())] == places
    assert same(state_of(model, optimizer), before)


def test_a_state_without_moments_removes_them(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    saved(tmp_path / "c", source, model, optimizer)
    train(model, optimizer, 1)
    restore_state(tmp_path / "c", model=model, optimizer=optimizer)
    assert not optimizer.state


def test_the_unfused_optimizer_restores_too(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=False)
    train(model, optimizer, 2)
    saved(tmp_path / "c", source, model, optimizer)
    other = llama(seed=3)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=False, foreach=False)
    restore_state(tmp_path / "c", model=other, optimizer=other_optimizer)
    assert same(state_of(other, other_optimizer), state_of(model, optimizer))


def test_plain_transformers_loads_the_folder(tmp_path: Path) -> None:
    build_char_model(CharModelConfig(hidden_size=16, layers=1, heads=2), tmp_path / "source")
    model = load_model(tmp_path / "source", device=torch.device("cpu"))
    use_packed_attention(model)
    optimizer = build_optimizer(model, CONFIG)
    train_ids = torch.randint(2, 20, (1, 5))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0)
    written = CheckpointStore(tmp_path / "checkpoints", keep_last=1).write(
        1, lambda folder: save_state(folder, model=model, optimizer=optimizer, source=tmp_path / "source", counters={})
    )
    assert "tidemill" not in (written.path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(written.path, local_files_only=True)
    assert plain.config._attn_implementation != "tidemill"
    assert weights_digest(plain) == weights_digest(model)
    assert plain(input_ids=train_ids).logits.shape[:2] == (1, 5)
    tokenizer = AutoTokenizer.from_pretrained(written.path, local_files_only=True)
    assert tokenizer.decode(tokenizer("12+34=", add_special_tokens=False)["input_ids"]) == "12+34="
    assert model.config._attn_implementation == "tidemill"  # saving does not change the model


def test_a_checkpoint_can_be_the_source_of_another_run(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)

    def write(root: str, origin: Path) -> Path:
        store = CheckpointStore(tmp_path / root, keep_last=1)
        store.write(1, lambda f: save_state(f, model=model, optimizer=optimizer, source=origin, counters={}))
        latest = store.latest()
        assert latest.checkpoint is not None
        return latest.checkpoint.path

    second = write("second", write("first", source))
    assert (second / "tokenizer.json").read_text() == "of the source: tokenizer.json"


def test_only_small_files_are_copied_from_the_source(tmp_path: Path, source: Path) -> None:
    model = llama()
    folder = saved(tmp_path / "c", source, model, build_optimizer(model, CONFIG))
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
        "additional_chat_templates/tools.jinja",
        "trainer_state/state.json",
        "trainer_state/random.safetensors",
    }
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_files_have_default_permissions(tmp_path: Path, source: Path) -> None:
    model = llama()
    folder = saved(tmp_path / "c", source, model, build_optimizer(model, CONFIG))
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_moments_are_split_into_files_of_limited_size(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 100_000)
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, 1)
    folder = saved(tmp_path / "c", source, model, optimizer)
    files = sorted((folder / "trainer_state").glob("moments-*"))
    assert len(files) > 2
    assert all(file.stat().st_size < 110_000 for file in files)
    other = llama(seed=5)
    other_optimizer = build_optimizer(other, CONFIG)
    restore_state(folder, model=other, optimizer=other_optimizer)
    assert same(state_of(other, other_optimizer), state_of(model, optimizer))


def test_weights_stored_under_other_names_are_restored(tmp_path: Path, source: Path) -> None:
    # Experts are fused in memory and stored one by one.
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    model, other = MixtralForCausalLM(config), MixtralForCausalLM(config)
    optimizer, other_optimizer = build_optimizer(model, CONFIG), build_optimizer(other, CONFIG)
    train(model, optimizer, 1)
    saved(tmp_path / "c", source, model, optimizer)
    restore_state(tmp_path / "c", model=other, optimizer=other_optimizer)
    assert same(state_of(other, other_optimizer), state_of(model, optimizer))


@pytest.mark.parametrize(("model", "other"), [(llama(), qwen3()), (qwen3(), llama()), (llama(), llama(layers=1))])
def test_another_models_state_is_refused(
    tmp_path: Path, source: Path, model: PreTrainedModel, other: PreTrainedModel
) -> None:
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, 1)
    saved(tmp_path / "c", source, model, optimizer)
    with pytest.raises(UserError, match="another model"):
        restore_state(tmp_path / "c", model=other, optimizer=build_optimizer(other, CONFIG))


def test_weights_with_a_missing_tensor_are_refused(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    folder = saved(tmp_path / "c", source, model, optimizer)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is missing"):
        restore_state(folder, model=model, optimizer=optimizer)


def test_moments_of_an_unknown_parameter_are_refused(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, 1)
    folder = saved(tmp_path / "c", source, model, optimizer)
    save_file({"exp_avg:somewhere.else": torch.zeros(2)}, folder / "trainer_state" / "moments-00001.safetensors")
    with pytest.raises(UserError, match=r"optimizer state of somewhere\.else"):
        restore_state(folder, model=model, optimizer=optimizer)


def test_another_dtype_is_refused(tmp_path: Path, source: Path) -> None:
    model = llama()
    folder = saved(tmp_path / "c", source, model, build_optimizer(model, CONFIG))
    half = llama().to(dtype=torch.bfloat16)  # type: ignore[call-arg, arg-type, unused-ignore]
    with pytest.raises(UserError, match=r"float32 .* in the checkpoint and bfloat16"):
        restore_state(folder, model=half, optimizer=build_optimizer(half, CONFIG))


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_a_folder_without_trainer_state_is_refused(tmp_path: Path, source: Path, text: str | None) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    folder = saved(tmp_path / "c", source, model, optimizer)
    state = folder / "trainer_state" / "state.json"
    state.unlink() if text is None else state.write_text(text)
    with pytest.raises(UserError, match="cannot read trainer state"):
        restore_state(folder, model=model, optimizer=optimizer)


def test_a_state_of_another_format_is_refused(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    folder = saved(tmp_path / "c", source, model, optimizer)
    (folder / "trainer_state" / "state.json").write_text(json.dumps({"format": 2, "counters": {}, "moments": []}))
    with pytest.raises(UserError, match="format 2, this version reads format 3"):
        restore_state(folder, model=model, optimizer=optimizer)


def test_a_full_disk_raises_oserror(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    model = llama()
    with pytest.raises(OSError) as caught:
        saved(tmp_path / "c", source, model, build_optimizer(model, CONFIG))
    assert caught.value.errno == errno.ENOSPC


def test_state_bytes_is_a_close_upper_bound(tmp_path: Path, source: Path) -> None:
    model = llama()
    optimizer = build_optimizer(model, CONFIG)
    train(model, optimizer, 1)
    estimate = state_bytes(model, optimizer, source=source)
    folder = saved(tmp_path / "c", source, model, optimizer)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    # tied embeddings counted once: 3 × 4 bytes per parameter
    numbers = 12 * sum(p.numel() for p in model.parameters())
    assert numbers < size <= estimate <= 1.5 * size
