"""Logprobs of completions, whole or under way, in token trees within a budget: shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.core.buffers import LogprobBuffer
from tidemill.core.records import Completion
from tidemill.models.token_tree import Tokens
from tidemill.trainer.logprobs import token_logprobs
from tidemill.trainer.minibatches import split_by_tokens
from tidemill.trainer.packing import by_sample
from tidemill.trainer.sequences import pack_completions, tokens_of


@torch.no_grad()
def completion_logprobs(
    model: PreTrainedModel,
    completions: Sequence[Completion],
    *,
    budget: int,
    temperature: float,
    logits_budget_bytes: int,
    autocast: torch.dtype | None = None,
) -> list[LogprobBuffer]:
    """float32 [N] of each completion's tokens, in the order given.

    Args:
        completions: those of one prompt side by side, or it is computed again.
        budget: packed tokens of one forward pass; a longer completion runs alone.
        temperature: of the distribution asked about.
        logits_budget_bytes: as for `token_logprobs`.
    """
    device = next(model.parameters()).device
    found: list[LogprobBuffer] = []
    for run in split_by_tokens(completions, _inputs, budget):
        packed = pack_completions([(completion.prompt_ids, completion.token_ids) for completion in run], device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logprobs, _ = token_logprobs(
                model,
                packed,
                temperature=temperature,
                logits_budget_bytes=logits_budget_bytes,
                figure=_nothing_else,
            )
        found += [values.tobytes() for values in by_sample(logprobs, packed.samples)]
    return found


def _nothing_else(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """A figure that costs nothing."""
    return targets


def _inputs(completion: Completion) -> tuple[Tokens]:
    """Every token but the last, which predicts nothing."""
    return (tokens_of(completion.prompt_ids + completion.token_ids)[:-1],)
