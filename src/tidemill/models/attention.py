"""One attention for training and generation over packed tokens [1, N]; a plan says which token sees which keys.

Any `transformers` causal language model that takes its attention from the library's attention interface works
unchanged; everything else of the model (projections, norms, rotary embeddings) is the library's.

What a piece gives depends on the tokens up to its end and on where the sequence is cut, on nothing else: the shapes of
all its operations follow from its place. So it is the same to the last bit whenever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.token_tree import Tokens, TokenTree

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query positions, key positions) -> bool, broadcast: the form in which transformers defines a mask."""


class LibraryMask(NamedTuple):
    """A mask that is defined but not computed; Tidemill's attention gets it in place of a tensor."""

    function: MaskFunction
    size: int | None  # of the window or chunk
    device: torch.device

    def window(self) -> int | None:
        """How many positions a token attends to, its own included; None for every position up to its own.

        Raises:
            ValueError: the mask is of another kind (attention to later tokens, or in chunks).
        """
        queries, keys = self._positions()
        allowed = self.function(0, 0, queries, keys).expand(queries.shape)
        for window in {None, self.size}:
            causal = keys <= queries
            if torch.equal(allowed, causal if window is None else causal & (queries - keys < window)):
                return window
        if (allowed & (keys > queries)).any():
            raise ValueError("attends to later tokens")
        raise ValueError("has an attention mask that is neither causal nor a sliding window")

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of positions near multiples of the size, where the kinds of mask differ."""
        size = self.size or 8
        near = {edge + shift for edge in (0, size, 2 * size, 3 * size) for shift in range(-2, 3)} | {size // 2}
        positions = torch.tensor(sorted(p for p in near if p >= 0), device=self.device)
        pairs = torch.cartesian_prod(positions, positions)
        return pairs[:, 0], pairs[:, 1]


IMPLEMENTATION = "tidemill"
_WINDOW = "_tidemill_window"  # attribute of an attention module


class AttentionPlan(Protocol):
    """Attends for every token of a packed call, layer by layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, N, head_dim]
        key: torch.Tensor,  # [1, kv_heads, N, head_dim]
        value: torch.Tensor,  # [1, kv_heads, N, value_dim]
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:  # [1, heads, N, value_dim]
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
            self._masks[window] = self._tree.ancestor_mask(self._device, window=window)[None, None]
        return masked_attention(query, key, value, self._masks[window], scaling)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LibraryMask | torch.Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if plan is None:
        raise unsupported(module, "does not pass the arguments of a call on to its attention")
    if softcap is not None or s_aux is not None:
        raise unsupported(module, "uses attention soft-capping or sinks, which Tidemill does not compute")
    out = plan.attend(int(module.layer_idx), query, key, value, scaling, _window(module, attention_mask))  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None  # some models take a view of it


def _window(module: torch.nn.Module, mask: LibraryMask | torch.Tensor | None) -> int | None:
    """Determined from the mask of the layer's first call, and kept with the layer."""
    if not hasattr(module, _WINDOW):
        if not isinstance(mask, LibraryMask):
            raise unsupported(module, "builds its attention mask without transformers' mask interface")
        try:
            setattr(module, _WINDOW, mask.window())
        except ValueError as error:
            raise unsupported(module, str(error)) from error
    window: int | None = getattr(module, _WINDOW)
    return window


def _library_mask(
    *_: Any, mask_function: MaskFunction, device: torch.device, local_size: int | None = None, **__: Any
) -> LibraryMask:
    """The plan masks every call; transformers need only say which kind of mask a layer has."""
    return LibraryMask(mask_function, local_size, device)


def unsupported(module: torch.nn.Module, why: str) -> UserError:
    """The error for an architecture that the packed forward does not compute."""
    return UserError(
        f"{type(module).__name__} {why}",
        where="model.source",
        hint="choose a model of a supported family (docs/models.md lists them)",
    )


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _library_mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend through the plan of each call.

    Raises:
        UserError: when the model's attention cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise unsupported(model, "does not take its attention from transformers' attention interface")
    model.set_attn_implementation(IMPLEMENTATION)


def use_own_attention(model: PreTrainedModel) -> None:
    """Make `model` attend as transformers does without Tidemill: the reference that its forward is compared with."""
    model.set_attn_implementation("eager")


def hidden_states(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Last hidden states [N, hidden] of packed tokens [N] at `positions` [N]."""
    # Without a mask the library would look for the starts of packed sequences in the positions.
    mask = torch.ones((1, len(token_ids)), dtype=torch.bool, device=token_ids.device)
    output = model.base_model(
        input_ids=token_ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False, plan=plan
    )
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
            raise unsupported(model, f"scales its logits by {unknown}, which Tidemill does not compute")
    softcap = getattr(config, "final_logit_softcapping", None)
    logits = logits.float()
    return torch.tanh(logits / softcap) * softcap if softcap else logits


@dataclass(frozen=True, slots=True, kw_only=True)
class KVChunk:
    """What later pieces need of `tokens` consecutive tokens."""

    tokens: int
    keys: tuple[Tensor, ...]  # by layer, [kv_heads, tokens, head_dim]
    values: tuple[Tensor, ...]  # [kv_heads, tokens, value_dim]
    last: Tensor  # [1, hidden], of its last token


class ChunkPlan:
    """Implements `models.attention.AttentionPlan`: every token sees the pieces before its own, and its own up to it."""

    def __init__(self, past: Sequence[KVChunk], tokens: int, device: torch.device) -> None:
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
def prefill_chunk(model: PreTrainedModel, past: Sequence[KVChunk], token_ids: Tokens) -> tuple[KVChunk, Tensor]:
    """The piece of `token_ids` (int32 [N], N >= 1) after those of `past`, and its hidden states [N, hidden]."""
    device = next(model.parameters()).device
    plan = ChunkPlan(past, len(token_ids), device)
    before = sum(piece.tokens for piece in past)
    tokens = torch.from_numpy(token_ids.astype("int64")).to(device)
    states = hidden_states(model, tokens, torch.arange(before, before + len(token_ids), device=device), plan)
    # A copy: a view of one row would keep all of them.
    last = states[-1:].clone()
    return KVChunk(tokens=len(token_ids), keys=tuple(plan.keys), values=tuple(plan.values), last=last), states
