"""One decoding step in static memory: it reads and advances tensors on the device, and never waits for the host.

Imports Triton, so only where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from tidemill.kernels.decode import DecodeLayout, decode
from tidemill.kernels.draw import draw_tokens
from tidemill.kernels.layers import rms_norm, rotate, swiglu
from tidemill.models.attention import hidden_states, vocabulary_logits
from tidemill.models.transfer import on_device
from tidemill.rollout.engines.embedded.cache import SlotCache

_LAYOUT = {
    "rows": torch.int64,
    "lengths": torch.int32,
    "prefix_rows": torch.int64,
    "prefix_lengths": torch.int32,
    "group_first": torch.int32,
    "group_size": torch.int32,
}
_COLUMNS = _LAYOUT | {
    "tokens": torch.int64,
    "logprobs": torch.float32,
    "positions": torch.int64,
    "seeds": torch.int32,
    "temperatures": torch.float32,
}


def _code(function: Any) -> Any:
    """Equal for functions that compute the same: transformers has copies of Llama's in most families."""
    code = getattr(function, "__code__", None)
    return function if code is None else (code.co_code, code.co_names, code.co_consts)


_NORM = _code(modeling_llama.LlamaRMSNorm.forward)
_MLPS = [_code(mlp.forward) for mlp in (modeling_llama.LlamaMLP, Qwen2MLP)]
_ROTARY = {name: _code(getattr(modeling_llama, name)) for name in ("apply_rotary_pos_emb", "rotate_half")}


def _fused_forward(module: Any) -> Callable[..., Any] | None:
    """The module's forward by `kernels.layers`; None if it computes something else, as Gemma's norms do."""
    forward = type(module).forward
    code, names = _code(forward), forward.__globals__
    if code == _NORM:
        return lambda states: rms_norm(states, module.weight, module.variance_epsilon)
    if code in _MLPS and isinstance(module.act_fn, SiLUActivation):
        return lambda states: module.down_proj(swiglu(module.gate_proj(states), module.up_proj(states)))
    if "apply_rotary_pos_emb" in code[1] and all(_code(names.get(name)) == _ROTARY[name] for name in _ROTARY):
        names = {**names, "apply_rotary_pos_emb": rotate}
        fused = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
        return MethodType(fused, module)
    return None


@contextmanager
def fused_layers(model: nn.Module) -> Iterator[None]:
    """Compute `model`, which may be the trained one, by kernels within the context only."""
    with ExitStack() as stack:
        for module in model.modules():
            if "forward" not in vars(module) and (forward := _fused_forward(module)) is not None:
                module.forward = forward
                stack.callback(delattr, module, "forward")
        yield


class StepKernels(NamedTuple):
    """The kernels of a decoding step, with the signatures of `kernels.decode`, `kernels.draw` and `fused_layers`."""

    decode: Callable[..., Tensor] = decode
    draw_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = draw_tokens
    layers: Callable[[nn.Module], AbstractContextManager[object]] = fused_layers


def bucket(entries: int) -> int:
    """Entries that are computed for so many: a power of 2, above 16 a multiple of 16, above 64 of 32."""
    if entries <= 16:
        return 1 << (entries - 1).bit_length()
    step = 16 if entries <= 64 else 32
    return -(-entries // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """B samples, or padding, whose next token a step computes; views of the memory of a `DecodeState`."""

    tokens: Tensor  # int64 [B], the newest; after a step the drawn ones
    logprobs: Tensor  # float32 [B], of the drawn ones
    positions: Tensor  # int64 [B], of the newest tokens
    seeds: Tensor  # int32 [B], as `kernels.draw` takes them
    temperatures: Tensor  # float32 [B]
    layout: DecodeLayout

    def advance(self, token_ids: Tensor, logprobs: Tensor) -> None:
        """Make drawn tokens the newest ones. Padding stays where it is."""
        self.tokens.copy_(token_ids)
        self.logprobs.copy_(logprobs)
        real = self.layout.lengths > 0
        self.positions.add_(real)
        self.layout.lengths.add_(real)


class DecodeState:
    """Memory of up to `bucket(slots)` entries, always at the same addresses, as CUDA graphs require.

    Args:
        padding: (row, position) where padding writes its keys and values; nothing reads them.
    """

    def __init__(self, slots: int, padding: tuple[int, int], device: torch.device) -> None:
        self._device = device
        self._padding = dict(zip(("rows", "positions"), padding, strict=True))
        self._columns = {
            name: torch.zeros(bucket(slots), dtype=dtype, device=device) for name, dtype in _COLUMNS.items()
        }
        self.sizes = sorted({bucket(entries) for entries in range(1, slots + 1)}, reverse=True)

    def entries(self, size: int) -> Entries:
        columns = {name: column[:size] for name, column in self._columns.items()}
        return Entries(layout=DecodeLayout(**{name: columns.pop(name) for name in _LAYOUT}), **columns)

    def upload(self, size: int, columns: Mapping[str, npt.ArrayLike], sources: Seq[int] = ()) -> None:
        """Replace the first `size` entries; those without a value become padding.

        Args:
            sources: of each entry, that whose newest token it gets, or -1: its token is in `columns`.
        """
        before = self._columns["tokens"].clone()
        for name, column in self._columns.items():
            host = torch.full((size,), self._padding.get(name, 0), dtype=column.dtype)
            values = torch.as_tensor(np.asarray(columns.get(name, ())))
            host[: len(values)] = values
            column[:size] = on_device(host.numpy(), self._device)
        if len(sources):
            index = on_device(np.array(sources), self._device)
            tokens = self._columns["tokens"][: len(sources)]
            tokens.copy_(torch.where(index >= 0, before[index.clamp(min=0)], tokens))


class StaticPlan:
    """Each entry writes its keys and values into its row, then attends to its row and its prefix."""

    def __init__(self, cache: SlotCache, entries: Entries, kernels: StepKernels) -> None:
        self._cache, self._entries, self._decode = cache, entries, kernels.decode

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        layout, positions = self._entries.layout, self._entries.positions
        keys[layout.rows, :, positions] = key[0].transpose(0, 1)
        values[layout.rows, :, positions] = value[0].transpose(0, 1)
        out = self._decode(query[0].transpose(0, 1), keys, values, layout, scaling=scaling, window=window)
        return out.transpose(0, 1)[None]


def decode_logits(model: PreTrainedModel, cache: SlotCache, entries: Entries, kernels: StepKernels) -> Tensor:
    """Logits float32 [B, V] of the next tokens."""
    plan = StaticPlan(cache, entries, kernels)
    with kernels.layers(model):
        return vocabulary_logits(model, hidden_states(model, entries.tokens, entries.positions, plan))


def decode_step(model: PreTrainedModel, cache: SlotCache, entries: Entries, kernels: StepKernels) -> None:
    """Draw the next token of every entry, without top-k and top-p, and advance."""
    logits = decode_logits(model, cache, entries, kernels)
    entries.advance(*kernels.draw_tokens(logits, entries.seeds, entries.positions, entries.temperatures))
