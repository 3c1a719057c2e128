"""An adapter and its base as one plain model, for whoever knows nothing of adapters."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.adapter_folder import ORIGIN, WEIGHTS, load_adapter, read_origin
from tidemill.models.cache import Progress
from tidemill.models.catalog import resolve
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import load_model
from tidemill.models.lora import attach_adapter, merge_adapter
from tidemill.models.saving import save_model


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
        cure = "name a checkpoint of a run with model.lora.rank above 0"
        raise UserError("there is no adapter to merge", where=str(checkpoint), cure=cure)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("something is there already", where=str(directory), cure="name a folder that is new or empty")
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
