"""Loads a model from a folder: as a whole, or a rank's rows of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.core.records import LogprobBuffer, TokenBuffer
from tidemill.models.attention import hidden_states, use_packed_attention, vocabulary_logits
from tidemill.models.auto import build_on_meta, configured_context, load_pretrained
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import StoredTensor, check_folder, damaged, stored_tensors
from tidemill.models.forward_check import check_forward
from tidemill.models.lora import attach_adapter, base_state, learned_parameters
from tidemill.models.ranks import Ranks, local_rows
from tidemill.models.snapshots import empty_copy
from tidemill.models.streamed_weights import STORED_DTYPES
from tidemill.models.token_tree import build_tree
from tidemill.models.tree_attention import TreePlan


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model in eval mode with packed attention; its parameters require gradients.

    Nothing is downloaded. If the stored dtype is `dtype`, peak memory is the model plus its largest tensor.

    Raises:
        UserError: the folder is incomplete or damaged, its weights are not finite, or the model is not supported.
    """
    check_folder(folder)
    refuse_damaged(folder)
    model, report = load_pretrained(folder, dtype)
    _check_complete(report["missing_keys"], map(str, report["mismatched_keys"]), folder)
    _copy_into_memory(model, folder)
    model.to(device=device)  # type: ignore[call-arg]
    for name, parameter in model.named_parameters():
        _check_finite(parameter.detach(), name, folder)
    model.eval()
    model.requires_grad_(True)
    try:
        use_packed_attention(model)
        check_forward(model)
    except UserError as error:
        raise UserError(error.what, where=str(folder), hint=error.hint) from error
    return model


def context_limit(model: PreTrainedModel) -> int:
    """The model's context length: prompt plus completion, in tokens. Raises UserError: its configuration has none."""
    return configured_context(model.config)


def _check_finite(values: Tensor, name: str, folder: Path) -> None:
    least, most = torch.aminmax(values)  # NaN propagates; ten times as fast as isfinite
    if not (least.isfinite() and most.isfinite()):
        raise UserError(
            f"the weights are not finite: {name} has NaN, infinity or values beyond the range of {values.dtype}",
            where=str(folder),
            hint="give another model, or an earlier checkpoint",
        )


def _check_complete(missing: Iterable[str], mismatched: Iterable[str], folder: Path) -> None:
    """Refuse missing tensors, which the library would fill with random numbers."""
    missing, mismatched = sorted(missing), sorted(mismatched)
    if missing or mismatched:
        issue = f"lack {missing[0]}" if missing else f"do not fit the configuration at {mismatched[0]}"
        more = len(missing) + len(mismatched) - 1
        raise UserError(
            f"the weights {issue}" + (f" and {more} more" if more else ""),
            where=str(folder),
            hint="the weights and config.json must belong to the same model with a language-modelling head",
        )


def _copy_into_memory(model: torch.nn.Module, folder: Path) -> None:
    """Replace memory-mapped parameters by copies, so that a changed or truncated file cannot affect the model."""
    stored = stored_tensors(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.get(name)
            if tensor is None or tensor.dtype != STORED_DTYPES.get(parameter.dtype) or tensor.shape != parameter.shape:
                parameter.data = parameter.data.clone()
            else:  # read the file again: cloning would add the mapped pages to the peak memory
                with safe_open(tensor.file, "pt", backend="pread") as file:
                    parameter.data = file.get_tensor(name)


def unloaded_model(
    folder: Path, config: ModelConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """What `load_model` returns, with parameters on the meta device; `read_rows` reads them when they are sharded.

    Args:
        config: its `lora` section defines an adapter, which is in memory with its initial values.
        dtype: of the parameters; buffers are those of a model in fp32.

    Raises:
        UserError: the configuration is not of a causal language model, or the adapter cannot be attached.
    """
    model = build_on_meta(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.eval()
    use_packed_attention(model)
    if config is None or not config.lora.enabled:
        return model
    model.requires_grad_(False)
    # On the meta device peft would drop the initial values. The base of the twin has no elements.
    twin = empty_copy(model, dtype, device=torch.device("cpu"))
    for each in (twin, model):
        attach_adapter(each, config)
    for name, parameter in learned_parameters(twin).items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameter)
    return model


BLOCK_BYTES = 32 << 20
"""Of a stored tensor: what is read at a time."""


def read_rows(model: PreTrainedModel, folder: Path, ranks: Ranks) -> None:
    """Read this rank's rows of a folder's tensors into a sharded model; an adapter is left as it is.

    Every rank calls this. In addition to its rows it holds one block of a tensor.

    Raises:
        UserError: as `load_model`, on all ranks if on one.
    """
    failure: UserError | None = None
    try:
        check_folder(folder)
        refuse_damaged(folder)
        _read_rows(model, folder)
    except UserError as error:
        failure = error
    own = b"" if failure is None else json.dumps([failure.what, failure.where, failure.hint]).encode()
    for text in ranks.gather(own):
        if text:
            what, where, hint = json.loads(text)
            raise UserError(what, where=where, hint=hint) from failure


def _read_rows(model: PreTrainedModel, folder: Path) -> None:
    stored, state = stored_tensors(folder), base_state(model)
    names: dict[int, str] = {}  # of a tied tensor, one under which it is stored
    for name, target in state.items():
        if names.setdefault(id(target), name) not in stored and name in stored:
            names[id(target)] = name
    targets = {name: state[name] for name in names.values()}
    missing = targets.keys() - stored.keys()
    others = [name for name in targets.keys() - missing if stored[name].shape != tuple(targets[name].shape)]
    _check_complete(missing, others, folder)
    for name, target in targets.items():
        try:
            _fill(target, stored[name], name, folder)
        except (OSError, SafetensorError) as error:
            raise damaged(f"the weight file cannot be read ({error})", stored[name].file) from error


@torch.no_grad()
def _fill(target: Tensor, stored: StoredTensor, name: str, folder: Path) -> None:
    """Read this process's rows block by block, converted to the dtype of the target."""
    local, first = local_rows(target)
    # safetensors' default reads the rows of a slice; backend="pread" would read the whole tensor for each.
    with safe_open(stored.file, "pt") as file:
        if not local.ndim:
            local.copy_(file.get_tensor(name))
            return
        rows, step = file.get_slice(name), max(BLOCK_BYTES * len(local) // max(local.nbytes, 1), 1)
        for start in range(0, len(local), step):
            block = local[start : start + step]
            block.copy_(rows[first + start : first + start + len(block)])
            _check_finite(block, name, folder)


@torch.inference_mode()
def probe_logprobs(model: PreTrainedModel, token_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs (float32 [N - 1], temperature 1) of the tokens after the first of a sequence (int32 [N], N >= 2).

    One forward pass without cache; `model` must have packed attention.
    """
    device = next(model.parameters()).device
    tree = build_tree([np.frombuffer(token_ids, np.int32)])
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, TreePlan(tree, device))[:-1])
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return np.ascontiguousarray(logprobs.cpu().numpy(), np.float32).tobytes()
