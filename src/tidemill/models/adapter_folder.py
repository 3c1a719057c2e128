"""An adapter on the disk: peft's own format, and beside it what it belongs to.

adapter_config.json, adapter_model.safetensors    peft loads them onto the base
base_model.json                                   the [model] section it was made from, and the base's digest
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tidemill.config.base import Config
from tidemill.config.lora import LoraConfig
from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.catalog import BUILDERS, is_local
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import base_digest
from tidemill.models.lora import adapter_of

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
            cure="give a checkpoint that training wrote, or merge the adapter into its base model and give that",
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
            cure="use the [model.lora] it was trained with, or start a new run directory",
        )
    if origin.digest != base_digest(model):
        raise other_base(folder)
    _fill(adapter_tensors(model), folder / WEIGHTS)


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's own tensors by their names in a file."""
    state: dict[str, torch.Tensor] = model.get_adapter_state_dict()
    return {_PREFIX + name: tensor for name, tensor in state.items()}


def other_base(folder: Path) -> UserError:
    return UserError("the adapter belongs to a base with other weights", where=str(folder), cure=_OTHER_BASE)


def _fill(targets: dict[str, torch.Tensor], file: Path) -> None:
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the adapter's weights cannot be read ({error})", where=str(file)) from error
    shapes, present = ({name: tensor.shape for name, tensor in each.items()} for each in (stored, targets))
    if shapes != present:
        odd = min(name for name in shapes.keys() | present.keys() if shapes.get(name) != present.get(name))
        raise UserError(f"the adapter does not fit this model at {odd}", where=str(file), cure=_OTHER_BASE)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def _only_one(folder: Path, lora: LoraConfig) -> UserError:
    what = "whole model" if lora.enabled else "adapter"
    trains = f"an adapter of rank {lora.rank}" if lora.enabled else "the whole model"
    return UserError(
        f"the checkpoint holds {'a' if lora.enabled else 'an'} {what}, and this run trains {trains}",
        where=str(folder),
        cure="use the model.lora.rank it was trained with, or start a new run directory",
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
