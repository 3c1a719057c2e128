"""From a model folder to a model in memory, and the digest that names its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.core.records import LogprobBuffer, TokenBuffer
from tidemill.models.attention import TreePlan, hidden_states, use_packed_attention, vocabulary_logits
from tidemill.models.auto import configured_context, load_pretrained
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import StoredTensor, check_folder, stored_tensors
from tidemill.models.forward_check import check_forward
from tidemill.models.lora import adapter_of, frozen_parameters, learned_parameters
from tidemill.models.token_tree import build_tree

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model for training and generation: eval mode, gradients on, Tidemill's attention.

    Nothing is fetched. Peak memory is the model plus its largest tensor when the stored dtype is `dtype`.

    Raises:
        UserError: the folder is incomplete or damaged, holds no causal language model that can be used, its weights are
            not finite, or the packed forward does not compute it.
    """
    check_folder(folder)
    refuse_damaged(folder)
    model, report = load_pretrained(folder, dtype)
    _check_complete(report, folder)
    _own_storage(model, folder)
    model.to(device=device)  # type: ignore[call-arg]
    _check_finite(model, folder)
    model.eval()
    model.requires_grad_(True)
    try:
        use_packed_attention(model)
        check_forward(model)
    except UserError as error:
        raise UserError(error.what, where=str(folder), hint=error.hint) from error
    return model


def context_limit(model: PreTrainedModel) -> int:
    """The longest sequence (prompt plus completion, in tokens) the model was made for.

    Raises:
        UserError: its configuration does not say.
    """
    return configured_context(model.config)


def weights_digest(model: torch.nn.Module) -> str:
    """32 hex digits (xxh3-128) over name, dtype, shape and bytes of every parameter, in the order of named_parameters.

    Tied parameters count once. Of a model with an adapter: over the base's digest and the adapter's parameters. On the
    CPU the bytes are read where they lie; from a GPU one tensor at a time is copied.
    """
    return _digest(learned_parameters(model), begin=base_digest(model))


def base_digest(model: torch.nn.Module) -> str:
    """The digest that the frozen model under an adapter has without it, computed once; empty without an adapter."""
    adapter = adapter_of(model)
    if adapter is None:
        return ""
    adapter.base_digest = adapter.base_digest or _digest(frozen_parameters(model))
    return adapter.base_digest


def _digest(parameters: Mapping[str, torch.nn.Parameter], *, begin: str = "") -> str:
    digest = xxhash.xxh3_128(begin.encode())
    for name, parameter in parameters.items():
        tensor = parameter.detach().contiguous().cpu()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not copied. (numpy has no bfloat16, so every dtype goes as bytes.)"""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _check_complete(report: dict[str, Any], folder: Path) -> None:
    """A tensor the file lacks would be filled with random numbers: refuse."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    if missing or mismatched:
        fault = f"lack {missing[0]}" if missing else f"do not fit the configuration at {mismatched[0]}"
        more = len(missing) + len(mismatched) - 1
        raise UserError(
            f"the weights {fault}" + (f" and {more} more" if more else ""),
            where=str(folder),
            hint="the weights and config.json must belong to the same model with a language-modelling head",
        )


def _check_finite(model: torch.nn.Module, folder: Path) -> None:
    """Whatever learns from such weights or generates with them would fail later, and be blamed for it."""
    for name, parameter in model.named_parameters():
        least, most = torch.aminmax(parameter.detach())  # NaN if there is one; a tenth of the time of isfinite
        if not (least.isfinite() and most.isfinite()):
            raise UserError(
                f"the weights are not finite: {name} holds NaN, infinity or what is beyond {parameter.dtype}",
                where=str(folder),
                hint="give another model, or an earlier checkpoint of it",
            )


def _own_storage(model: torch.nn.Module, folder: Path) -> None:
    """Give every parameter memory of its own.

    The library maps the file into memory, so that changing or truncating the file would change or crash a running
    model. Reading into new memory (rather than cloning the map) keeps the file's pages out of this process's peak.
    """
    stored = stored_tensors(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.get(name)
            if tensor is None or tensor.dtype != _DTYPE_NAMES.get(parameter.dtype) or tensor.shape != parameter.shape:
                parameter.data = parameter.data.clone()
            else:
                parameter.data = _read(tensor, parameter.dtype)


def _read(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    fresh = torch.empty(tensor.shape, dtype=dtype)
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        target = _bytes(fresh)
        while target:
            count = stream.readinto(target)
            if not count:
                raise UserError("the weight file became shorter while it was read", where=str(tensor.file))
            target = target[count:]
    return fresh


@torch.inference_mode()
def probe_logprobs(model: PreTrainedModel, token_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs (float32 [N - 1], temperature 1) of the tokens after the first of a sequence (int32 [N], N >= 2).

    One plain forward pass, no cache. `model` has packed attention.
    """
    device = next(model.parameters()).device
    tree = build_tree([np.frombuffer(token_ids, np.int32)])
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, TreePlan(tree, device))[:-1])
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return np.ascontiguousarray(logprobs.cpu().numpy(), np.float32).tobytes()
