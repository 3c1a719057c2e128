"""A model over a token tree, with every use of its parameters in one forward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.models.attention import hidden_states
from tidemill.models.token_logprobs import Targets, token_logprobs
from tidemill.models.token_tree import TokenTree
from tidemill.models.transfer import on_device
from tidemill.models.tree_attention import TreePlan


class TreeOutput(NamedTuple):
    """Results of H nodes of a tree, with gradient if enabled."""

    states: Tensor  # [H, hidden]
    logprobs: Tensor  # float32 [T]; empty without targets
    statistic: Tensor  # float32 [T]


class TreeForward(nn.Module):
    """Hidden states and logprobs of any token tree. Sharding wraps this module: parameters are whole only within it.

    Args:
        model: with packed attention.
        autocast: dtype of the computation; None for the dtype of the weights.
        device: of the computation, where a model that is loaded elsewhere will be; by default that of the weights.
    """

    def __init__(
        self, model: PreTrainedModel, *, autocast: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast
        self.device = device or next(model.parameters()).device

    def forward(self, tree: TokenTree, nodes: Tensor, targets: Targets | None = None) -> TreeOutput:
        """Compute the last hidden states of `nodes` (int64 [H]), and the logprobs of tokens that they predict."""
        device = nodes.device
        tokens, positions = on_device(tree.token_ids, device), on_device(tree.depths, device)
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            states = hidden_states(self.model, tokens, positions, TreePlan(tree, device))[nodes]
            if targets is None:
                nothing = states.new_empty(0, dtype=torch.float32)
                return TreeOutput(states, nothing, nothing)
            logprobs, statistic = token_logprobs(self.model, states, targets)
        return TreeOutput(states, logprobs, statistic)
