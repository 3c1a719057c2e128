"""What a model says of a fixed sequence: the same weights say the same, whoever computes it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from tidemill.core.buffers import LogprobBuffer, TokenBuffer
from tidemill.models.attention import TreePlan, hidden_states, vocabulary_logits
from tidemill.models.token_tree import build_tree


@torch.inference_mode()
def probe_logprobs(model: PreTrainedModel, token_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs (float32 [N - 1], temperature 1) of the tokens after the first of a sequence (int32 [N], N >= 2).

    One plain forward pass, no cache. `model` has packed attention.
    """
    device = next(model.parameters()).device
    tree = build_tree([np.frombuffer(token_ids, np.int32)])
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, TreePlan(tree, device))[:-1])
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return np.ascontiguousarray(logprobs.cpu().numpy(), np.float32).tobytes()
