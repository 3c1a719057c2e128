"""An adapter and its base as one plain model, for whoever knows nothing of adapters."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.adapter_folder import ORIGIN, WEIGHTS, other_base, read_origin
from tidemill.models.cache import Progress
from tidemill.models.catalog import resolve
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import load_model, weights_digest
from tidemill.models.lora import require_peft
from tidemill.models.quiet import quiet
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
    peft = require_peft()
    base = load_model(source, device=torch.device("cpu"))
    if weights_digest(base) != read_origin(checkpoint).digest:
        raise other_base(checkpoint)
    try:
        with quiet():
            merged: PreTrainedModel = peft.PeftModel.from_pretrained(base, checkpoint).merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the adapter cannot be loaded: {error}", where=str(checkpoint)) from error
    return merged
