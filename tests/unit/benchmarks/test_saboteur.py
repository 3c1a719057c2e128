"""The saboteur's own arithmetic: several engine steps are one tick, and the last one ends where it should."""

from __future__ import annotations

import pytest

from benchmarks.saboteur import CutEngine
from tests.doubles.engine import FakeEngine
from tidemill.core.records import GenerateRequest, PolicyVersion, SampleId, SamplingParams, count, pack_tokens

VERSION = PolicyVersion(number=0, digest="zero")


def request(index: int) -> GenerateRequest:
    return GenerateRequest(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=index),
        lease_id="lease",
        attempt=1,
        prompt_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(max_new_tokens=9),
        exact_version=0,
    )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(VERSION, slots=2, per_poll=1)


def test_a_tick_is_so_many_steps_and_one_delta_a_sample(engine: FakeEngine) -> None:
    ticking = CutEngine(engine, steps=3, cut_step=1, due=lambda: False, cut=lambda: pytest.fail("nothing was due"))
    ticking.submit([request(0), request(1)])
    first, second = ticking.poll(0.1), ticking.poll(0.1)
    assert [(delta.start, count(delta.token_ids)) for delta in first] == [(0, 3), (0, 3)]
    assert [(delta.start, count(delta.token_ids)) for delta in second] == [(3, 3), (3, 3)]
    assert (ticking.ticks, ticking.made, ticking.made_before) == (2, 12, 12)


def test_it_is_cut_in_the_middle_of_the_tick_that_is_due(engine: FakeEngine) -> None:
    cut: list[int] = []
    ticking = CutEngine(
        engine,
        steps=3,
        cut_step=2,
        due=lambda: ticking.ticks == 2,
        cut=lambda: cut.append(ticking.made - ticking.made_before),
    )
    ticking.submit([request(0), request(1)])
    ticking.poll(0.1)
    assert cut == []
    ticking.poll(0.1)
    assert cut == [4]  # two steps of two samples; the third was never made
