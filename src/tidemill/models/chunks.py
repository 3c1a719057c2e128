"""A sequence computed piece by piece: each piece attends to the keys and values of those before it.

What a piece gives depends on the tokens up to its end and on where the sequence is cut, on nothing else: the shapes of
all its operations follow from its place. So it is the same to the last bit whenever it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.models.attention import hidden_states, masked_attention
from tidemill.models.token_tree import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What later pieces need of `tokens` consecutive tokens."""

    tokens: int
    keys: tuple[Tensor, ...]  # by layer, [kv_heads, tokens, head_dim]
    values: tuple[Tensor, ...]  # [kv_heads, tokens, value_dim]
    last: Tensor  # [1, hidden], of its last token


class PiecePlan:
    """Implements `models.attention.AttentionPlan`: every token sees the pieces before its own, and its own up to it."""

    def __init__(self, past: Sequence[Piece], tokens: int, device: torch.device) -> None:
        self._past, self._tokens, self._device = past, tokens, device
        self._before = sum(piece.tokens for piece in past)
        self._masks: dict[int | None, Tensor] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        assert layer == len(self.keys), "layers attend in order"
        self.keys.append(key[0])
        self.values.append(value[0])
        keys = torch.cat([*(piece.keys[layer] for piece in self._past), key[0]], 1)
        values = torch.cat([*(piece.values[layer] for piece in self._past), value[0]], 1)
        return masked_attention(query, keys[None], values[None], self._mask(window), scaling)

    def _mask(self, window: int | None) -> Tensor:
        """bool [tokens, tokens before and here]."""
        if window not in self._masks:
            here = torch.arange(self._before, self._before + self._tokens, device=self._device)[:, None]
            there = torch.arange(self._before + self._tokens, device=self._device)[None]
            mask = there <= here
            if window is not None:
                mask &= here - there < window
            self._masks[window] = mask[None, None]
        return self._masks[window]


@torch.inference_mode()
def next_piece(model: PreTrainedModel, past: Sequence[Piece], token_ids: Tokens) -> tuple[Piece, Tensor]:
    """The piece of `token_ids` (int32 [N], N >= 1) after those of `past`, and its hidden states [N, hidden]."""
    device = next(model.parameters()).device
    plan = PiecePlan(past, len(token_ids), device)
    before = sum(piece.tokens for piece in past)
    tokens = torch.from_numpy(token_ids.astype("int64")).to(device)
    states = hidden_states(model, tokens, torch.arange(before, before + len(token_ids), device=device), plan)
    # A copy: a view of one row would keep all of them.
    last = states[-1:].clone()
    return Piece(tokens=len(token_ids), keys=tuple(plan.keys), values=tuple(plan.values), last=last), states
