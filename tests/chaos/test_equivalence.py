"""Whichever workers vanish, whenever: the run learns from the very same tokens and ends with the very same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.equivalent_runs import compare, digests, disturbed_run, quiet_run, tokens_by_kind
from benchmarks.saboteur import Cue, Eviction

STEPS = 5


@pytest.mark.timeout(240)
def test_a_run_whose_workers_vanish_learns_the_very_same(tmp_path: Path) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    expected, found = quiet_run(quiet, steps=STEPS), disturbed_run(disturbed, steps=STEPS)
    summary = found.summary

    # It was disturbed, and in the middle of things.
    assert summary["evictions"] == len(found.seen) >= 50
    assert found.seen <= {eviction.lease_id for eviction in found.evictions}

    def by(cue: Cue) -> list[Eviction]:
        return [one for one in found.evictions if one.cue == cue and (cue == "join" or one.lease_id in found.seen)]

    cut, told, pulling, joining = by("mid_tick"), by("noticed"), by("pull"), by("join")
    assert len(cut) >= 10 and len(told) >= 3 and len(pulling) >= 3 and len(joining) >= 3
    assert summary["migrations"] > 100 and summary["tokens_kept"] > 500 and summary["tokens_recomputed"] > 500
    assert min(tokens_by_kind(disturbed).values()) > 0  # the reserved side took part, and so did the others
    assert expected["optimizer_steps"] == 2 * STEPS and len(set(digests(quiet))) == STEPS + 1  # it learned all along

    # It learned from the same, and the same.
    difference = compare(quiet, disturbed)
    assert difference.differing_tokens == 0
    assert difference.differing_samples == 0
    assert difference.differing_steps == 0
    assert difference.same_files
    assert summary["weights_digest"] == expected["weights_digest"]
    assert summary["eval"] == expected["eval"]

    # Nothing was lost but what nobody could have kept: the tick that was cut, and never more than one.
    assert [one for one in cut if not 0 < one.tokens_lost == one.tokens_of_cut_tick <= one.tick_tokens] == []
    assert [one for one in (*told, *pulling, *joining) if one.tokens_lost] == []
    # What the fleet had was trained on: no token was made twice for want of the first.
    assert sum(tokens_by_kind(disturbed).values()) == sum(tokens_by_kind(quiet).values()) == difference.tokens


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lag", [2, 3])
def test_ahead_of_training_it_learns_the_very_same_when_publishes_wait(tmp_path: Path, lag: int) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    expected = quiet_run(quiet, steps=STEPS, lag=lag)
    found = disturbed_run(disturbed, steps=STEPS, lag=lag)

    assert found.summary["evictions"] >= 10 and found.summary["migrations"] > 20
    difference = compare(quiet, disturbed)
    assert difference.differing_tokens == difference.differing_samples == difference.differing_steps == 0
    assert difference.same_files
    assert found.summary["weights_digest"] == expected["weights_digest"]
