"""Chunked scorers: bit-identical results whenever chunks are computed, and agreement with token trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.frozen_scorers import CHUNK, chunked_scorer, frozen, growing, logprob_scorer, named, score_all, tokens
from tests.model_shapes import HIDDEN, MODEL_SHAPES
from tidemill.core.records import ModelScores
from tidemill.models.reward_model import HeadDescription, RewardModel, reward_head
from tidemill.models.tree_forward import TreeForward
from tidemill.trainer.packing import MaskedCompletion, pack_completions
from tidemill.trainer.scoring import RewardModelScorer, reward_scores, token_logprobs


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return frozen()


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_logprobs_equal_those_of_a_token_tree(shape: str) -> None:
    model = frozen(shape)
    prompt, completion = tokens(13), tokens(21, seed=1)
    scores = score_all(chunked_scorer(model, logprob_scorer(model, rows=5)), named(0), prompt + completion, 13)
    packed = pack_completions([MaskedCompletion(prompt, completion)], torch.device("cpu"))
    with torch.no_grad():
        expected = token_logprobs(TreeForward(model), packed, temperature=0.7, logits_budget_bytes=1 << 20).logprobs
    np.testing.assert_allclose(np.frombuffer(scores.values, np.float32), expected.numpy(), atol=1e-5)
    assert (scores.tokens_ahead, scores.tokens_late) == (0, 34)


def test_scores_equal_those_of_a_token_tree(model: PreTrainedModel) -> None:
    description = HeadDescription(
        kind="reward_model", pooling="last_token", hidden_size=HIDDEN, vocabulary_digest="any"
    )
    reward = RewardModel(model=model, head=reward_head(HIDDEN), description=description)
    samples = [tokens(9) + tokens(length, seed=length) for length in (0, 1, CHUNK, 19)]
    chunked = chunked_scorer(model, RewardModelScorer(reward.head))
    found = [score_all(chunked, named(index), ids, 9) for index, ids in enumerate(samples)]
    scores = [np.frombuffer(one.values, np.float32).item() for one in found]
    assert scores == pytest.approx(reward_scores(reward, samples, budget=1000), abs=1e-5)
    # The 9 prompt tokens are computed once, for the first sample.
    assert [one.tokens_late for one in found] == [9, 1, 8, 19]


ACTS = st.tuples(st.sampled_from(["ahead", "ahead", "ahead", "forget", "score"]), st.integers(0, 4), st.integers(0, 30))


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20), *[st.integers(0, 30)] * 5),
    cache=st.sampled_from([0, 12, 40, 1000]),
    acts=st.lists(ACTS, max_size=30),
)
def test_results_do_not_depend_on_when_chunks_are_computed(
    model: PreTrainedModel, lengths: tuple[int, ...], cache: int, acts: list[tuple[str, int, int]]
) -> None:
    prompts = [tokens(length, seed=seed) for seed, length in enumerate(lengths[:2])]
    samples = [
        (named(index, str(of)), prompts[of] + tokens(length, seed=10 + index), lengths[of])
        for index, (of, length) in enumerate(zip((0, 0, 1, 1, 0), lengths[2:], strict=True))
    ]
    plain = chunked_scorer(model, cache=0)
    expected = [score_all(plain, *sample).values for sample in samples]
    chunked = chunked_scorer(model, cache=cache)
    for act, at, more in [*acts, *(("score", at, 0) for at in range(5))]:
        name, ids, prompt_tokens = samples[at]
        if act == "ahead":
            chunked.compute_ahead(name, ids[: (prompt_tokens + more) * 4], prompt_tokens)
        elif act == "forget":
            chunked.forget(name)
        else:
            assert score_all(chunked, *samples[at]).values == expected[at]
        assert chunked.tokens_held <= cache


def test_only_the_last_chunk_is_computed_at_the_end(model: PreTrainedModel) -> None:
    ids, chunked = tokens(40), chunked_scorer(model)
    # The prompt of 10 has chunks of 8 and 2; completion chunks end at 18, 26 and 34.
    computed_after = list(growing(chunked, named(0), ids, 10))
    assert [10 + at for at, computed in enumerate(computed_after) if computed] == [10, 18, 26, 34]
    scores = score_all(chunked, named(0), ids, 10)
    assert (scores.tokens_ahead, scores.tokens_late) == (34, 6)
    assert chunked.tokens_held == 10  # the prompt, for other samples of the group
    assert score_all(chunked, named(1), ids[:40] + tokens(3, seed=2), 10).tokens_late == 3


def test_a_sample_that_does_not_fit_is_computed_at_its_end(model: PreTrainedModel) -> None:
    ids, chunked = tokens(30), chunked_scorer(model, cache=20)
    list(growing(chunked, named(0), ids, 4))  # 4 + 8 + 8 of 20
    assert chunked.tokens_held == 20
    other = tokens(4, seed=7) + tokens(20, seed=8)
    assert not any(growing(chunked, named(1, "other"), other, 4))
    assert score_all(chunked, named(1, "other"), other, 4) == ModelScores(
        values=score_all(chunked_scorer(model), named(0), other, 4).values, tokens_ahead=0, tokens_late=24
    )
    assert chunked.tokens_held == 20
    assert score_all(chunked, named(0), ids, 4).tokens_ahead == 20
    assert chunked.tokens_held == 4


def test_unused_prompts_are_evicted(model: PreTrainedModel) -> None:
    chunked = chunked_scorer(model, cache=20)
    score_all(chunked, named(0, "a"), tokens(8, seed=1), 7)
    score_all(chunked, named(0, "b"), tokens(8, seed=2), 7)
    assert chunked.tokens_held == 14
    assert list(growing(chunked, named(0, "c"), tokens(7, seed=3), 7)) == [True]  # the oldest 7 are evicted
    assert chunked.tokens_held == 14
    assert score_all(chunked, named(1, "b"), tokens(7, seed=2) + tokens(1), 7).tokens_late == 1


def test_a_sample_with_other_tokens_is_computed_again(model: PreTrainedModel) -> None:
    chunked, first, second = chunked_scorer(model), tokens(30), tokens(12) + tokens(18, seed=5)
    list(growing(chunked, named(0), first, 12))
    scores = score_all(chunked, named(0), second, 12)
    assert scores.values == score_all(chunked_scorer(model), named(0), second, 12).values
    # The prompt is reused, the completion recomputed.
    assert (scores.tokens_ahead, scores.tokens_late) == (0, 18)


def test_tokens_held_counts_the_keys_in_memory() -> None:
    chunked = chunked_scorer(frozen())
    list(growing(chunked, named(0), tokens(26), 10))
    sample = chunked._open[named(0)]
    in_memory = sum(chunk.keys[0].shape[1] for chunk in (*sample.prompt.chunks, *sample.chunks))
    assert in_memory == chunked.tokens_held == 26
