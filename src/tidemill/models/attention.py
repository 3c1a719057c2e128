"""One attention for training and generation: the model runs over a packed list of tokens [1, N], and a plan passed
along with the call says which token may see which keys.

Any `transformers` causal language model that takes its attention from the library's attention interface works
unchanged; everything else of the model (projections, norms, rotary embeddings) is the library's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.token_tree import TokenTree

IMPLEMENTATION = "tidemill"


class AttentionPlan(Protocol):
    """Attends for every token of a packed call, layer by layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, N, head_dim]
        key: torch.Tensor,  # [1, kv_heads, N, head_dim]
        value: torch.Tensor,  # [1, kv_heads, N, head_dim]
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:  # [1, heads, N, head_dim]
        ...


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """[B, heads, N, D] queries against [B, kv_heads, M, D] keys and values, bool mask broadcast to [B, 1, N, M]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)


class TreePlan:
    """Each token attends to its ancestors in a tree and to itself: the plan of training."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree = tree
        self._device = device
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        if window not in self._masks:
            mask = self._tree.ancestor_mask(self._device, window=window)
            self._masks[window] = mask[None, None]
        return masked_attention(query, key, value, self._masks[window], scaling)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if softcap is not None or s_aux is not None:
        raise UserError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which Tidemill does not compute",
            where="model.source",
            cure="choose a model without them (Llama, Qwen3, Gemma 3, SmolLM2, ...)",
        )
    out = plan.attend(int(module.layer_idx), query, key, value, scaling, sliding_window)  # type: ignore[arg-type]
    return out.transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The plan knows who sees whom; the library need not build a mask."""


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend through the plan of each call.

    Raises:
        UserError: when the model's attention cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise UserError(
            f"{type(model).__name__} does not take its attention from transformers' attention interface",
            where="model.source",
            cure="choose a model that does (Llama, Qwen3, Gemma 3, SmolLM2, ...)",
        )
    model.set_attn_implementation(IMPLEMENTATION)


def hidden_states(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states [N, hidden] of packed tokens [N] at `positions` [N]."""
    output = model.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, plan=plan)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def vocabulary_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits float32 [N, vocabulary] of hidden states [N, hidden], as the model's own head computes them.

    Raises:
        UserError: for a model whose head scales logits in a way not known here.
    """
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    config = model.config
    for unknown in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, unknown, None) not in (None, 1, 1.0):
            raise UserError(
                f"{type(model).__name__} scales its logits by {unknown}, which Tidemill does not compute",
                where="model.source",
                cure="choose a model without it (Llama, Qwen3, Gemma 3, SmolLM2, ...)",
            )
    softcap = getattr(config, "final_logit_softcapping", None)
    logits = logits.float()
    return torch.tanh(logits / softcap) * softcap if softcap else logits
