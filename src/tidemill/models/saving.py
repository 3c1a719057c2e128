"""Writes a model to a folder: whole models, adapters in peft's format, and merged models.

adapter_config.json, adapter_model.safetensors    the adapter, as peft loads it
base_model.json                                   the [model] section it was trained with, and the base's digest
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tidemill.config.base import Config
from tidemill.config.model import BUILT_IN_MODELS, LoraConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.auto import quiet
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import DESCRIPTION, holds_adapter, is_local
from tidemill.models.loading import load_model
from tidemill.models.lora import adapter_of, attach_adapter, learned_parameters, merge_adapter
from tidemill.models.ranks import ONE_RANK, Ranks, filled, whole
from tidemill.models.streamed_weights import stored_state, write_tensors
from tidemill.models.weights_digest import base_digest

WEIGHTS = "adapter_model.safetensors"
ORIGIN = "base_model.json"
_PREFIX = "base_model.model."  # of tensor names in peft's files
_OTHER_BASE = "restore the weights of the base model, or start a new run directory"


class Origin(Config):
    """The base model of an adapter."""

    model: ModelConfig
    """The [model] section of the run that trained it."""
    digest: str
    """`weights_digest` of the base."""


def write_origin(model: PreTrainedModel, folder: Path, ranks: Ranks = ONE_RANK) -> None:
    """Write the base model of `model`'s adapter; a local base is written as an absolute path."""
    adapter = adapter_of(model)
    assert adapter is not None, "a model without an adapter"
    made_from = adapter.made_from
    if made_from.source not in BUILT_IN_MODELS and is_local(made_from.source):
        absolute = str(Path(made_from.source).expanduser().resolve())
        made_from = made_from.model_copy(update={"source": absolute})
    origin = Origin(model=made_from, digest=base_digest(model, ranks))
    if ranks.index > 0:
        return
    (folder / ORIGIN).write_text(origin.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin:
    """The base model of an adapter. Raises UserError: base_model.json is missing or damaged."""
    try:
        return Origin.model_validate_json((folder / ORIGIN).read_bytes())
    except (OSError, ValidationError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise UserError(
            f"the base model of the adapter is unknown: {ORIGIN} {reason}",
            where=str(folder / ORIGIN),
            hint="give a checkpoint that training wrote, or merge the adapter into its base model and give that",
        ) from error


@contextmanager
def errors_of_base(adapter: Path) -> Iterator[None]:
    """Report errors of a base model as the adapter's."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"the base model of the adapter cannot be used: {error.what}",
            where=f"{adapter}: {error.where}",
            hint=f"put it back there, or correct model.source in the adapter's {ORIGIN}",
        ) from error


def load_adapter(folder: Path, model: PreTrainedModel, ranks: Ranks = ONE_RANK) -> None:
    """Load the weights of a stored adapter into the adapter of `model`, bit-exact.

    Raises:
        UserError: it is damaged, has another shape or another base, or either `folder` or `model` has no adapter.
    """
    refuse_damaged(folder)
    adapter = adapter_of(model)
    if adapter is None or not holds_adapter(folder):
        lora = adapter.made_from.lora if adapter else LoraConfig()
        stored = "a whole model" if lora.enabled else "an adapter"
        trained = f"an adapter of rank {lora.rank}" if lora.enabled else "the whole model"
        raise UserError(
            f"the checkpoint holds {stored}, but this run trains {trained}",
            where=str(folder),
            hint="use the model.lora.rank it was trained with, or start a new run directory",
        )
    origin = read_origin(folder)
    if differences := _differences(origin.model.lora, adapter.made_from.lora):
        raise UserError(
            f"the adapter was trained with other settings: {differences}",
            where=str(folder),
            hint="use the [model.lora] it was trained with, or start a new run directory",
        )
    if origin.digest != base_digest(model, ranks):
        raise UserError(
            "the adapter was trained on a base model with other weights, or by a version with another digest",
            where=str(folder),
            hint=_OTHER_BASE,
        )
    file, state = folder / WEIGHTS, model.get_adapter_state_dict()
    targets: dict[str, torch.Tensor] = {_PREFIX + name: tensor for name, tensor in state.items()}
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the adapter's weights cannot be read ({error})", where=str(file)) from error
    found, expected = ({name: tensor.shape for name, tensor in each.items()} for each in (tensors, targets))
    if found != expected:
        name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise UserError(f"the adapter does not fit this model at {name}", where=str(file), hint=_OTHER_BASE)
    for name, target in targets.items():
        filled(target, tensors[name], 0)


def _differences(stored: LoraConfig, given: LoraConfig) -> str:
    """`rank = 4, now 8; ...`; empty if both define the same function of the same tensors."""

    def relevant(config: LoraConfig) -> dict[str, Any]:
        targets = " and ".join(sorted(config.targets)) or "all linear layers"
        return {"rank": config.rank, "alpha": config.alpha, "targets": targets}

    old, new = relevant(stored), relevant(given)
    return "; ".join(f"model.lora.{key} = {old[key]}, now {new[key]}" for key in old if old[key] != new[key])


_TENSOR_FILES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
_NOT_COPIED = {"config.json", "generation_config.json", "checkpoint.json", DESCRIPTION}
_TEMPLATE_FOLDERS = ("additional_chat_templates",)


def save_model(model: PreTrainedModel, directory: Path, *, source: Path, ranks: Ranks = ONE_RANK) -> None:
    """Write weights, configuration and tokenizer into an empty directory.

    For a model with an adapter, write only the adapter in peft's format, and its base's name and digest.

    Args:
        source: the Hugging Face folder the model was loaded from; its tokenizer files are copied.
        ranks: all of them call this; the first writes. It holds one tensor of a whole model at a time.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    with disk_errors(directory), quiet():
        if ranks.size == 1:
            model.save_pretrained(directory)
        else:
            _save_shards(model, directory, ranks)
        if adapter_of(model) is not None:
            write_origin(model, directory, ranks)
        if ranks.index > 0:
            return
        for path in tokenizer_files(source):
            target = directory / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    share_files(directory)


def _save_shards(model: PreTrainedModel, directory: Path, ranks: Ranks) -> None:
    """Write what `save_pretrained` writes for a model in one process."""
    if adapter_of(model) is not None:
        state = {name: whole(tensor) for name, tensor in learned_parameters(model).items()}
        if ranks.index == 0:
            model.save_pretrained(directory, state_dict=state)
        return
    if ranks.index == 0:
        model.config.architectures, model.config.dtype = [type(model).__name__], str(model.dtype).partition(".")[2]
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    write_tensors(directory / "model.safetensors" if ranks.index == 0 else None, stored_state(model))


def share_files(directory: Path) -> None:
    """Give safetensors files, which are written with mode 600, the mode of the other files."""
    mode = next(path.stat().st_mode for path in directory.glob("*.json"))
    for path in directory.rglob("*.safetensors"):
        path.chmod(mode)


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Raise safetensors' errors as OSError, with the error number in their text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(directory)) from error


def tokenizer_files(source: Path) -> Iterator[Path]:
    """The files that `save_model` copies: all but weights, configuration and Tidemill's own files."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _TENSOR_FILES or path.name.endswith(".index.json")
        if path.is_file() and not weights and not path.name.startswith(".") and path.name not in _NOT_COPIED:
            yield path
    for name in _TEMPLATE_FOLDERS:
        yield from (path for path in sorted((source / name).rglob("*")) if path.is_file())


def export_merged(checkpoint: Path, directory: Path, *, resolve_base: Callable[[ModelConfig], Path]) -> None:
    """Merge the adapter of a checkpoint into its base and write the model as a Hugging Face folder in float32.

    The logits equal those of base and adapter up to rounding.

    Args:
        directory: created if needed; must be empty.
        resolve_base: returns the folder of the base model.

    Raises:
        UserError: the checkpoint is damaged or holds no adapter, its base is missing or changed, or the directory
            cannot be written.
    """
    if not holds_adapter(checkpoint):
        hint = "name a checkpoint of a run with model.lora.rank above 0"
        raise UserError("there is no adapter to merge", where=str(checkpoint), hint=hint)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("the output folder is not empty", where=str(directory), hint="name a new or empty folder")
    refuse_damaged(checkpoint)
    # Only base_model.json and tensors are read: peft's adapter_config.json could name other code and pickles.
    made_from = read_origin(checkpoint).model
    with errors_of_base(checkpoint):
        source = resolve_base(made_from)
        model = load_model(source, device=torch.device("cpu"))
    if made_from.lora.enabled:
        attach_adapter(model, made_from)
    load_adapter(checkpoint, model)
    merge_adapter(model)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_model(model, directory, source=source)
    except OSError as error:
        raise UserError(f"the merged model cannot be written: {error}", where=str(directory)) from error


def adapter_digest(checkpoint: Path) -> str:
    """Digest of an adapter and its base; equal digests give equal merged weights.

    Raises:
        UserError: the checkpoint is incomplete.
    """
    read_origin(checkpoint)
    try:
        contents = [(checkpoint / name).read_bytes() for name in (ORIGIN, WEIGHTS)]
    except OSError as error:
        raise UserError(f"the adapter cannot be read: {error}", where=str(checkpoint)) from error
    return xxhash.xxh3_64_hexdigest(b"".join(contents))
