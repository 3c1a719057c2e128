"""A sample's states, and the checks of deltas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.doubles.samples import SAMPLING, V3, V3_AGAIN, make_delta, make_id, make_prompt
from tidemill.controller.samples import TRANSITIONS, IllegalTransition, Sample, SampleState
from tidemill.core.records import (
    PolicyVersion,
    Reward,
    Segment,
    SourceRun,
    VersionRun,
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)


def sample() -> Sample:
    return Sample(sample_id=make_id(), ordinal=0, prompt=make_prompt("p0"), from_version=3)


def running() -> Sample:
    one = sample()
    one.assign("lease", 3)
    return one


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SampleState, SampleState)))
def test_only_legal_transitions_happen(before: SampleState, after: SampleState) -> None:
    one = sample()
    one.state = before

    if after in TRANSITIONS[before]:
        one.move(after)
        assert one.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.value} -> {after.value}"):
            one.move(after)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "applied"),
        ({"lease_id": "other"}, "stale_lease"),
        ({"attempt": 0}, "stale_attempt"),
        ({"attempt": 2}, "stale_attempt"),
        ({"start": 1}, "gap"),
        ({"logprobs": b""}, "malformed"),
        ({"token_ids": b"123", "logprobs": b"123"}, "malformed"),  # not whole tokens
        ({"version": PolicyVersion(number=2, digest="a")}, "wrong_version"),
        ({"version": V3_AGAIN}, "applied"),  # the same version, recomputed after a resume
        ({"tokens": [], "version": PolicyVersion(number=2, digest="a"), "finish": "aborted"}, "applied"),
    ],
)
def test_only_current_deltas_at_the_right_position_are_applied(changes: dict[str, Any], verdict: str) -> None:
    assert running().check(make_delta(**changes), 3) == verdict


def test_a_repeated_delta_overlaps() -> None:
    one = running()
    one.extend(pack_tokens([1, 2]), pack_logprobs([-1.0, -1.0]), V3)

    assert one.check(make_delta(), 3) == "overlap"
    assert one.check(make_delta(start=2), 3) == "applied"


def test_a_waiting_sample_accepts_no_tokens() -> None:
    assert sample().check(make_delta(), 3) == "not_running"


def test_version_and_source_runs_follow_the_tokens() -> None:
    one = running()
    for tokens, version, source in (
        ([1, 2], V3, "vllm/spot-0"),
        ([3], V3, "embedded/local"),
        ([], V3_AGAIN, "vllm/spot-1"),
        ([4], V3_AGAIN, "embedded/local"),
    ):
        one.extend(pack_tokens(tokens), pack_logprobs([-1.0] * len(tokens)), version, source)

    # two tokens and one of the same version give [0, 3); the empty delta adds nothing; the last token is [3, 4)
    assert one.versions == [VersionRun(version=V3, start=0, end=3), VersionRun(version=V3_AGAIN, start=3, end=4)]
    assert one.sources == [
        SourceRun(source="vllm/spot-0", start=0, end=2),
        SourceRun(source="embedded/local", start=2, end=4),
    ]


@pytest.mark.parametrize(
    ("finish", "error", "failures"), [("aborted", "", 0), ("aborted", "wrong", 1), ("error", "", 1)]
)
def test_an_aborted_attempt_keeps_its_tokens(finish: Any, error: str, failures: int) -> None:
    one = running()
    one.extend(pack_tokens([1]), pack_logprobs([-1.0]), V3)

    one.end_attempt(finish, error, SAMPLING)

    assert (one.state, one.length, one.failures, one.finish) == (SampleState.WAITING, 1, failures, None)
    one.assign("next", 4)
    assert one.attempt == 2


def test_without_tokens_the_assigned_version_is_the_oldest() -> None:
    one, ages = sample(), []
    ages.append(one.oldest_version)  # None: not assigned
    one.assign("lease", 5)
    ages.append(one.oldest_version)  # they may have generated tokens that were not reported
    one.extend(pack_tokens([1]), pack_logprobs([-1.0]), V3)
    ages.append(one.oldest_version)
    one.restart()
    ages.append(one.oldest_version)

    assert ages == [None, 5, 3, None]


def test_the_trajectory_starts_with_the_prompt() -> None:
    one = running()  # its prompt "p0" has two tokens: 112 and 48
    one.extend(pack_tokens([5, 6, 0]), pack_logprobs([-0.5, -1.0, -2.0]), V3)
    one.end_attempt("stop", "", SAMPLING)

    trajectory = one.trajectory(lambda _: "text")

    assert unpack_tokens(trajectory.token_ids) == [112, 48, 5, 6, 0]
    assert trajectory.segments == (
        Segment(role="prompt", start=0, end=2, trained=False),
        Segment(role="action", start=2, end=5, trained=True),
    )
    assert (trajectory.prompt_length, trajectory.completion_length, trajectory.text) == (2, 3, "text")
    assert trajectory.rollout_logprobs == pack_logprobs([-0.5, -1.0, -2.0])


V4, V5 = PolicyVersion(number=4, digest="c"), PolicyVersion(number=5, digest="d")


def test_published_logprobs_cover_the_tokens_of_that_time() -> None:
    one = running()
    one.extend(pack_tokens([5, 6]), pack_logprobs([-0.5, -1.0]), V3)
    one.extend(pack_tokens([7]), pack_logprobs([-2.0]), V4)
    one.extend(pack_tokens([8]), pack_logprobs([-4.0]), V5)
    assert [one.tokens_before(version) for version in (3, 4, 5, 6)] == [0, 2, 3, 4]
    assert unpack_tokens(one.completion(3).token_ids) == [5, 6, 7]
    assert unpack_tokens(one.completion(3).prompt_ids) == [112, 48]

    one.set_published(5, pack_logprobs([-0.125, -0.25, -0.75]))
    one.set_published(4, pack_logprobs([-0.25, -0.5]))

    # oldest version first; later tokens have their rollout logprob
    assert [unpack_logprobs(said) for said in one.publish_logprobs] == [
        [-0.25, -0.5, -2.0, -4.0],
        [-0.125, -0.25, -0.75, -4.0],
    ]


def test_a_restart_discards_published_logprobs() -> None:
    one = running()
    one.extend(pack_tokens([5]), pack_logprobs([-0.5]), V3)
    one.set_published(4, pack_logprobs([-1.0]))

    one.restart()

    assert one.publish_logprobs == ()


@pytest.mark.parametrize("said", [pack_logprobs([-1.0, -1.0]), b"123"])
def test_logprobs_of_missing_tokens_are_refused(said: bytes) -> None:
    one = running()
    one.extend(pack_tokens([5]), pack_logprobs([-0.5]), V3)
    with pytest.raises(IllegalTransition, match="bytes of logprobs for 1 tokens"):
        one.set_published(4, said)


def test_scoring_comes_after_finishing() -> None:
    one = running()
    with pytest.raises(IllegalTransition):
        one.score(Reward(value=1.0))
