"""Log-probabilities of trained tokens without a [tokens, vocabulary] block beyond a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tidemill.models.attention import TreePlan, hidden_states, vocabulary_logits
from tidemill.models.token_tree import TokenTree

FLOAT_BYTES = 4


class Predictions(Protocol):
    """Which nodes of a tree predict which T tokens, in order of the node."""

    @property
    def tree(self) -> TokenTree: ...
    @property
    def head_nodes(self) -> Tensor: ...  # int64 [H], distinct, ascending
    @property
    def head_rows(self) -> Tensor: ...  # int64 [T], which of them predicts the token, ascending
    @property
    def targets(self) -> Tensor: ...  # int64 [T]


Figure: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [H, vocabulary], normalizers [H], rows [T], targets [T]) -> [T]: something else to know of the tokens."""


def entropy(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """In nats, of the distributions that predicted the tokens."""
    return (normalizers - (torch.softmax(logits, -1) * logits).sum(-1))[rows]


def hits(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """1 where the token is the most probable one, else 0."""
    return (logits.argmax(-1)[rows] == targets).float()


def predicting_states(model: PreTrainedModel, predictions: Predictions) -> Tensor:
    """Hidden states [H, hidden] at the nodes that predict something, with gradient where enabled."""
    device, tree = predictions.targets.device, predictions.tree
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    return hidden_states(model, tokens, positions, TreePlan(tree, device))[predictions.head_nodes]


def token_logprobs(
    model: PreTrainedModel,
    predictions: Predictions,
    *,
    temperature: float,
    logits_budget_bytes: int,
    states: Tensor | None = None,
    figure: Figure = entropy,
    learn_figure: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs float32 [T] of the trained tokens at `temperature` (with gradient, where enabled), and `figure` [T] of
    them.

    Args:
        states: what `predicting_states` gave, where it is known already.
        learn_figure: the figure has a gradient, too, and costs the memory of one.

    When one block of logits would pass the budget, the vocabulary is computed in chunks of rows, and again in the
    backward pass.
    """
    device = predictions.targets.device
    hidden = predicting_states(model, predictions) if states is None else states
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows_at_once = max(1, logits_budget_bytes // (FLOAT_BYTES * vocabulary))

    def chunk(states: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = vocabulary_logits(model, states)
        if temperature != 1.0:
            logits = logits / temperature
        normalizers = logits.logsumexp(-1)
        with torch.set_grad_enabled(learn_figure and torch.is_grad_enabled()):
            known = figure(logits, normalizers, rows, targets)
        return logits[rows, targets] - normalizers[rows], known

    if len(hidden) <= rows_at_once:
        return chunk(hidden, predictions.head_rows, predictions.targets)
    logprobs, figures = [], []
    for start in range(0, len(hidden), rows_at_once):
        first, last = torch.searchsorted(
            predictions.head_rows, torch.tensor([start, start + rows_at_once], device=device)
        ).tolist()
        part = checkpoint(
            chunk,
            hidden[start : start + rows_at_once],
            predictions.head_rows[first:last] - start,
            predictions.targets[first:last],
            use_reentrant=False,
        )
        logprobs.append(part[0])
        figures.append(part[1])
    return torch.cat(logprobs), torch.cat(figures)
