"""Which activations a model keeps for its backward pass, and which it computes again."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


def keep_products_of_mlps(model: PreTrainedModel) -> None:
    """Compute again what the MLPs of a model compute between their matrix products: about half of what they keep."""
    again = partial(create_selective_checkpoint_contexts, _KEPT)
    for module in model.modules():
        mlp = getattr(module, "mlp", None)
        if isinstance(mlp, nn.Module):
            mlp.forward = partial(
                checkpoint, mlp.forward, use_reentrant=False, context_fn=again, preserve_rng_state=False
            )
