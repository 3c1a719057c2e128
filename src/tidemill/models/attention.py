"""Runs a model over packed tokens [1, N].

Tidemill replaces only the attention of a `transformers` causal language model; the engine's decoding step on a GPU also
fuses other layers. An `AttentionPlan` defines which keys each token attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tidemill.core.errors import UserError
from tidemill.models.folder import OTHER_FAMILY
from tidemill.models.token_tree import Tokens

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""(batch, head, query positions, key positions) -> bool, broadcast: how transformers defines a mask."""


class LibraryMask(NamedTuple):
    """The definition of a mask, passed to Tidemill's attention instead of a computed mask tensor."""

    function: MaskFunction
    size: int | None  # of the window or chunk
    device: torch.device

    def window(self) -> int | None:
        """Size of the sliding window, including the token itself; None for full causal attention.

        Raises:
            ValueError: the mask is neither causal nor a sliding window.
        """
        # The kinds of mask differ near multiples of the size: compare all pairs of positions there.
        size = self.size or 8
        near = {edge + shift for edge in (0, size, 2 * size, 3 * size) for shift in range(-2, 3)} | {size // 2}
        positions = torch.tensor(sorted(p for p in near if p >= 0), device=self.device)
        queries, keys = torch.cartesian_prod(positions, positions).unbind(1)
        allowed = self.function(0, 0, queries, keys).expand(queries.shape)
        for window in {None, self.size}:
            causal = keys <= queries
            if torch.equal(allowed, causal if window is None else causal & (queries - keys < window)):
                return window
        if (allowed & (keys > queries)).any():
            raise ValueError("attends to later tokens")
        raise ValueError("has an attention mask that is neither causal nor a sliding window")


IMPLEMENTATION = "tidemill"
_WINDOW = "_tidemill_window"  # attribute of an attention module


class AttentionPlan(Protocol):
    """Attends for every token of a packed call, one layer at a time.

    query is [1, heads, N, head_dim], key [1, kv_heads, N, head_dim], value [1, kv_heads, N, value_dim]; the result is
    [1, heads, N, value_dim].
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor: ...


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """[B, heads, N, D] queries against [B, kv_heads, M, D] keys and values, bool mask broadcast to [B, 1, N, M]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.is_cuda:  # the CPU's kernel shares keys and values between heads by itself
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        repeats = 1
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=repeats > 1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LibraryMask | Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if plan is None:
        raise unsupported(module, "does not forward keyword arguments to its attention")
    if softcap is not None or s_aux is not None:
        raise unsupported(module, "uses attention soft-capping or sinks, which Tidemill does not compute")
    out = plan.attend(int(module.layer_idx), query, key, value, scaling, _window(module, attention_mask))  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None  # some models take a view of it


def _window(module: torch.nn.Module, mask: LibraryMask | Tensor | None) -> int | None:
    """The layer's window, computed from the mask of its first call and stored on the module."""
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
    return LibraryMask(mask_function, local_size, device)


def unsupported(module: torch.nn.Module, reason: str) -> UserError:
    """The error for an architecture that the packed forward pass does not compute."""
    return UserError(f"{type(module).__name__} {reason}", where="model.source", hint=OTHER_FAMILY)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _library_mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend through the `plan` argument of each call.

    Raises:
        UserError: the model's attention cannot be replaced.
    """
    if not model._supports_attention_backend:
        raise unsupported(model, "does not use transformers' attention interface")
    model.set_attn_implementation(IMPLEMENTATION)


def hidden_states(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """Last hidden states [N, hidden] of packed tokens [N] at `positions` [N]."""
    # Without a mask the library would derive the starts of packed sequences from the positions.
    mask = torch.ones((1, len(token_ids)), dtype=torch.bool, device=token_ids.device)
    output = model.base_model(
        input_ids=token_ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False, plan=plan
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The layer that computes logits from last hidden states. Raises UserError: it scales them in another way."""
    config = model.config
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise unsupported(model, f"scales its logits by {field}, which Tidemill does not compute")
    layer: nn.Linear = model.get_output_embeddings()
    return layer


def logit_softcap(model: PreTrainedModel) -> float | None:
    """c of logits capped as `c tanh(logits / c)`; None if they are not capped."""
    return getattr(model.config, "final_logit_softcapping", None)


def float32_product(states: Tensor, weight: Tensor) -> Tensor:
    """`states @ weight.T` in float32, [N, M] of [N, K] and [M, K] of one dtype; without gradient in bf16 on a GPU.

    A GPU adds in float32 and returns these sums. Rounded to bf16, a logit of 20 would be up to 0.06 off.
    """
    if states.is_cuda and states.dtype != torch.float32:
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    return torch.mm(states, weight.t()).float()


def vocabulary_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits float32 [N, vocabulary] of hidden states [N, hidden]; without gradient in bf16 on a GPU."""
    layer = output_layer(model)
    logits: Tensor
    if hidden.is_cuda:
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else hidden.dtype
        logits = float32_product(hidden.to(dtype), layer.weight.to(dtype))
        if layer.bias is not None:
            logits += layer.bias
    else:
        logits = layer(hidden).float()
    softcap = logit_softcap(model)
    return torch.tanh(logits / softcap) * softcap if softcap else logits


@dataclass(frozen=True, slots=True, kw_only=True)
class KVChunk:
    """Keys and values of `tokens` consecutive tokens, which later chunks attend to."""

    tokens: int
    keys: tuple[Tensor, ...]  # by layer, [kv_heads, tokens, head_dim]
    values: tuple[Tensor, ...]  # [kv_heads, tokens, value_dim]
    last: Tensor  # [1, hidden], of the last token


class ChunkPlan:
    """Each token of a chunk attends causally to the chunk and to all tokens of earlier chunks."""

    def __init__(self, past: Sequence[KVChunk], tokens: int, device: torch.device) -> None:
        self._past, self._tokens, self._device = past, tokens, device
        self._before = sum(chunk.tokens for chunk in past)
        self._masks: dict[int | None, Tensor] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        assert layer == len(self.keys), "layers attend in order"
        self.keys.append(key[0])
        self.values.append(value[0])
        keys = torch.cat([*(chunk.keys[layer] for chunk in self._past), key[0]], 1)
        values = torch.cat([*(chunk.values[layer] for chunk in self._past), value[0]], 1)
        return masked_attention(query, keys[None], values[None], self._mask(window), scaling)

    def _mask(self, window: int | None) -> Tensor:
        """bool [1, 1, tokens, earlier tokens + tokens]."""
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
    """Compute `token_ids` (int32 [N], N >= 1) after the chunks of `past`; also returns its hidden states [N, hidden].

    The result is bit-exact for given tokens and chunk boundaries, because these determine all tensor shapes.
    """
    device = next(model.parameters()).device
    plan = ChunkPlan(past, len(token_ids), device)
    before = sum(chunk.tokens for chunk in past)
    tokens = torch.from_numpy(token_ids.astype("int64")).to(device)
    states = hidden_states(model, tokens, torch.arange(before, before + len(token_ids), device=device), plan)
    last = states[-1:].clone()  # a view of one row would keep all rows in memory
    return KVChunk(tokens=len(token_ids), keys=tuple(plan.keys), values=tuple(plan.values), last=last), states
