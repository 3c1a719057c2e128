"""Copies a model's parameters to and from one flat buffer, and builds models whose weights arrive later.

A tied parameter is one tensor. Of a sharded model, the buffer holds the rows of one rank. Persistent buffers are not
included (no supported model has any). For a model with an adapter a snapshot holds the adapter only; `part="base"`
selects the frozen base, which no version changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.records import TensorEntry
from tidemill.models.attention import use_packed_attention
from tidemill.models.auto import build_unloaded, configured_context, load_config
from tidemill.models.folder import stored_tensors
from tidemill.models.host_copies import Copy, copy_tensors
from tidemill.models.lora import attach_adapter, frozen_parameters, learned_parameters, linear_layers
from tidemill.models.ranks import local_rows
from tidemill.models.streamed_weights import stored_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64  # bytes, as torch aligns its own memory: kernels then take the same code path

Bytes = npt.NDArray[np.uint8]
Rows: TypeAlias = tuple[Sequence[TensorEntry], Bytes]
"""A snapshot: of a whole model, or of the rows of one rank."""
Part: TypeAlias = Literal["learned", "base"]


def snapshot_layout(model: PreTrainedModel, dtype: torch.dtype, *, part: Part = "learned") -> tuple[TensorEntry, ...]:
    """The place of every parameter, or of this rank's rows of it, in a snapshot of `dtype`; checksums are 0."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, parameter in parameters_of(model, part).items():
        rows, _ = local_rows(parameter)
        nbytes, shape = rows.numel() * dtype.itemsize, tuple(rows.shape)
        entries.append(
            TensorEntry(name=name, dtype=DTYPE_NAMES[dtype], shape=shape, offset=offset, nbytes=nbytes, checksum=0)
        )
        offset += math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
    return tuple(entries)


def snapshot_bytes(tensors: Sequence[TensorEntry]) -> int:
    """Length of the buffer that holds `tensors`."""
    return max((entry.offset + entry.nbytes for entry in tensors), default=0)


@torch.no_grad()
def write_snapshot(
    model: PreTrainedModel, tensors: Sequence[TensorEntry], buffer: Bytes, *, part: Part = "learned"
) -> None:
    """Copy the rows of every parameter into the buffer, rounded to the entry's dtype."""
    matched = _matched(model, tensors, part)
    copy_tensors([(_view(entry, buffer), local_rows(parameter)[0]) for entry, parameter in matched], model.device)


@torch.no_grad()
def bind_snapshot(
    model: PreTrainedModel, tensors: Sequence[TensorEntry], buffer: Bytes, *, part: Part = "learned"
) -> None:
    """Make `model` compute with a snapshot.

    On the CPU its parameters become views of `buffer`, and neither may be written to any more. On a GPU they are copied
    into memory that is allocated once.

    Raises:
        WeightsError: the snapshot is of another model; nothing was changed.
    """
    copies: list[Copy] = []
    for entry, parameter in _matched(model, tensors, part):
        view = _view(entry, buffer)
        if parameter.device.type == "cpu":
            parameter.data = view
            continue
        if parameter.shape != view.shape:
            parameter.data = torch.empty_like(view, device=parameter.device)
        copies.append((parameter, view))
    copy_tensors(copies, model.device)


@torch.no_grad()
def bind_ranks(model: PreTrainedModel, ranks: Sequence[Rows], *, part: Part = "learned") -> None:
    """As `bind_snapshot`, for a snapshot of each rank's rows: they are copied into memory that is allocated once.

    Raises:
        WeightsError: a snapshot is of another model; nothing was changed.
    """
    matched = [_matched(model, tensors, part) for tensors, _ in ranks]
    copies: list[Copy] = []
    for pairs in zip(*matched, strict=True):
        parameter = pairs[0][1]
        views = [_view(entry, buffer) for (entry, _), (_, buffer) in zip(pairs, ranks, strict=True)]
        shape = (sum(len(view) for view in views), *views[0].shape[1:])
        if parameter.shape != shape:
            parameter.data = torch.empty(shape, dtype=views[0].dtype, device=parameter.device)
        copies += zip(parameter.split([len(view) for view in views]), views, strict=True)
    copy_tensors(copies, model.device)


def release_snapshot(model: PreTrainedModel, *, part: Part = "learned") -> None:
    """Undo `bind_snapshot`: the parameters are empty again."""
    for parameter in parameters_of(model, part).values():
        parameter.data = parameter.new_empty(0)


def empty_copy(
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    shared: Iterable[torch.nn.Parameter] = (),
    device: torch.device | None = None,
) -> PreTrainedModel:
    """A copy of the module tree in eval mode, with empty parameters until a snapshot is bound. Buffers are copied.

    Args:
        shared: parameters of `model` that the copy uses too.
        device: of the other parameters; by default that of the model's.
    """
    replacements: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(0, dtype=dtype, device=device or parameter.device)
        replacements[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
    replacements |= {id(parameter): parameter for parameter in shared}
    twin: PreTrainedModel = copy.deepcopy(model, replacements)
    twin.eval()
    return twin


def copy_on_base(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """An empty copy that shares the frozen base under an adapter."""
    return empty_copy(model, dtype, shared=frozen_parameters(model).values())


def parameters_of(model: PreTrainedModel, part: Part) -> dict[str, torch.nn.Parameter]:
    """The parameters that versions contain, or those of the base under an adapter, by name."""
    return learned_parameters(model) if part == "learned" else frozen_parameters(model)


def _matched(
    model: PreTrainedModel, tensors: Sequence[TensorEntry], part: Part
) -> list[tuple[TensorEntry, torch.nn.Parameter]]:
    parameters = parameters_of(model, part)
    names = [entry.name for entry in tensors]
    if names != list(parameters):
        difference = next(iter(set(names) ^ set(parameters)), "the order of its tensors")
        raise WeightsError(f"the snapshot is not of this model ({type(model).__name__}): {difference}")
    return [(entry, parameters[entry.name]) for entry in tensors]


def joined_views(ranks: Sequence[Rows]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and all rows of every tensor: a view of a single snapshot, which must not be written to; a copy of several
    ranks' rows, valid until the next one is asked for."""
    for entries in zip(*(tensors for tensors, _ in ranks), strict=True):
        views = [_view(entry, buffer) for entry, (_, buffer) in zip(entries, ranks, strict=True)]
        yield entries[0].name, views[0] if len(views) == 1 else torch.cat(views)


def _view(entry: TensorEntry, buffer: Bytes) -> torch.Tensor:
    array = buffer[entry.offset : entry.offset + entry.nbytes]
    if not array.flags.writeable:
        array = np.asarray(_WritableMemory(array))
    return torch.from_numpy(array).view(DTYPES[entry.dtype]).view(entry.shape)


class _WritableMemory:
    """Exposes a read-only array as writable, which torch requires; keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
LARGEST_FILE = 64 << 20
"""Configuration and tokenizer files are smaller; larger files are not needed to generate."""


def files_without_weights(folder: Path) -> dict[str, bytes]:
    """The contents of a model folder's configuration and tokenizer files, by file name."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in WEIGHTS]
    return {path.name: path.read_bytes() for path in files if path.stat().st_size <= LARGEST_FILE}


def stored_context_limit(folder: Path) -> int:
    """`loading.context_limit` of the model in a folder, without loading it."""
    return configured_context(load_config(folder))


def stored_linear_layers(folder: Path) -> list[str]:
    """`lora.linear_layers` of the model in a folder; allocates no memory for it."""
    with torch.device("meta"):
        return linear_layers(build_unloaded(folder, torch.float32))


def check_adapter(folder: Path, config: ModelConfig) -> None:
    """Raises UserError: the adapter of `config` cannot be attached to a folder's model. Allocates no memory for it."""
    with torch.device("meta"):
        attach_adapter(build_unloaded(folder, torch.float32), config)


def check_shardable(folder: Path) -> None:
    """Check that a folder's model can be computed packed and written tensor by tensor; allocates no memory for it."""
    with torch.device("meta"):
        model = build_unloaded(folder, torch.float32)
    use_packed_attention(model)
    model.tie_weights()
    if other := sorted(stored_state(model).keys() - stored_tensors(folder).keys()):
        raise UserError(
            f"{type(model).__name__} stores its weights under other names than its modules have ({other[0]})",
            where="trainer.shards",
            hint="train it in one process, or choose another model",
        )


def uninitialized_model(
    folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The model of a folder's configuration in eval mode with packed attention; empty until a snapshot is bound.

    Args:
        config: its `lora` section defines the adapter.

    Raises:
        UserError: the configuration is not of a causal language model, or the adapter cannot be attached.
    """
    model = build_unloaded(folder, dtype)
    model.tie_weights()  # skipped together with the initial values
    use_packed_attention(model)
    if config.lora.enabled:
        attach_adapter(model, config)
    twin = empty_copy(model, dtype)
    twin.to(device=device)  # type: ignore[call-arg]
    return twin
