"""Reward scores do not depend on the other samples of the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model_shapes import HIDDEN, VOCABULARY, llama
from tidemill.models.attention import use_packed_attention
from tidemill.models.reward_model import HeadDescription, RewardModel, reward_head
from tidemill.trainer.scoring import reward_scores


def reward_model() -> RewardModel:
    model = llama().requires_grad_(False)
    use_packed_attention(model)
    description = HeadDescription(
        kind="reward_model", pooling="last_token", hidden_size=HIDDEN, vocabulary_digest="any"
    )
    return RewardModel(model=model, head=reward_head(HIDDEN), description=description)


def samples() -> list[bytes]:
    """Two prompts, completions of different lengths, interleaved."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, 12) for _ in range(2)]
    made = [
        np.concatenate([prompts[number % 2], rng.integers(2, VOCABULARY, 1 + number)]).astype(np.int32).tobytes()
        for number in range(8)
    ]
    return [*made, made[0]]


@pytest.mark.parametrize("budget", [10_000, 40, 1])
def test_scores_equal_those_of_each_sample_alone(budget: int) -> None:
    reward = reward_model()
    plain = llama()
    expected = []
    for sample in samples():
        ids = torch.from_numpy(np.frombuffer(sample, np.int32).astype(np.int64))[None]
        hidden = plain(ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0, -1:]
        expected.append(float(reward.head(hidden).detach()))
    assert reward_scores(reward, samples(), budget=budget) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_prompts_of_interleaved_samples_are_computed_once() -> None:
    reward, computed = reward_model(), []
    reward.model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    reward_scores(reward, samples(), budget=10_000)
    # two prompts of 12, completions of 1 + 2 + ... + 8; a few tokens may be shared; the last sample is the first
    (tokens,) = computed
    assert 24 + 36 - 6 <= tokens <= 24 + 36
    computed.clear()
    reward_scores(reward, samples(), budget=45)
    assert len(computed) == 2  # one tree per prompt


def test_no_samples_have_no_scores() -> None:
    assert reward_scores(reward_model(), [], budget=10) == []
