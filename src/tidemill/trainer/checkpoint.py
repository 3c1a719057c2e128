"""Save and restore the state of a trainer: a Hugging Face model folder with optimizer and random states.

    config.json, model.safetensors, tokenizer files   loads with `from_pretrained`; with LoRA the adapter only
    trainer_state/state.json                          counters and the names of the moment files
    trainer_state/moments-00001.safetensors ...       optimizer state by parameter name
    trainer_state/random.safetensors                  random states of torch

Each of several ranks writes the moments of its rows, with the number of the first as metadata of the file; all ranks
give the weights tensor by tensor to the first, which writes them. Any number of ranks restores either kind.

Nothing is pickled. Saving copies no tensor on the CPU; restoring copies into existing tensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.auto import load_pretrained
from tidemill.models.folder import holds_adapter, weight_files
from tidemill.models.lora import adapter_of, learned_parameters
from tidemill.models.ranks import ONE_RANK, Ranks, filled, is_sharded, local_rows
from tidemill.models.saving import disk_errors, load_adapter, save_model, share_files, tokenizer_files

STATE_FOLDER = "trainer_state"
FORMAT = 3
_SHARD_BYTES = 200 << 20  # a file of GPU tensors passes through host memory as a whole
_HEADER_BYTES = 256  # of one tensor in a safetensors file
_JSON_BYTES = 64 << 10  # configuration, counters, manifest


def state_bytes(
    model: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    *,
    source: Path = Path(),
    head: nn.Module | None = None,
) -> int:
    """Upper bound of the bytes that `save_state` and `models.reward_model.save_head` write, close to the real size."""
    weights = [] if model is None else list(learned_parameters(model).values())
    copied = 0 if model is None else sum(path.stat().st_size for path in tokenizer_files(source))
    tensors: list[Tensor] = [*weights, *(head.parameters() if head is not None else ()), *_random_states().values()]
    # Two moments and a step count per parameter, also before the first step.
    moments = (2 * _stored_bytes(p) + _HEADER_BYTES for group in optimizer.param_groups for p in group["params"])
    return sum(map(_stored_bytes, tensors)) + copied + sum(moments) + _JSON_BYTES


def _stored_bytes(tensor: Tensor) -> int:
    return int(tensor.nbytes) + _HEADER_BYTES


def save_state(
    directory: Path,
    *,
    model: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    counters: Mapping[str, Any],
    source: Path = Path(),
    head: nn.Module | None = None,
    ranks: Ranks = ONE_RANK,
) -> None:
    """Write the trainer's state into an empty directory. Every rank calls this with the same directory.

    Args:
        model: None to write no model, only the trainer state.
        source: the Hugging Face folder of the model; its tokenizer files are copied.
        counters: JSON values that `restore_state` returns: steps, versions, positions.
        head: trained by the optimizer; its moments are written here, its weights by the caller.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    if model is not None:
        save_model(model, directory, source=source, ranks=ranks)
    with disk_errors(directory):
        folder = directory / STATE_FOLDER
        if ranks.index == 0:
            folder.mkdir()
        ranks.barrier()
        moments = (
            (f"{key}:{name}", tensor)
            for name, parameter in _parameters(model, head).items()
            for key, tensor in optimizer.state.get(parameter, {}).items()
            if ranks.index == 0 or is_sharded(tensor)
        )
        prefix = f"moments-rank{ranks.index}-" if ranks.size > 1 else "moments-"
        names = []
        for number, shard in enumerate(_shards(moments), start=1):
            names.append(f"{prefix}{number:05}.safetensors")
            save_file(shard.tensors, folder / names[-1], shard.places or None)
        files = [name for each in ranks.gather(json.dumps(names).encode()) for name in json.loads(each)]
        if ranks.index == 0:
            save_file(_random_states(), folder / "random.safetensors")
            state = {"format": FORMAT, "counters": dict(counters), "moments": files}
            (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    ranks.barrier()
    if model is not None and ranks.index == 0:
        share_files(directory)


def restore_state(
    directory: Path,
    *,
    model: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    head: nn.Module | None = None,
    ranks: Ranks = ONE_RANK,
) -> dict[str, Any]:
    """Read what `save_state` wrote into the tensors of the model and the optimizer, and set torch's random states.

    At most one tensor is held twice at a time.

    Returns:
        The counters.

    Raises:
        UserError: the folder contains no trainer state, or that of another model.
    """
    folder = directory / STATE_FOLDER
    state = _read_state(folder)
    if model is not None:
        _restore_weights(directory, model, ranks)
    _restore_moments([folder / name for name in state["moments"]], _parameters(model, head), optimizer)
    for device, random_state in load_file(folder / "random.safetensors").items():
        if device == "cpu":
            torch.set_rng_state(random_state)
        elif torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(random_state, device)
    counters: dict[str, Any] = state["counters"]
    return counters


def _parameters(model: PreTrainedModel | None, head: nn.Module | None) -> dict[str, nn.Parameter]:
    """Parameters by the name used for their moments; names of a model's parameters contain no colon."""
    named = dict(model.named_parameters()) if model is not None else {}
    return named | ({f"head:{name}": each for name, each in head.named_parameters()} if head is not None else {})


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = state["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read trainer state ({error})",
            where=str(path),
            hint="resume from a checkpoint written by training; use model.source for a model folder",
        ) from error
    if not known:
        raise UserError(
            f"trainer state has format {state['format']}, this version reads format {FORMAT}",
            where=str(path),
            hint="resume with the Tidemill version that wrote it",
        )
    return state


def _restore_weights(directory: Path, model: PreTrainedModel, ranks: Ranks) -> None:
    if adapter_of(model) is not None or holds_adapter(directory):
        load_adapter(directory, model, ranks)
        return
    targets = model.state_dict(keep_vars=True)  # tied parameters have several names
    missing = {id(tensor) for tensor in targets.values()}
    stored_names: set[str] = set()
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as stored:
            stored_names.update(stored.keys())
    if not stored_names <= targets.keys():
        _restore_converted(directory, model)
        return
    for stored in _stored(weight_files(directory)):
        _fill(targets[stored.name], stored, directory)
        missing.discard(id(targets[stored.name]))
    if missing:
        lost = sorted(name for name, tensor in targets.items() if id(tensor) in missing)
        raise _other_model(directory, f"{lost[0]} is missing")


def _restore_converted(directory: Path, model: PreTrainedModel) -> None:
    """Load architectures that store weights under other names, or fused differently, with their own loader."""
    stored = load_pretrained(directory, model.dtype)[0].state_dict()
    targets = model.state_dict(keep_vars=True)
    if stored.keys() != targets.keys():
        raise _other_model(directory, f"only one of the two has {min(stored.keys() ^ targets.keys())}")
    for name, target in targets.items():
        tensor = stored[name]
        _check_fits(target, tuple(tensor.shape), tensor.dtype, name, directory)
        filled(target, tensor, 0)


def _restore_moments(
    files: list[Path], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    rows: Counter[tuple[str, str]] = Counter()  # restored, by parameter and key
    for stored in _stored(files):
        key, _, name = stored.name.partition(":")
        if name not in parameters:
            raise _other_model(files[0].parent, f"it has optimizer state of {name}")
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if key not in state:
            # Only the fused kernel keeps step counts on the device of the parameter.
            device = parameter.device if not stored.scalar or id(parameter) in fused else torch.device("cpu")
            like = torch.empty(()) if stored.scalar else parameter.detach()
            state[key] = torch.empty_like(like, dtype=stored.dtype, device=device)
        _fill(state[key], stored, files[0].parent)
        rows[name, key] += stored.rows
    restored = {name for name, _ in rows}
    for name, parameter in parameters.items():  # a parameter without a step has no state
        if name not in restored:
            optimizer.state.pop(parameter, None)
    for (name, key), found in rows.items():
        expected = optimizer.state[parameters[name]][key].shape
        if found != (expected[0] if expected else 1):
            raise _other_model(files[0].parent, f"it has {found} rows of the {key} of {name}")


class _Stored:
    """A tensor in a file, or consecutive rows of a sharded one."""

    def __init__(self, file: Any, name: str) -> None:
        self.name = name
        self._file = file
        self._slice = file.get_slice(name)
        shape = self._slice.get_shape()
        self.scalar, self.rows = not shape, shape[0] if shape else 1
        place = (file.metadata() or {}).get(name)
        self.first, total = map(int, place.split("/")) if place else (0, self.rows)
        self.shape = (total, *shape[1:]) if shape else ()
        self.dtype = self.read(0, min(self.rows, 1)).dtype

    def read(self, start: int, end: int) -> Tensor:
        """Rows of the file from `start` to `end`; the whole of a scalar."""
        tensor: Tensor = self._file.get_tensor(self.name) if self.scalar else self._slice[start:end]
        return tensor


def _stored(files: list[Path]) -> Iterator[_Stored]:
    """The tensors of files, read instead of memory-mapped: a map adds the whole file to the peak memory."""
    for file in files:
        with safe_open(file, framework="pt", backend="pread") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield _Stored(opened, name)


def _fill(target: Tensor, stored: _Stored, where: Path) -> None:
    """Copy the stored rows that this process holds."""
    _check_fits(target, stored.shape, stored.dtype, stored.name, where)
    local, own = local_rows(target)
    start, end = max(stored.first, own), min(stored.first + stored.rows, own + (1 if stored.scalar else len(local)))
    if start < end:
        rows = stored.read(start - stored.first, end - stored.first)
        with torch.no_grad():
            (local if stored.scalar else local[start - own : end - own]).copy_(rows)


def _check_fits(target: Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str, where: Path) -> None:
    if target.shape != shape or target.dtype != dtype:
        found, present = f"{dtype} {list(shape)}", f"{target.dtype} {list(target.shape)}"
        difference = f"{name} is {found} in the checkpoint and {present} in the model"
        raise _other_model(where, difference.replace("torch.", ""))


def _other_model(where: Path, difference: str) -> UserError:
    return UserError(
        f"trainer state of another model: {difference}",
        where=str(where),
        hint="resume with the model that the run was started with, or use a new run directory",
    )


class _Shard(NamedTuple):
    """Tensors of one file, and the places of the rows of sharded ones."""

    tensors: dict[str, Tensor]
    places: dict[str, str]


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[_Shard]:
    shard, size = _Shard({}, {}), 0
    for name, tensor in tensors:
        rows, first = local_rows(tensor)
        if shard.tensors and size + rows.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = _Shard({}, {}), 0
        if not rows.numel():
            continue
        shard.tensors[name] = rows.contiguous()
        if is_sharded(tensor):
            shard.places[name] = f"{first}/{len(tensor)}"
        size += rows.nbytes
    if shard.tensors:
        yield shard


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states
