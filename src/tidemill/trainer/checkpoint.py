"""Save and restore the state of a trainer: a Hugging Face model folder with optimizer and random states.

    config.json, model.safetensors, tokenizer files   loads with `from_pretrained`; with LoRA the adapter only
    trainer_state/state.json                          counters and the names of the moment files
    trainer_state/moments-00001.safetensors ...       optimizer state by parameter name
    trainer_state/random.safetensors                  random states of torch

Nothing is pickled. Saving copies no tensor on the CPU; restoring copies into existing tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.auto import load_pretrained
from tidemill.models.folder import holds_adapter, weight_files
from tidemill.models.lora import adapter_of, learned_parameters
from tidemill.models.saving import disk_faults, load_adapter, save_model, share_files, tokenizer_files

STATE_FOLDER = "trainer_state"
FORMAT = 1
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
) -> None:
    """Write the trainer's state into an empty directory.

    Args:
        model: None to write no model, only the trainer state.
        source: the Hugging Face folder of the model; its tokenizer files are copied.
        counters: JSON values that `restore_state` returns: steps, versions, positions.
        head: trained by the optimizer; its moments are written here, its weights by the caller.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    if model is not None:
        save_model(model, directory, source=source)
    with disk_faults(directory):
        folder = directory / STATE_FOLDER
        folder.mkdir()
        shards = []
        moments = (
            (f"{key}:{name}", tensor)
            for name, parameter in _parameters(model, head).items()
            for key, tensor in optimizer.state.get(parameter, {}).items()
        )
        for number, shard in enumerate(_shards(moments), start=1):
            shards.append(f"moments-{number:05}.safetensors")
            save_file(shard, folder / shards[-1])
        save_file(_random_states(), folder / "random.safetensors")
        state = {"format": FORMAT, "counters": dict(counters), "moments": shards}
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    if model is not None:
        share_files(directory)


def restore_state(
    directory: Path,
    *,
    model: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    head: nn.Module | None = None,
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
        _restore_weights(directory, model)
    _restore_moments([folder / name for name in state["moments"]], _parameters(model, head), optimizer)
    for device, random_state in _tensors([folder / "random.safetensors"]):
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


def _restore_weights(directory: Path, model: PreTrainedModel) -> None:
    if adapter_of(model) is not None or holds_adapter(directory):
        load_adapter(directory, model)
        return
    targets = model.state_dict()  # shares memory with the parameters; tied ones have several names
    missing = {tensor.data_ptr() for tensor in targets.values() if tensor.numel()}
    stored_names: set[str] = set()
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as stored:
            stored_names.update(stored.keys())
    if not stored_names <= targets.keys():
        _restore_converted(directory, model)
        return
    for name, tensor in _tensors(weight_files(directory)):
        _fill(targets[name], tensor, name, directory)
        missing.discard(targets[name].data_ptr())
    if missing:
        lost = sorted(name for name, tensor in targets.items() if tensor.data_ptr() in missing)
        raise _other_model(directory, f"{lost[0]} is missing")


def _restore_converted(directory: Path, model: PreTrainedModel) -> None:
    """Load architectures that store weights under other names, or fused differently, with their own loader."""
    stored = load_pretrained(directory, model.dtype)[0].state_dict()
    targets = model.state_dict()
    if stored.keys() != targets.keys():
        raise _other_model(directory, f"only one of the two has {min(stored.keys() ^ targets.keys())}")
    for name, target in targets.items():
        _fill(target, stored[name], name, directory)


def _restore_moments(
    files: list[Path], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    restored: dict[str, set[str]] = {}
    for label, tensor in _tensors(files):
        key, _, name = label.partition(":")
        if name not in parameters:
            raise _other_model(files[0].parent, f"it has optimizer state of {name}")
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if key not in state:
            # Only the fused kernel keeps step counts on the device of the parameter.
            device = parameter.device if tensor.ndim or id(parameter) in fused else torch.device("cpu")
            like = parameter.detach() if tensor.shape == parameter.shape else tensor
            state[key] = torch.empty_like(like, dtype=tensor.dtype, device=device)
        _fill(state[key], tensor, label, files[0].parent)
        restored.setdefault(name, set()).add(key)
    for name, parameter in parameters.items():  # a parameter without a step has no state
        if name not in restored:
            optimizer.state.pop(parameter, None)


def _fill(target: Tensor, tensor: Tensor, name: str, where: Path) -> None:
    if target.shape != tensor.shape or target.dtype != tensor.dtype:
        stored, present = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (tensor, target))
        raise _other_model(where, f"{name} is {stored} in the checkpoint and {present} in the model")
    with torch.no_grad():
        target.copy_(tensor)


def _other_model(where: Path, difference: str) -> UserError:
    return UserError(
        f"trainer state of another model: {difference}",
        where=str(where),
        hint="resume with the model that the run was started with, or use a new run directory",
    )


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files, read instead of memory-mapped: a map adds the whole file to the peak memory."""
    for file in files:
        with safe_open(file, framework="pt", backend="pread") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                yield name, stored.get_tensor(name)
