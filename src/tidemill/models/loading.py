"""Loads a model from a folder and checks its packed forward pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.core.records import LogprobBuffer, TokenBuffer
from tidemill.models.attention import hidden_states, unsupported, use_packed_attention, vocabulary_logits
from tidemill.models.auto import configured_context, first_line, load_pretrained
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.folder import check_folder, stored_tensors
from tidemill.models.streamed_weights import STORED_DTYPES
from tidemill.models.token_tree import Tokens, TokenTree, build_tree
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
    _check_complete(report, folder)
    _copy_into_memory(model, folder)
    model.to(device=device)  # type: ignore[call-arg]
    for name, parameter in model.named_parameters():
        least, most = torch.aminmax(parameter.detach())  # NaN propagates; ten times as fast as isfinite
        if not (least.isfinite() and most.isfinite()):
            raise UserError(
                f"the weights are not finite: {name} has NaN, infinity or values beyond the range of {parameter.dtype}",
                where=str(folder),
                hint="give another model, or an earlier checkpoint",
            )
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


def _check_complete(report: dict[str, Any], folder: Path) -> None:
    """Refuse missing tensors, which the library would fill with random numbers."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
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


BRANCHES, PREFIX, SUFFIX = 4, 6, 2  # number of sequences; tokens that they share; further tokens of each
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.02}
"""Largest relative difference of the logits, by precision; see `forward_difference`."""


def check_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose packed forward pass differs from its own.

    They agree if tokens interact in attention only and the logits are the output embedding of the last hidden state.
    Convolutions, recurrence, bidirectional attention and transformed heads violate this without an error, so every
    model is compared when it is loaded.

    Raises:
        UserError: names the architecture, the difference and the tolerance.
    """
    _check_config(model)
    difference, tolerance = forward_difference(model), TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    if not difference <= tolerance:
        raise unsupported(
            model,
            f"computes other logits when sequences are packed: relative difference {difference:.2g}, tolerance "
            f"{tolerance:g} ({model.dtype})",
        )


@torch.inference_mode()
def forward_difference(model: PreTrainedModel) -> float:
    """Relative difference of the logits of random sequences with a common prefix: packed as a tree, and in a batch.

    Per token |difference| / |logits| in the L2 norm, with centred logits (a constant changes no probability). Of these
    the 0.7 quantile over the tokens after the prefix: a layer that reads the preceding token changes at least the first
    of two tokens, and rounding may route a single token to another expert.
    """
    sequences = _random_sequences(model)
    device = next(model.parameters()).device
    tree = build_tree(list(sequences))
    plan = _CountingPlan(tree, device)
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    try:
        model.set_attn_implementation("eager")  # transformers' own
        own = model(input_ids=torch.from_numpy(sequences).long().to(device), use_cache=False).logits.float()
        use_packed_attention(model)
        packed = vocabulary_logits(model, hidden_states(model, tokens, positions, plan))
    except UserError:
        raise
    except Exception as error:  # an unknown architecture can raise anything
        raise unsupported(model, f"cannot be computed packed: {first_line(error)}") from error
    if repeated := [layer for layer, calls in plan.calls.items() if calls > 1]:
        # The engine's KV cache has one entry per layer.
        raise unsupported(model, f"attends more than once in layer {repeated[0]}, which is not supported")
    packed = packed[torch.from_numpy(np.stack(tree.paths)).to(device)]
    packed, own = (logits[:, -SUFFIX:] - logits[:, -SUFFIX:].mean(-1, keepdim=True) for logits in (packed, own))
    return float(((packed - own).norm(dim=-1) / own.norm(dim=-1)).quantile(0.7))


class _CountingPlan(TreePlan):
    """Counts the calls of each layer."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        super().__init__(tree, device)
        self.calls: Counter[int] = Counter()

    def attend(self, layer: int, *call: Any) -> torch.Tensor:
        self.calls[layer] += 1
        return super().attend(layer, *call)


def _random_sequences(model: PreTrainedModel) -> Tokens:
    """Random tokens int32 [BRANCHES, PREFIX + SUFFIX]; the sequences differ from the first token after the prefix."""
    config = model.config.get_text_config()
    # Without the padding token: some models give it no position.
    allowed = np.setdiff1d(np.arange(config.vocab_size), [getattr(config, "pad_token_id", None) or 0])
    rng = np.random.default_rng(0)
    limit = int(getattr(config, "max_position_embeddings", None) or PREFIX + SUFFIX)
    length = max(min(PREFIX + SUFFIX, limit), SUFFIX)
    sequences = np.tile(rng.choice(allowed, length), (BRANCHES, 1))
    sequences[:, -SUFFIX:] = rng.choice(allowed, (BRANCHES, SUFFIX))
    sequences[:, -SUFFIX] = rng.permutation(allowed)[np.arange(BRANCHES) % len(allowed)]
    return sequences.astype(np.int32)


_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_CALL_DEPENDENT_ROPE = {"dynamic", "longrope"}


def _check_config(model: PreTrainedModel) -> None:
    """Refuse what two short sequences cannot reveal, or what the configuration states more clearly."""
    config = model.config.get_text_config()
    for field in ("layer_types", "layers_block_type"):
        others = set(getattr(config, field, None) or ()) - _ATTENTION_LAYERS
        if others:
            raise unsupported(model, f"has layers of type {min(map(str, others))!r} ({field}), which is not supported")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False):
        raise unsupported(model, "attends to later tokens (use_bidirectional_attention)")
    if getattr(config, "attn_temperature_tuning", None):
        raise unsupported(model, "scales queries by their index in the call (attn_temperature_tuning)")
    rope = getattr(config, "rope_parameters", None) or {}  # one set of parameters, or one per type of layer
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if kinds := {str(each["rope_type"]) for each in sets if "rope_type" in each} & _CALL_DEPENDENT_ROPE:
        raise unsupported(
            model, f"has rotary frequencies that depend on the longest sequence of a call (rope_type {min(kinds)!r})"
        )


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
