"""MLPs that compute again what is between their matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.fake_gpu import Operations
from tests.model_shapes import gemma3, llama, qwen3
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.process_memory import kept_numbers
from tidemill.models.recomputation import keep_products_of_mlps

TOKENS, INNER = 24, 4  # bytes


def gradients(model: PreTrainedModel, *, autocast: bool) -> tuple[list[Tensor], Counter[str], int]:
    """(gradients, operations, bytes kept outside of checkpoints) of one pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(TOKENS)[None]
    with Operations() as operations:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            output = model(input_ids=tokens, use_cache=False).logits.float().square().sum()
        output.backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return found, operations.counts, sum(kept.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [llama, qwen3, gemma3])
def test_gradients_have_the_same_bits_and_no_product_is_computed_again(
    make: Callable[[], PreTrainedModel], autocast: bool
) -> None:
    plain, counts, kept = gradients(make(), autocast=autocast)
    model = make()
    keep_products_of_mlps(model)
    ours, counts_again, kept_again = gradients(model, autocast=autocast)
    assert len(ours) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    layers = model.config.num_hidden_layers
    activation = "silu" if make is not gemma3 else "gelu"
    assert counts_again["mm"] == counts["mm"]
    assert counts_again[activation] == counts[activation] + layers
    # Gate, its activation, up and product of each layer, of which two are inputs or results of products.
    width = model.config.intermediate_size
    assert kept - kept_again >= 0.9 * 4 * layers * TOKENS * width * (2 if autocast else 4)


def test_every_product_of_an_mlp_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result, too, of which nothing else needs the value: `hardware.process_memory.kept_numbers` counts it."""
    model, kept = llama(), list[dict[Any, Any]]()
    keep_products_of_mlps(model)
    mode = torch.utils.checkpoint._CachingTorchDispatchMode
    real = mode.__init__

    def noted(self: Any, policy: Any, storage: dict[Any, Any]) -> None:
        kept.append(storage)
        real(self, policy, storage)

    monkeypatch.setattr(mode, "__init__", noted)
    model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    shape = shape_of_config(model.config.to_dict(), source="llama")
    count = partial(kept_numbers, shape, context=TOKENS, frozen=False)
    layers, inner = (
        shape.layers - 1,
        4 * shape.intermediate,
    )  # of one layer everything is kept when it is computed again
    products = [len(storage[torch.ops.aten.mm.default]) for storage in kept]
    assert products == [3] * shape.layers
    left = count(recompute="selective") - (count(recompute=False) - layers * inner)
    assert left == layers * (2 * shape.intermediate + shape.hidden)


def test_without_gradients_nothing_is_kept_or_computed_again() -> None:
    model = llama()
    keep_products_of_mlps(model)
    with torch.no_grad(), Operations() as operations:
        ours = model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits
    assert operations.counts["silu"] == model.config.num_hidden_layers
    assert torch.equal(ours, llama()(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits)
