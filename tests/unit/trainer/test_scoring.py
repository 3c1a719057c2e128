"""Logprobs of completions do not depend on the other completions of the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model_shapes import VOCABULARY, llama
from tidemill.core.records import Completion, unpack_logprobs, unpack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.trainer.scoring import completion_logprobs

ROOMY = 1 << 20


def completions() -> list[Completion]:
    """Two prompts of 12 tokens with a common header of 6; completions of 1 to 4 tokens, the first twice."""
    rng = np.random.default_rng(0)
    header = rng.integers(2, VOCABULARY, 6)
    prompts = [np.concatenate([header, rng.integers(2, VOCABULARY, 6)]).astype(np.int32).tobytes() for _ in range(2)]
    made = [
        Completion(prompt_ids=prompt, token_ids=rng.integers(2, VOCABULARY, tokens).astype(np.int32).tobytes())
        for prompt in prompts
        for tokens in range(1, 5)
    ]
    return [*made, made[0]]


def alone(completion: Completion, temperature: float) -> list[float]:
    prompt, tokens = unpack_tokens(completion.prompt_ids), unpack_tokens(completion.token_ids)
    with torch.no_grad():
        logits = llama()(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return chosen.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("budget", "logits_budget_bytes"),
    [(10_000, ROOMY), (40, ROOMY), (1, ROOMY), (10_000, 3 * 4 * VOCABULARY)],
    ids=["one tree", "several trees", "one tree per completion", "three rows of logits per chunk"],
)
def test_logprobs_equal_those_of_each_completion_alone(
    budget: int, logits_budget_bytes: int, temperature: float
) -> None:
    model = llama()
    use_packed_attention(model)

    found = completion_logprobs(
        TreeForward(model),
        completions(),
        budget=budget,
        temperature=temperature,
        logits_budget_bytes=logits_budget_bytes,
    )

    for completion, logprobs in zip(completions(), found, strict=True):
        assert unpack_logprobs(logprobs) == pytest.approx(alone(completion, temperature), rel=1e-4, abs=1e-5)


def test_shared_prefixes_are_computed_once_within_the_budget() -> None:
    model, computed = llama(), []
    use_packed_attention(model)
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )

    completion_logprobs(TreeForward(model), completions(), budget=10_000, temperature=1.0, logits_budget_bytes=ROOMY)
    # header 6, prompts 6 + 6, completions of 1 to 4 tokens without their last: 2 × (0 + 1 + 2 + 3)
    assert computed == [6 + 12 + 12]
    computed.clear()
    completion_logprobs(TreeForward(model), completions(), budget=18, temperature=1.0, logits_budget_bytes=ROOMY)
    assert computed == [18, 18, 12]  # one tree per prompt with its completions, one for the repeated completion
