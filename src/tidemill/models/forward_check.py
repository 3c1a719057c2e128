"""Checks that the packed forward pass of an architecture computes what its own does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.attention import hidden_states, unsupported, use_packed_attention, vocabulary_logits
from tidemill.models.auto import allocate, build_on_meta, first_line
from tidemill.models.token_tree import Tokens, TokenTree, build_tree
from tidemill.models.tree_attention import TreePlan

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


def check_layers(folder: Path) -> None:
    """`check_forward` of a folder's architecture, with random weights and one layer of each type.

    Allocates these layers and the embeddings in fp32; weight files are not read.

    Raises:
        UserError: the model is not supported.
    """
    model = build_on_meta(folder)
    try:
        use_packed_attention(model)
        keep_one_of_each_layer(model)
        _set_random_weights(model)
        check_forward(model)
    except UserError as error:
        raise UserError(error.what, where=str(folder), hint=error.hint) from error


def keep_one_of_each_layer(model: PreTrainedModel) -> None:
    """Remove the layers whose modules, shapes, settings and entries in the configuration equal those of another."""
    config = model.config.get_text_config()
    count = int(config.num_hidden_layers)
    entries = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    stacks = {name: module for name, module in lists.items() if len(module) == count}
    if not stacks:
        return
    first: dict[str, int] = {}
    for index in range(count):
        kinds = [repr(value[index]) for value in entries.values()] + [_kind(stack[index]) for stack in stacks.values()]
        first.setdefault("\n".join(kinds), index)
    kept = list(first.values())
    for name, stack in stacks.items():
        layers = nn.ModuleList(stack[index] for index in kept)
        model.set_submodule(name, layers)
        for position, layer in enumerate(layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = position  # type: ignore[assignment]
    config.num_hidden_layers = len(kept)
    for name, value in entries.items():
        setattr(config, name, [value[index] for index in kept])


_NUMBERS_OF_LAYERS = ("layer_idx", "layer_id", "layer_index", "layer_number")


def _kind(layer: nn.Module) -> str:
    """Equal for layers of one type. Floats are left out: some scale with the number of the layer."""
    parts = [f"{name} {tuple(parameter.shape)}" for name, parameter in layer.named_parameters()]
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | str | None)}
        settings = {key: value for key, value in plain.items() if key not in _NUMBERS_OF_LAYERS}
        parts.append(f"{name} {type(module).__qualname__} {settings}")
    return "\n".join(parts)


@torch.no_grad()
def _set_random_weights(model: PreTrainedModel) -> None:
    """Matrices keep the scale of their input; norms are near 1 and biases near 0, so that none can be left out."""
    allocate(model, torch.device("cpu"))
    model.tie_weights()
    model.eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.1, generator=generator)


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
