"""The batch-invariant forward: two shapes, whatever is running.

On a given machine a row of a fixed-shape matrix product does not depend on the other rows, so a token computed through
the same shape is the same to the last bit whatever its slot and its neighbours. Prompt tokens always go through the
prompt shape [1, CHUNK], completion tokens (also those of a prefix that is continued) always through the decode shape
[slots, 1], against the whole capacity of the cache. That is what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from transformers import PreTrainedModel

from tidemill.models.attention import hidden_states, masked_attention, vocabulary_logits
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.packed import decode_attention
from tidemill.rollout.engines.embedded.sequence import Sequence

CHUNK = 32


class FixedPlan:
    """Writes each token's key and value at (row, position), then attends over the row's whole capacity."""

    def __init__(self, cache: SlotCache, rows: torch.Tensor, positions: torch.Tensor, *, one_row: bool) -> None:
        self._cache, self._rows, self._positions, self._one_row = cache, rows, positions, one_row
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
        keys, values = self._cache.layer(layer, key, value)
        keys[self._rows, :, self._positions] = key[0].transpose(0, 1)
        values[self._rows, :, self._positions] = value[0].transpose(0, 1)
        mask = self._mask(window)
        if self._one_row:
            row = int(self._rows[0])
            return masked_attention(query, keys[row : row + 1], values[row : row + 1], mask[None, None], scaling)
        count = len(self._rows)
        return decode_attention(query, keys[:count], values[:count], mask[:, None, None], scaling)

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._masks:
            places = torch.arange(self._cache.context + 1, device=self._positions.device)
            mask = places[None] <= self._positions[:, None]
            if window is not None:
                mask &= places[None] > self._positions[:, None] - window
            self._masks[window] = mask
        return self._masks[window]


def prompt_forward(
    model: PreTrainedModel, cache: SlotCache, row: int, sequence: Sequence, device: torch.device
) -> torch.Tensor | None:
    """Compute up to CHUNK further prompt tokens; logits [V] when the prompt's last token was among them."""
    start, end = sequence.computed, min(sequence.computed + CHUNK, sequence.prompt_length)
    tokens = torch.zeros(CHUNK, dtype=torch.int64, device=device)
    positions = torch.full((CHUNK,), cache.context, dtype=torch.int64, device=device)
    tokens[: end - start] = torch.from_numpy(sequence.tokens[start:end].copy()).to(device)
    positions[: end - start] = torch.arange(start, end, device=device)
    plan = FixedPlan(cache, torch.full((CHUNK,), row, device=device), positions, one_row=True)
    hidden = hidden_states(model, tokens, positions, plan)
    sequence.computed = end
    if end < sequence.prompt_length:
        return None
    last = end - start - 1
    return vocabulary_logits(model, hidden[last : last + 1])[0]


def decode_forward(
    model: PreTrainedModel, cache: SlotCache, rows: Seq[Sequence | None], device: torch.device
) -> torch.Tensor:
    """One step of every row; logits float32 [slots, V]. Empty rows compute a token that nobody reads."""
    tokens = torch.tensor([0 if s is None else int(s.tokens[s.computed]) for s in rows], device=device)
    positions = torch.tensor([cache.context if s is None else s.computed for s in rows], device=device)
    plan = FixedPlan(cache, torch.arange(len(rows), device=device), positions, one_row=False)
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, plan))
    for sequence in rows:
        if sequence is not None:
            sequence.computed += 1
    return logits
