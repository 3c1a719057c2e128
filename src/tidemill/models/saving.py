"""From a model in memory to a folder: whole models, adapters in the format of peft, and merged models.

adapter_config.json, adapter_model.safetensors    peft loads them onto the base
base_model.json                                   the [model] section it was made from, and the base's digest
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
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
from tidemill.config.model import LoraConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.auto import quiet
from tidemill.models.cache import Progress
from tidemill.models.catalog import BUILDERS, is_local, resolve
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import DESCRIPTION, holds_adapter
from tidemill.models.loading import base_digest, load_model
from tidemill.models.lora import adapter_of, attach_adapter, merge_adapter

WEIGHTS = "adapter_model.safetensors"
ORIGIN = "base_model.json"
_PREFIX = "base_model.model."  # of peft's names of tensors in a file
_OTHER_BASE = "put the base's former weights back, or start a new run directory"


class Origin(Config):
    """What an adapter belongs to."""

    model: ModelConfig
    """The section of the run that trained it."""
    digest: str
    """Of the base's weights (see `loading.weights_digest`)."""


def write_origin(model: PreTrainedModel, folder: Path) -> None:
    """Note what the adapter of `model` belongs to. A local base is named by its whole path."""
    adapter = adapter_of(model)
    assert adapter is not None, "a model without an adapter"
    made_from = adapter.made_from
    if made_from.source not in BUILDERS and is_local(made_from.source):
        whole = str(Path(made_from.source).expanduser().resolve())
        made_from = made_from.model_copy(update={"source": whole})
    origin = Origin(model=made_from, digest=base_digest(model))
    (folder / ORIGIN).write_text(origin.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin:
    """
    Raises:
        UserError: the folder does not say, as one that Tidemill did not write.
    """
    try:
        return Origin.model_validate_json((folder / ORIGIN).read_bytes())
    except (OSError, ValidationError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else "it cannot be read"
        raise UserError(
            f"the adapter does not say which model it belongs to: {reason}",
            where=str(folder / ORIGIN),
            hint="give a checkpoint that training wrote, or merge the adapter into its base model and give that",
        ) from error


def load_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Read the weights of a stored adapter into the one that `model` carries, bit for bit.

    Raises:
        UserError: it is damaged, of another shape or belongs to another base, or only one of both is an adapter at all.
    """
    refuse_damaged(folder)
    wanted = adapter_of(model)
    if wanted is None or not holds_adapter(folder):
        raise _only_one(folder, wanted.made_from.lora if wanted else LoraConfig())
    origin = read_origin(folder)
    if differing := _differences(origin.model.lora, wanted.made_from.lora):
        raise UserError(
            f"the adapter has {differing}",
            where=str(folder),
            hint="use the [model.lora] it was trained with, or start a new run directory",
        )
    if origin.digest != base_digest(model):
        raise other_base(folder)
    _fill(adapter_tensors(model), folder / WEIGHTS)


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's own tensors by their names in a file."""
    state: dict[str, torch.Tensor] = model.get_adapter_state_dict()
    return {_PREFIX + name: tensor for name, tensor in state.items()}


def other_base(folder: Path) -> UserError:
    return UserError("the adapter belongs to a base with other weights", where=str(folder), hint=_OTHER_BASE)


def _fill(targets: dict[str, torch.Tensor], file: Path) -> None:
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the adapter's weights cannot be read ({error})", where=str(file)) from error
    shapes, present = ({name: tensor.shape for name, tensor in each.items()} for each in (stored, targets))
    if shapes != present:
        odd = min(name for name in shapes.keys() | present.keys() if shapes.get(name) != present.get(name))
        raise UserError(f"the adapter does not fit this model at {odd}", where=str(file), hint=_OTHER_BASE)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def _only_one(folder: Path, lora: LoraConfig) -> UserError:
    what = "whole model" if lora.enabled else "adapter"
    trains = f"an adapter of rank {lora.rank}" if lora.enabled else "the whole model"
    return UserError(
        f"the checkpoint holds {'a' if lora.enabled else 'an'} {what}, and this run trains {trains}",
        where=str(folder),
        hint="use the model.lora.rank it was trained with, or start a new run directory",
    )


def _differences(there: LoraConfig, here: LoraConfig) -> str:
    """In words; empty where both compute the same function of the same tensors."""

    def relevant(config: LoraConfig) -> dict[str, Any]:
        targets = " and ".join(sorted(config.targets)) or "all linear layers"
        return {"rank": config.rank, "alpha": config.alpha, "targets": targets}

    old, new = relevant(there), relevant(here)
    return "; ".join(
        f"model.lora.{key} = {old[key]}, and {new[key]} is asked for" for key in old if old[key] != new[key]
    )


_TENSOR_FILES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
_NOT_COPIED = {"config.json", "generation_config.json", "checkpoint.json", DESCRIPTION}
_TEMPLATE_FOLDERS = ("additional_chat_templates",)


def save_model(model: PreTrainedModel, directory: Path, *, source: Path) -> None:
    """Write weights, configuration and tokenizer into an empty directory; of a model with an adapter the adapter alone,
    in peft's format, and what it belongs to.

    Args:
        source: the Hugging Face folder the model came from; its tokenizer files are copied.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    with disk_faults(directory), quiet():
        model.save_pretrained(directory)
        if adapter_of(model) is not None:
            write_origin(model, directory)
        _copy_tokenizer(source, directory)
    share_files(directory)


def share_files(directory: Path) -> None:
    """safetensors files are born private to their owner: give them the mode of the other files."""
    mode = next(path.stat().st_mode for path in directory.glob("*.json"))
    for path in directory.rglob("*.safetensors"):
        path.chmod(mode)


@contextmanager
def disk_faults(directory: Path) -> Iterator[None]:
    """safetensors has an error class of its own for a disk that fails; it names the system's number in its text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(directory)) from error


def tokenizer_files(source: Path) -> Iterator[Path]:
    """What `save_model` copies: every file of the source folder but weights and what is written anew."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _TENSOR_FILES or path.name.endswith(".index.json")
        if path.is_file() and not weights and not path.name.startswith(".") and path.name not in _NOT_COPIED:
            yield path
    for name in _TEMPLATE_FOLDERS:
        yield from (path for path in sorted((source / name).rglob("*")) if path.is_file())


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for path in tokenizer_files(source):
        target = directory / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def export_merged(checkpoint: Path, directory: Path, *, progress: Progress) -> None:
    """Write the model of a checkpoint that holds an adapter as a plain Hugging Face folder in float32.

    Its weights are the base's plus the adapter's product, so that its logits are those of the two but for rounding.

    Args:
        directory: made if need be; must be empty.
        progress: told, in words, what takes long.

    Raises:
        UserError: the checkpoint is damaged or holds no adapter, its base is gone or changed, or the directory
            cannot be written.
    """
    if not holds_adapter(checkpoint):
        hint = "name a checkpoint of a run with model.lora.rank above 0"
        raise UserError("there is no adapter to merge", where=str(checkpoint), hint=hint)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("something is there already", where=str(directory), hint="name a folder that is new or empty")
    refuse_damaged(checkpoint)
    source = resolve(read_origin(checkpoint).model, progress=progress)
    merged = _merged(source, checkpoint)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_model(merged, directory, source=source)
    except OSError as error:
        raise UserError(f"the merged model cannot be written: {error}", where=str(directory)) from error


def content_key(checkpoint: Path) -> str:
    """Names what merging would give: equal keys, equal weights.

    Raises:
        UserError: the checkpoint is not whole.
    """
    read_origin(checkpoint)
    try:
        contents = [(checkpoint / name).read_bytes() for name in (ORIGIN, WEIGHTS)]
    except OSError as error:
        raise UserError(f"the adapter cannot be read: {error}", where=str(checkpoint)) from error
    return xxhash.xxh3_64_hexdigest(b"".join(contents))


def _merged(source: Path, checkpoint: Path) -> PreTrainedModel:
    """From base_model.json and the tensors alone: peft's adapter_config.json could name other code and pickles."""
    model = load_model(source, device=torch.device("cpu"))
    made_from = read_origin(checkpoint).model
    if made_from.lora.enabled:
        attach_adapter(model, made_from)
    load_adapter(checkpoint, model)
    merge_adapter(model)
    return model
