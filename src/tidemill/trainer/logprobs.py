"""Log-probabilities of trained tokens without a [tokens, vocabulary] block beyond a budget."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tidemill.models.attention import TreePlan, hidden_states, vocabulary_logits
from tidemill.trainer.packing import Microbatch

FLOAT_BYTES = 4


def token_logprobs(
    model: PreTrainedModel, microbatch: Microbatch, *, temperature: float, logits_budget_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs float32 [T] of the trained tokens at `temperature` (with gradient, where enabled), and the entropy [T]
    in nats (without) of the distributions that predicted them.

    When one block of logits would pass the budget, the vocabulary is computed in chunks of rows, and again in the
    backward pass.
    """
    device = microbatch.targets.device
    tree = microbatch.tree
    hidden = hidden_states(
        model,
        torch.from_numpy(tree.token_ids).to(device),
        torch.from_numpy(tree.depths).to(device),
        TreePlan(tree, device),
    )[microbatch.head_nodes]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows_at_once = max(1, logits_budget_bytes // (FLOAT_BYTES * vocabulary))

    def chunk(states: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = vocabulary_logits(model, states)
        if temperature != 1.0:
            logits = logits / temperature
        normalizers = logits.logsumexp(-1)
        with torch.no_grad():
            entropy = normalizers - (torch.softmax(logits, -1) * logits).sum(-1)
        return logits[rows, targets] - normalizers[rows], entropy[rows]

    if len(hidden) <= rows_at_once:
        return chunk(hidden, microbatch.head_rows, microbatch.targets)
    logprobs, entropies = [], []
    for start in range(0, len(hidden), rows_at_once):
        first, last = torch.searchsorted(
            microbatch.head_rows, torch.tensor([start, start + rows_at_once], device=device)
        ).tolist()
        part = checkpoint(
            chunk,
            hidden[start : start + rows_at_once],
            microbatch.head_rows[first:last] - start,
            microbatch.targets[first:last],
            use_reentrant=False,
        )
        logprobs.append(part[0])
        entropies.append(part[1])
    return torch.cat(logprobs), torch.cat(entropies)
