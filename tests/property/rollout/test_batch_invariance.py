"""In batch-invariant mode tokens and logprobs of a sample are bit-identical in every batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters import adapted
from tests.engine_requests import Collected, engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES
from tidemill.core.records import GenerateRequest, SampleId

TEXTS = [*prompts(3, length=9, shared=5), *prompts(2, length=38, shared=20), *prompts(1, length=3)]
SETTINGS = {"slots": 5, "context": 64, "batch_invariant": True}
MODELS = {**{name: build() for name, build in MODEL_SHAPES.items()}, "llama with an adapter": adapted()}
_ALONE: dict[tuple[str, SampleId], tuple[list[int], list[float]]] = {}


def sample(text: int, index: int, prefix: list[int] | None = None) -> GenerateRequest:
    return request(TEXTS[text], index=index, prefix=prefix or [], max_new_tokens=10)


def alone(shape: str, one: GenerateRequest) -> tuple[list[int], list[float]]:
    """The sample generated alone and without interruption."""
    if (shape, one.sample_id) not in _ALONE:
        made = finish_all(engine(MODELS[shape], **SETTINGS), [one])
        _ALONE[shape, one.sample_id] = (made.tokens[one.sample_id], made.logprobs[one.sample_id])
    return _ALONE[shape, one.sample_id]


@pytest.mark.parametrize("shape", MODELS)
@settings(max_examples=15)
@given(order=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=8, unique=True))
def test_samples_do_not_depend_on_the_batch(shape: str, order: list[tuple[int, int]]) -> None:
    requests = [sample(text, index) for text, index in order]
    made = finish_all(engine(MODELS[shape], **SETTINGS), requests)
    for one in requests:
        assert (made.tokens[one.sample_id], made.logprobs[one.sample_id]) == alone(shape, one)


@pytest.mark.parametrize("shape", MODELS)
@settings(max_examples=8)  # six samples, each interrupted several times
@given(seed=st.integers(0, 10**6))
def test_samples_do_not_depend_on_interruptions_and_engines(shape: str, seed: int) -> None:
    """Samples are interrupted at random points and continued in a new engine with other samples, several times."""
    rng = random.Random(seed)
    chosen = rng.sample([(text, index) for text in range(6) for index in range(3)], 6)
    tokens: dict[SampleId, list[int]] = {}
    logprobs: dict[SampleId, list[float]] = {}
    left = list(chosen)
    while left:
        rng.shuffle(left)
        subject = engine(MODELS[shape], **SETTINGS)
        requests = [sample(t, i, tokens.get(sample(t, i).sample_id)) for t, i in left]
        made = Collected()
        for one in requests:
            made.tokens[one.sample_id] = list(tokens.get(one.sample_id, []))
        subject.submit(requests)
        for _ in range(rng.randint(1, 9)):
            made.add(subject.poll(0.0))
        tokens |= made.tokens
        for sample_id, values in made.logprobs.items():
            logprobs.setdefault(sample_id, []).extend(values)
        left = [(t, i) for t, i in left if sample(t, i).sample_id not in made.finish]
    for text, index in chosen:
        one = sample(text, index)
        assert (tokens[one.sample_id], logprobs[one.sample_id]) == alone(shape, one)
