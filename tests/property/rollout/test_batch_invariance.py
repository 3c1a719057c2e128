"""In batch-invariant mode tokens and logprobs of a sample are bit-identical in every batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters import adapted
from tests.engine_requests import Collected, Conversation, engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES
from tidemill.core.records import GenerateRequest, SampleId
from tidemill.hardware import engine_profile

TEXTS = [*prompts(3, length=9, shared=5), *prompts(2, length=38, shared=20), *prompts(1, length=3)]
SETTINGS = {"slots": 5, "context": 64, "batch_invariant": True}
MODELS = {**{name: build() for name, build in MODEL_SHAPES.items()}, "llama with an adapter": adapted()}
OBSERVED = [(1, 70, 32), (31, 33, 1), (33, 32, 70), (70, 1, 31)]
"""Lengths of the observations of each conversation, around a chunk of 32 tokens."""
TURN_SETTINGS = {**SETTINGS, "context": 200}
_CONVERSATIONS: dict[tuple[str, int], Conversation] = {}
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
@settings(max_examples=5)
@given(order=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=8, unique=True))
def test_samples_do_not_depend_on_the_batch(shape: str, order: list[tuple[int, int]]) -> None:
    requests = [sample(text, index) for text, index in order]
    made = finish_all(engine(MODELS[shape], **SETTINGS), requests)
    for one in requests:
        assert (made.tokens[one.sample_id], made.logprobs[one.sample_id]) == alone(shape, one)


@pytest.mark.parametrize("shape", MODELS)
@settings(max_examples=2)  # six samples, each interrupted several times
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


def observe(one: Conversation) -> bool:
    """Add the next observation; False after the last."""
    turn = len(one.observations)
    if turn == len(OBSERVED[one.index]):
        return False
    one.observe([2 + (7 * at + turn + one.index) % 120 for at in range(OBSERVED[one.index][turn])])
    return True


def replayed(shape: str, index: int) -> Conversation:
    """A conversation generated alone, each turn in a new engine, which computes all earlier tokens again."""
    if (shape, index) not in _CONVERSATIONS:
        one = Conversation(TEXTS[index], index)
        while True:
            one.take(finish_all(engine(MODELS[shape], **TURN_SETTINGS), [one.request()]))
            if not observe(one):
                break
        _CONVERSATIONS[shape, index] = one
    return _CONVERSATIONS[shape, index]


@pytest.mark.parametrize("shape", MODELS)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), parking_rows=st.sampled_from([1, 2, 16]))
def test_turns_do_not_depend_on_interruptions_and_parked_rows(
    monkeypatch: pytest.MonkeyPatch, shape: str, seed: int, parking_rows: int
) -> None:
    """Conversations beside ordinary samples, aborted in the middle of turns, and continued in the same or a new engine
    whose parked rows are sometimes overwritten."""
    monkeypatch.setattr(engine_profile, "PARKING_ROWS", parking_rows)
    monkeypatch.setattr(engine_profile, "PARKING_BYTES", 0)
    rng = random.Random(seed)
    left = [Conversation(TEXTS[index], index) for index in range(4)]
    made = list(left)
    subject = engine(MODELS[shape], **TURN_SETTINGS)
    while left:
        if rng.random() < 0.2:
            subject = engine(MODELS[shape], **TURN_SETTINGS)
        chosen = rng.sample(left, rng.randint(1, len(left)))
        requests = [each.request() for each in chosen]
        others = [sample(rng.randrange(6), index) for index in range(10, 10 + rng.randint(0, 3))]
        collected = Collected([*requests, *others])
        submitted = [*requests, *others]
        rng.shuffle(submitted)
        subject.submit(submitted)
        for _ in range(rng.choice([2, 5, 30])):
            collected.add(subject.poll(0.0))
        collected.add(subject.abort([one.sample_id for one in submitted]))
        for each in chosen:
            if each.take(collected) == "length" and not observe(each):
                left.remove(each)
    for each in made:
        alone = replayed(shape, each.index)
        assert (each.tokens, each.logprobs) == (alone.tokens, alone.logprobs)
