"""Samples in flight: groups, requests and counts."""

from __future__ import annotations

import pytest

from tests.doubles.samples import FIRST, GROUPS, PROMPTS, SAMPLING, make_delta, make_id, make_in_flight, make_prompts
from tidemill.controller.in_flight import plan_groups
from tidemill.controller.samples import SampleState
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, Prompt, Reward, pack_logprobs, pack_tokens


def test_deltas_of_a_returned_group_are_stale_when_its_prompt_starts_again() -> None:
    in_flight = make_in_flight()
    position, group = next(iter(in_flight.groups.items()))
    (sample, *_) = in_flight.group(position)
    in_flight.assign("a", [sample])
    earlier = make_delta(sample_id=sample.sample_id, lease_id="a", attempt=sample.attempt)
    in_flight.return_group(position)
    in_flight.open([group], [sample.prompt])
    again = in_flight.get(sample.sample_id)
    assert again is not None and again is not sample
    in_flight.assign("a", [again])
    assert again.attempt == sample.attempt + 1
    assert in_flight.apply(earlier) is None
    assert in_flight.counters.ignored["stale_attempt"] == 1


def test_samples_that_were_set_aside_do_not_count_as_unfinished() -> None:
    in_flight = make_in_flight()
    samples = list(in_flight)
    in_flight.assign("a", samples[:2])
    in_flight.set_aside(samples[1:3])  # one running, one waiting
    assert in_flight.unfinished == len(samples) - 2
    assert samples[2].ordinal not in in_flight.waiting
    in_flight.need(samples[1:3])
    assert in_flight.unfinished == len(samples)
    assert samples[2] in in_flight.take_newly_waiting()


def test_samples_are_ordered_by_group_and_epochs_are_separate_groups() -> None:
    names = [(s.sample_id.prompt_id, s.sample_id.epoch, s.sample_id.index, s.ordinal) for s in make_in_flight()]

    assert names == [
        ("p0", 0, 0, FIRST + 0),
        ("p0", 0, 1, FIRST + 1),
        ("p1", 0, 0, FIRST + 2),
        ("p1", 0, 1, FIRST + 3),
        ("p0", 1, 0, FIRST + 4),
        ("p0", 1, 1, FIRST + 5),
    ]


def test_a_prompt_twice_in_one_epoch_is_a_user_error() -> None:
    one = make_in_flight()
    with pytest.raises(UserError, match="prompt p0 occurs twice") as caught:
        one.open(plan_groups(PROMPTS[:1], first_position=12, from_version=3), make_prompts()[:1])
    assert caught.value.where == "task"


def test_the_prompt_digest_depends_on_the_tokens() -> None:
    other = Prompt(prompt_id="p0", token_ids=pack_tokens([1]), text="p0", answer="7")
    (planned,) = plan_groups([(0, other)], first_position=9, from_version=3)

    assert planned.prompt_id == GROUPS[0].prompt_id
    assert planned.prompt_digest != GROUPS[0].prompt_digest


def test_requests_are_in_group_order_and_continue_from_their_tokens() -> None:
    one = make_in_flight()
    first = one.assign("lease")
    assert [request.sample_id for request in first] == [sample.sample_id for sample in one]
    assert {(r.attempt, r.exact_version, r.lease_id, r.prefix_ids, r.sampling) for r in first} == {
        (1, 3, "lease", b"", SAMPLING)
    }
    assert one.apply(make_delta()) is next(iter(one))
    assert one.apply(make_delta(start=2, tokens=[3], finish="aborted")) is next(iter(one))

    (again,) = one.assign("other")

    assert (again.attempt, again.lease_id, again.prefix_ids) == (2, "other", pack_tokens([1, 2, 3]))


def test_a_sample_waits_until_its_version_is_recomputed() -> None:
    """After a resume a sample may have tokens of a version that was not recomputed yet."""
    one = make_in_flight()
    newer = one[make_id("p0", 0)]
    newer.extend(pack_tokens([1]), pack_logprobs([-1.0]), PolicyVersion(number=5, digest="c"))
    assert newer.min_version == 5

    assert [sample.ordinal for sample in one.take_newly_waiting()] == list(range(FIRST + 1, FIRST + 6))
    one.newest_version = 4
    assert one.take_newly_waiting() == []
    one.newest_version = 5
    assert one.take_newly_waiting() == [newer]


def test_counts_match_the_samples_states() -> None:
    one = make_in_flight()
    assert (one.running, one.unfinished, one.scored, one.all_scored) == (0, 6, 0, False)
    for request in one.assign("lease"):
        one.apply(make_delta(sample_id=request.sample_id, finish="stop"))
    assert (one.running, one.unfinished, one.counters.tokens_accepted) == (0, 0, 12)  # 6 samples of 2 tokens

    for sample in one.in_state(SampleState.FINISHED):
        one.score(sample, Reward(value=1.0))

    assert (one.scored, one.all_scored) == (6, True)


def test_oldest_version_of_a_group() -> None:
    one, ages = make_in_flight(), list[int | None]()
    first, second = one.group(9)

    def look() -> None:
        ages.append(one.oldest_version(9))

    look()  # not assigned
    one.assign("lease", [first])
    look()
    one.newest_version = 4
    one.assign("other", [second])
    look()
    one.revoke("lease")  # without a token
    look()
    one.newest_version = 5
    one.apply(make_delta(sample_id=second.sample_id, lease_id="other", version=PolicyVersion(number=5, digest="e")))
    look()  # assigned under version 4, first token by version 5
    one.revoke("other")
    look()  # its tokens are kept
    one.restart([second])
    look()
    assert ages == [None, 3, 3, 4, 5, 5, None]
    one.close(9)
    with pytest.raises(KeyError):
        one.oldest_version(9)


def test_an_ignored_delta_is_counted_and_changes_nothing() -> None:
    one = make_in_flight()
    one.assign("lease")

    one.apply(make_delta())
    assert one.apply(make_delta()) is None
    assert one.apply(make_delta(lease_id="other", start=2)) is None
    assert one.apply(make_delta(sample_id=make_id("nobody"))) is None

    assert dict(one.counters.ignored) == {"overlap": 1, "stale_lease": 1, "unknown_sample": 1}
    assert next(iter(one)).length == 2
    assert one.running == 6


@pytest.mark.parametrize(
    "broken", [make_delta(start=1), make_delta(logprobs=b""), make_delta(version=PolicyVersion(number=1, digest=""))]
)
def test_an_invalid_delta_fails_the_attempt(broken: object) -> None:
    one = make_in_flight()
    one.assign("lease")

    one.apply(broken)  # type: ignore[arg-type]

    assert (next(iter(one)).state, next(iter(one)).failures, one.running) == (SampleState.WAITING, 1, 5)
    assert "invalid delta" in next(iter(one)).last_error
    assert list(one.take_invalid_leases()) == ["lease"]
