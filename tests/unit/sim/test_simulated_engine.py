"""The simulated engine against arithmetic done by hand, and against an engine that decodes step by step."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.doubles.completions import EncodedCompletions
from tests.doubles.costs import ConstantEngine
from tests.doubles.samples import make_id
from tidemill.core.records import (
    GenerateRequest,
    PolicyVersion,
    SampleId,
    SamplingParams,
    TokenDelta,
    count,
    pack_tokens,
)
from tidemill.sim.simulated_engine import SimulatedEngine
from tidemill.sim.workload import BlankCompletions

V0, V1 = PolicyVersion(number=0, digest="a"), PolicyVersion(number=1, digest="b")
COSTS = ConstantEngine(slots=2, plateau=1, step_s=0.1, prefill_tokens_per_s=100.0)


def request(index: int, *, prompt: int = 10, prefix: int = 0, limit: int = 50, **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        sample_id=make_id(f"p{index}", index),
        lease_id="lease",
        attempt=1,
        prompt_ids=pack_tokens([1] * prompt),
        prefix_ids=pack_tokens([1] * prefix),
        sampling=SamplingParams(max_new_tokens=limit),
        **changes,
    )


def engine(lengths: dict[int, int], **settings: Any) -> SimulatedEngine:
    made = SimulatedEngine(COSTS, BlankCompletions(lambda sample_id: lengths[sample_id.index]), now_s=0.0, **settings)
    made.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    return made


def told(deltas: list[TokenDelta]) -> list[tuple[int, int, int, str | None]]:
    """Sample, first token, tokens and end of each."""
    return [(delta.sample_id.index, delta.start, count(delta.token_ids), delta.finish) for delta in deltas]


def test_samples_finish_after_their_tokens() -> None:
    one = engine({0: 3, 1: 5, 2: 2})
    one.submit([request(0), request(1), request(2)], 0.0)
    # Two prompts of 10 tokens take 0.2 s; then 3 steps of 0.2 s (2 samples, plateau 1) end the first.
    assert one.next_change_s() == pytest.approx(0.2 + 3 * 0.2)
    one.advance(0.79)
    assert (one.ended, one.running, one.queued) == (False, 2, 1)
    one.advance(0.8)
    assert told(one.take_ended()) == [(0, 0, 3, "stop")]
    # The third comes in at once: 0.1 s for its prompt, and both have 2 tokens left: 0.4 s.
    assert one.next_change_s() == pytest.approx(0.8 + 0.1 + 0.4)
    one.advance(2.0)
    assert sorted(told(one.take_ended())) == [(1, 0, 5, "stop"), (2, 0, 2, "stop")]
    assert (one.generated, one.prefilled, one.next_change_s()) == (10, 30, math.inf)


def test_a_recalled_sample_has_its_whole_steps() -> None:
    one = engine({0: 30})
    one.submit([request(0, prefix=4)], 0.0)  # 14 tokens to compute: 0.14 s
    one.abort([request(0).sample_id], 0.14 + 0.1 * 7.5)
    assert told(one.take_ended()) == [(0, 4, 7, "aborted")]
    assert one.running == 0


def test_max_tokens_truncates_and_siblings_share_their_prompt() -> None:
    one = engine({0: 30, 1: 30})
    sibling = msgspec.structs.replace(request(0, limit=2), sample_id=make_id("p0", 1))
    one.submit([request(0, limit=2), sibling], 0.0)
    one.advance(9.0)
    assert told(one.take_ended()) == [(0, 0, 2, "length"), (1, 0, 2, "length")]
    assert (one.prefilled, one.reused) == (10, 10)


def test_weights_are_swapped_between_two_tokens() -> None:
    one = engine({0: 10})
    one.submit([request(0)], 0.0)
    one.load(V1, computes_with=V1, swap_s=0.5, now_s=0.1 + 0.4)
    # 4 tokens under the old weights; then 0.5 s, and 14 tokens computed again: 0.14 s; then 6 more steps.
    assert [(delta.start, count(delta.token_ids), delta.version) for delta in one.take_ended()] == [(0, 4, V0)]
    assert one.next_change_s() == pytest.approx(0.5 + 0.5 + 0.14 + 0.6)
    one.advance(3.0)
    assert [(delta.start, count(delta.token_ids), delta.version) for delta in one.take_ended()] == [(4, 6, V1)]


def test_a_kept_cache_is_not_computed_again() -> None:
    one = engine({0: 10, 1: 10}, keep_cache=True)
    one.submit([request(0)], 0.0)
    one.load(V1, computes_with=V1, swap_s=0.5, now_s=0.1 + 0.4)
    # As above, without the 0.14 s.
    assert one.next_change_s() == pytest.approx(0.5 + 0.5 + 0.6)
    one.submit([msgspec.structs.replace(request(0), sample_id=make_id("p0", 1))], 1.0)
    assert (one.prefilled, one.reused) == (20, 0)  # a new sample computes the prompt again


def test_exact_version_mismatch_is_refused_and_min_version_waits() -> None:
    one = engine({0: 2, 1: 2})
    one.submit([request(0, exact_version=7), request(1, min_version=1)], 0.0)
    one.advance(9.0)
    (refused,) = one.take_ended()
    assert (refused.finish, refused.error) == ("aborted", "request needs version 7, engine has 0")
    assert (one.running, one.queued) == (0, 1)
    one.load(V1, computes_with=V1, swap_s=0.0, now_s=9.0)
    one.advance(10.0)
    assert told(one.take_ended()) == [(1, 0, 2, "stop")]


def stepwise(lengths: list[int], *, until: int) -> list[int]:
    """Tokens of each sample after so many steps of an engine with 2 slots that decodes one step after another."""
    have, order = [0] * len(lengths), list(range(len(lengths)))
    for _ in range(until):
        running = [at for at in order if have[at] < lengths[at]][:2]
        for at in running:
            have[at] += 1
    return have


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), steps=st.integers(0, 30), looks=st.integers(1, 7))
def test_the_event_driven_engine_equals_a_stepwise_one(lengths: list[int], steps: int, looks: int) -> None:
    free = ConstantEngine(slots=2, plateau=8, step_s=0.1, prefill_tokens_per_s=math.inf)
    completions = BlankCompletions(lambda sample_id: lengths[sample_id.index])
    one = SimulatedEngine(free, completions, now_s=0.0)
    one.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    one.submit([request(index) for index in range(len(lengths))], 0.0)
    now_s = steps * 0.1 + 0.05
    for look in range(1, looks + 1):
        one.advance(now_s * look / looks)
    have = [0] * len(lengths)
    for delta in [*one.take_ended(), *one.flush(now_s)]:
        have[delta.sample_id.index] += count(delta.token_ids)

    assert have == stepwise(lengths, until=steps)


def test_tokens_encode_sample_position_and_version() -> None:
    says = EncodedCompletions(40)
    one, other = make_id("p0", 0), make_id("p0", 1)

    def tokens(sample_id: SampleId, version: PolicyVersion, start: int, end: int) -> bytes:
        return says.tokens(sample_id, version, start, end)[0]

    assert tokens(one, V0, 0, 9) == tokens(one, V0, 0, 4) + tokens(one, V0, 4, 9)
    assert len({tokens(one, V0, 0, 4), tokens(other, V0, 0, 4), tokens(one, V1, 0, 4), tokens(one, V0, 4, 8)}) == 4
    assert says.tokens(one, V0, 0, 4)[1] != tokens(one, V0, 0, 4)


def full_engine(lengths: dict[int, int], *, cache: float) -> SimulatedEngine:
    costs = msgspec.structs.replace(COSTS, plateau=2, cache_tokens=cache)
    made = SimulatedEngine(costs, BlankCompletions(lambda sample_id: lengths[sample_id.index]), now_s=0.0)
    made.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    return made


def test_a_full_cache_preempts_the_newest_samples() -> None:
    one = full_engine({0: 10, 1: 10}, cache=30)
    one.submit([request(0), request(1)], 0.0)
    # Two prompts of 10 tokens take 0.2 s. The cache has 10 tokens left: 5 steps of 0.1 s for both, at 0.7 s it is full.
    assert one.next_change_s() == pytest.approx(0.7)
    one.advance(0.7)
    assert (one.running, one.queued, one.put_back, one.recomputed) == (1, 1, 1, 15)
    assert told(one.take_ended()) == [(1, 0, 5, None)]
    # The first goes on alone to its end, 5 steps later; then the other's 15 tokens are computed again, 0.15 s, and
    # its last 5 tokens are decoded.
    assert one.next_change_s() == pytest.approx(1.2)
    one.advance(1.2 + 0.15 + 0.5)
    assert told(one.take_ended()) == [(0, 0, 10, "stop"), (1, 5, 5, "stop")]
    assert (one.generated, one.prefilled) == (20, 30)


def test_admission_waits_for_cache() -> None:
    one = full_engine({0: 4, 1: 4}, cache=20)
    one.submit([request(0), request(1)], 0.0)
    # 10 + 10 tokens would fill it to the last one, and 1 % is to be left.
    assert (one.running, one.queued) == (1, 1)
    one.advance(0.1 + 0.4 + 0.1 + 0.4)
    assert told(one.take_ended()) == [(0, 0, 4, "stop"), (1, 0, 4, "stop")]
    assert one.put_back == 0


def test_a_preempted_sample_can_be_recalled() -> None:
    one = full_engine({0: 10, 1: 10}, cache=30)
    one.submit([request(0), request(1)], 0.0)
    one.advance(0.8)
    one.abort([request(1).sample_id], 0.8)
    assert told(one.take_ended()) == [(1, 0, 5, None), (1, 5, 0, "aborted")]
    assert (one.running, one.queued) == (1, 0)


def test_a_paused_engine_starts_no_sample() -> None:
    one = engine({0: 3})
    one.pause(1.0)
    one.submit([request(0)], 2.0)
    assert (one.running, one.queued, one.next_change_s()) == (0, 1, math.inf)
    one.resume(5.0)
    assert one.next_change_s() == pytest.approx(5.0 + 0.1 + 0.3)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    cache=st.integers(41, 90),
    looks=st.lists(st.floats(0, 1), max_size=5),
)
def test_every_token_is_reported_once_for_any_cache_size(lengths: list[int], cache: int, looks: list[float]) -> None:
    costs = msgspec.structs.replace(COSTS, slots=4, cache_tokens=float(cache))  # the longest sample is 40 tokens
    one = SimulatedEngine(costs, BlankCompletions(lambda sample_id: lengths[sample_id.index]), now_s=0.0)
    one.load(V0, computes_with=V0, swap_s=0.0, now_s=0.0)
    one.submit([request(index) for index in range(len(lengths))], 0.0)
    for share in sorted(looks):
        one.advance(share * 60.0)
        held = one._context
        assert held <= cache or one.running == 1
    one.advance(1000.0)
    have, ends = [0] * len(lengths), 0
    for delta in one.take_ended():
        assert delta.start == have[delta.sample_id.index]
        have[delta.sample_id.index] += count(delta.token_ids)
        ends += delta.finish == "stop"
    assert (have, ends, one.generated) == (lengths, len(lengths), sum(lengths))
