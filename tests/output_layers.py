"""Logprobs through the output layer of a model that has nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.models.token_logprobs import Targets, token_logprobs


def logprobs_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` with an output layer of `weight` and `bias`."""
    layer = SimpleNamespace(weight=weight, bias=bias)
    model = SimpleNamespace(
        config=SimpleNamespace(final_logit_softcapping=softcap), get_output_embeddings=lambda: layer
    )
    settings = {"temperature": 1.0, "budget_bytes": 1 << 20, **settings}
    return token_logprobs(cast(PreTrainedModel, model), hidden, Targets(rows, targets, **settings))


def plain_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same logprobs and entropies with all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    log_softmax = (logits / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax[rows, targets], entropy[rows]
