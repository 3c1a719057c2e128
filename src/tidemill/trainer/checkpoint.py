"""The trainer's whole state in one folder: a Hugging Face model, and beside it what training goes on from.

    config.json, model.safetensors, tokenizer files   loads with plain `from_pretrained` (see `models.saving`; of a
                                                      model with an adapter the adapter alone, see `adapter_folder`)
    trainer_state/state.json                          counters, and the names of the files below
    trainer_state/moments-00001.safetensors ...       the optimizer's state by parameter name
    trainer_state/random.safetensors                  torch's random states

Nothing is pickled. Saving copies no tensor on the CPU; restoring copies into the tensors that are already there.
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
_SHARD_BYTES = 200 << 20  # from a GPU a whole file passes through host memory
_HEADER_BYTES = 256  # of one tensor in a safetensors file
_JSON_BYTES = 64 << 10  # configuration, counters and manifest


def state_bytes(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, source: Path, head: nn.Module | None = None
) -> int:
    """About what `save_state` and the head's owner will write, and no less: for a check of the free space before."""
    weights = learned_parameters(model).values()
    copied = sum(path.stat().st_size for path in tokenizer_files(source))
    return sum(map(_stored_bytes, weights)) + copied + head_state_bytes(head, optimizer)


def head_state_bytes(head: nn.Module | None, optimizer: torch.optim.Optimizer) -> int:
    """The same for `save_head_state`."""
    weights = head.parameters() if head is not None else ()
    # Two moments and a step count for each parameter, also before the first step.
    moments = (2 * _stored_bytes(p) + _HEADER_BYTES for group in optimizer.param_groups for p in group["params"])
    random = _random_states().values()
    return sum(map(_stored_bytes, weights)) + sum(moments) + sum(map(_stored_bytes, random)) + _JSON_BYTES


def _stored_bytes(tensor: Tensor) -> int:
    return int(tensor.nbytes) + _HEADER_BYTES


def save_state(
    directory: Path,
    *,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    source: Path,
    counters: Mapping[str, Any],
    head: nn.Module | None = None,
) -> None:
    """Write everything into an empty directory.

    Args:
        head: what the optimizer trains beside the model; only its moments are written here, its weights by its owner.
        source: the Hugging Face folder the model came from; its tokenizer files are copied.
        counters: anything JSON can say, given back by `restore_state`: steps, versions, positions.

    Raises:
        OSError: the disk is full or a file cannot be written.
    """
    save_model(model, directory, source=source)
    with disk_faults(directory):
        _write_state(directory, optimizer, _parameters(model, head), counters)
    share_files(directory)


def save_head_state(
    directory: Path, *, head: nn.Module, optimizer: torch.optim.Optimizer, counters: Mapping[str, Any]
) -> None:
    """As `save_state`, for a head whose model is somebody else's."""
    with disk_faults(directory):
        _write_state(directory, optimizer, _parameters(None, head), counters)


def _write_state(
    directory: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    counters: Mapping[str, Any],
) -> None:
    folder = directory / STATE_FOLDER
    folder.mkdir()
    shards = []
    for number, shard in enumerate(_shards(_named_moments(parameters, optimizer)), start=1):
        shards.append(f"moments-{number:05}.safetensors")
        save_file(shard, folder / shards[-1])
    save_file(_random_states(), folder / "random.safetensors")
    state = {"format": FORMAT, "counters": dict(counters), "moments": shards}
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def restore_state(
    directory: Path, *, model: PreTrainedModel, optimizer: torch.optim.Optimizer, head: nn.Module | None = None
) -> dict[str, Any]:
    """Read back what `save_state` wrote, bit for bit, into the model's and the optimizer's own tensors.

    At most one tensor is held twice at a time. torch's random states are set, too.

    Returns:
        The counters.

    Raises:
        UserError: the folder holds no trainer state, or that of another model.
    """
    state = _read_state(directory / STATE_FOLDER)
    _restore_weights(directory, model)
    return _restore_rest(directory, state, optimizer, _parameters(model, head))


def restore_head_state(directory: Path, *, head: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read back what `save_head_state` wrote; returns the counters.

    Raises:
        UserError: the folder holds no such state.
    """
    state = _read_state(directory / STATE_FOLDER)
    return _restore_rest(directory, state, optimizer, _parameters(None, head))


def _restore_rest(
    directory: Path, state: dict[str, Any], optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    folder = directory / STATE_FOLDER
    _restore_moments([folder / name for name in state["moments"]], parameters, optimizer)
    _restore_random_states(folder / "random.safetensors")
    counters: dict[str, Any] = state["counters"]
    return counters


def _parameters(model: PreTrainedModel | None, head: nn.Module | None) -> dict[str, nn.Parameter]:
    """By the name under which a moment is stored; no parameter of a model has a colon in its name."""
    named = dict(model.named_parameters()) if model is not None else {}
    return named | ({f"head:{name}": each for name, each in head.named_parameters()} if head is not None else {})


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = state["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"no trainer state can be read ({error})",
            where=str(path),
            hint="resume from a checkpoint that training wrote; a bare model folder goes into model.source",
        ) from error
    if not known:
        raise UserError(
            f"trainer state of format {state['format']}; this version reads {FORMAT}",
            where=str(path),
            hint="resume with the version of Tidemill that wrote it",
        )
    return state


def _restore_weights(directory: Path, model: PreTrainedModel) -> None:
    if adapter_of(model) is not None or holds_adapter(directory):
        load_adapter(directory, model)
        return
    targets = model.state_dict()  # shares memory with the parameters; tied ones appear under each of their names
    missing = {tensor.data_ptr() for tensor in targets.values() if tensor.numel()}
    if not {name for file in weight_files(directory) for name in _names(file)} <= targets.keys():
        _restore_converted(directory, model)
        return
    for name, tensor in _tensors(weight_files(directory)):
        _fill(targets[name], tensor, name, directory)
        missing.discard(targets[name].data_ptr())
    if missing:
        lost = sorted(name for name, tensor in targets.items() if tensor.data_ptr() in missing)
        raise _other_model(directory, f"it lacks {lost[0]}")


def _restore_converted(directory: Path, model: PreTrainedModel) -> None:
    """Some architectures store their weights under other names or fused differently; their own loader knows how."""
    stored = load_pretrained(directory, model.dtype)[0].state_dict()
    targets = model.state_dict()
    if stored.keys() != targets.keys():
        raise _other_model(directory, f"they differ in {min(stored.keys() ^ targets.keys())}")
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
            raise _other_model(files[0].parent, f"its optimizer knows {name}")
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if key not in state:
            # Step counts live beside the parameter only where the fused kernel reads them.
            device = parameter.device if tensor.ndim or id(parameter) in fused else torch.device("cpu")
            like = parameter.detach() if tensor.shape == parameter.shape else tensor
            state[key] = torch.empty_like(like, dtype=tensor.dtype, device=device)
        _fill(state[key], tensor, label, files[0].parent)
        restored.setdefault(name, set()).add(key)
    for name, parameter in parameters.items():  # a parameter that had learned nothing yet has no state
        if name not in restored:
            optimizer.state.pop(parameter, None)


def _fill(target: Tensor, tensor: Tensor, name: str, where: Path) -> None:
    if target.shape != tensor.shape or target.dtype != tensor.dtype:
        stored, present = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (tensor, target))
        raise _other_model(where, f"{name} is {stored} there and {present} here")
    with torch.no_grad():
        target.copy_(tensor)


def _other_model(where: Path, how: str) -> UserError:
    return UserError(
        f"the trainer state is of another model: {how}",
        where=str(where),
        hint="resume with the model the run was started with, or start a new run directory",
    )


def _named_moments(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            yield f"{key}:{name}", tensor


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


def _restore_random_states(file: Path) -> None:
    for name, state in _tensors([file]):
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and torch.device(name).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, name)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as stored:
        return list(stored.keys())


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """One tensor after another, read rather than mapped: a map would keep the whole file in this process's peak."""
    for file in files:
        with safe_open(file, framework="pt", backend="pread") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                yield name, stored.get_tensor(name)
