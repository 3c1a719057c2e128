"""Compares the packed forward of a model that was just loaded with the model's own.

Tidemill replaces only the attention of a model and computes many sequences in one packed call. That is the same
function as long as tokens exchange information in attention alone and the logits are the output embedding of the last
hidden state. Layers with a convolution or a recurrence, attention to later tokens, and heads with a transform break
it, and nothing would fail: the run would train another function. So every model is compared before it is used.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.attention import (
    TreePlan,
    hidden_states,
    unsupported,
    use_own_attention,
    use_packed_attention,
    vocabulary_logits,
)
from tidemill.models.token_tree import Tokens, TokenTree, build_tree

BRANCHES, PREFIX, SUFFIX = 4, 6, 2  # sequences; tokens that they share, tokens of each
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.02}
"""Largest relative difference of the logits, by precision; see `forward_difference`."""


def check_forward(model: PreTrainedModel) -> None:
    """Refuse a model that the packed forward computes differently.

    Raises:
        UserError: naming the architecture, the difference and the tolerance.
    """
    _refuse_configuration(model)
    difference, tolerance = forward_difference(model), TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    if not difference <= tolerance:
        raise unsupported(
            model,
            "computes another function when sequences are packed: logits differ from the model's own by "
            f"{difference:.2g} of their size, more than {tolerance:g} ({model.dtype})",
        )


@torch.inference_mode()
def forward_difference(model: PreTrainedModel) -> float:
    """Of random sequences that share a prefix, packed as a tree against side by side in the model's own forward.

    Per token |difference| / |logits| in the L2 norm, logits centred (a constant changes no probability). Of these the
    0.7 quantile over the tokens after the prefix: a layer that reads the neighbour before changes at least the first
    of two tokens, and rounding may send a single token to another expert.
    """
    sequences = _sequences(model)
    device = next(model.parameters()).device
    tree = build_tree(list(sequences))
    plan = _CountedPlan(tree, device)
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    try:
        use_own_attention(model)
        own = model(input_ids=torch.from_numpy(sequences).long().to(device), use_cache=False).logits.float()
        use_packed_attention(model)
        packed = vocabulary_logits(model, hidden_states(model, tokens, positions, plan))
    except UserError:
        raise
    except Exception as error:  # whatever an unknown architecture fails with
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        raise unsupported(model, f"cannot be computed packed: {reason}") from error
    if repeated := [layer for layer, calls in plan.calls.items() if calls > 1]:
        # Keys and values are kept once for each layer while samples are generated.
        raise unsupported(model, f"attends more than once in layer {repeated[0]}, which is not supported")
    packed = packed[torch.from_numpy(np.stack(tree.paths)).to(device)]
    packed, own = (logits[:, -SUFFIX:] - logits[:, -SUFFIX:].mean(-1, keepdim=True) for logits in (packed, own))
    return float(((packed - own).norm(dim=-1) / own.norm(dim=-1)).quantile(0.7))


class _CountedPlan(TreePlan):
    """Counts the calls of each layer."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        super().__init__(tree, device)
        self.calls: Counter[int] = Counter()

    def attend(self, layer: int, *call: Any) -> torch.Tensor:
        self.calls[layer] += 1
        return super().attend(layer, *call)


def _sequences(model: PreTrainedModel) -> Tokens:
    """Random tokens int32 [BRANCHES, PREFIX + SUFFIX], which differ from the first token after the prefix on."""
    config = model.config.get_text_config()
    # Not the padding token: some models give it no position.
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


def _refuse_configuration(model: PreTrainedModel) -> None:
    """What two short sequences cannot show, or the configuration says more clearly."""
    config = model.config.get_text_config()
    for field in ("layer_types", "layers_block_type"):
        others = set(getattr(config, field, None) or ()) - _ATTENTION_LAYERS
        if others:
            raise unsupported(model, f"has layers of type {min(map(str, others))!r} ({field}), which is not supported")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False):
        raise unsupported(model, "attends to later tokens (use_bidirectional_attention)")
    if getattr(config, "attn_temperature_tuning", None):
        raise unsupported(model, "scales queries by their index in the call (attn_temperature_tuning)")
    if kinds := _rope_types(getattr(config, "rope_parameters", None) or {}) & _CALL_DEPENDENT_ROPE:
        raise unsupported(
            model, f"has rotary frequencies that depend on the longest sequence of a call (rope_type {min(kinds)!r})"
        )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Of a configuration with one set of parameters, or one for each type of layer."""
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in sets if "rope_type" in each}
