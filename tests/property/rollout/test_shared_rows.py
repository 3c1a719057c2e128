"""Samples that share rows of the cache get the tokens that they get alone, whatever joins, leaves or is loaded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_requests import VERSION, Collected, engine, finish_all, prompts, request
from tests.model_shapes import MODEL_SHAPES
from tests.torch_kernels import TORCH_KERNELS
from tidemill.rollout.engines.embedded.static_decode import StepKernels


@pytest.mark.parametrize("kernels", [None, TORCH_KERNELS], ids=["packed", "static"])
@pytest.mark.parametrize("shape", MODEL_SHAPES)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_siblings_get_what_they_get_alone(shape: str, kernels: StepKernels | None, seed: int) -> None:
    dice, model = random.Random(seed), MODEL_SHAPES[shape]()
    texts = prompts(3, length=dice.randint(4, 14), shared=dice.randint(0, 3), seed=seed % 5)
    requests = [
        request(text, index=index, temperature=dice.choice([0.0, 0.1, 0.5]), max_new_tokens=dice.randint(1, 14))
        for text in texts
        for index in range(7)
    ]
    waiting, made, aborted = dice.sample(requests, len(requests)), Collected(), set()
    subject = engine(
        model,
        slots=dice.randint(2, 8),
        prefill_chunk_tokens=dice.choice([4, 16, 512]),
        keep_cache=dice.random() < 0.5,
        kernels=kernels,
    )
    while waiting or subject.status().running or subject.status().queued:
        if waiting and dice.random() < 0.6:
            count = dice.randint(1, 5)
            subject.submit(waiting[:count])
            del waiting[:count]
        if dice.random() < 0.1:
            subject.load(VERSION)
        if dice.random() < 0.15:
            one = dice.choice(requests)
            if one not in waiting and one.sample_id not in made.finish:
                aborted.add(one.sample_id)
                made.add(subject.abort([one.sample_id]))
        made.add(subject.poll(0.0))
    for one in requests:
        alone = finish_all(engine(model, slots=1), [one]).tokens[one.sample_id]
        found = made.tokens[one.sample_id]
        assert found == (alone[: len(found)] if one.sample_id in aborted else alone)
