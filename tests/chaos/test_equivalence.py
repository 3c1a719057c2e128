"""Evictions do not change results: a run whose workers vanish trains on the same tokens and gives the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.equivalent_runs import compare, digests, disturbed_run, quiet_run, tokens_by_kind
from benchmarks.saboteur import Cue, Eviction

STEPS = 4


@pytest.mark.timeout(240)
def test_evictions_do_not_change_the_weights(tmp_path: Path) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    expected, found = quiet_run(quiet, steps=STEPS), disturbed_run(disturbed, steps=STEPS)
    summary = found.summary

    # The run was disturbed while it was generating.
    assert summary["evictions"] == len(found.seen) >= 30
    assert found.seen <= {eviction.lease_id for eviction in found.evictions}

    def by(cue: Cue) -> list[Eviction]:
        return [one for one in found.evictions if one.cue == cue and (cue == "join" or one.lease_id in found.seen)]

    cut, told, pulling, joining = by("mid_tick"), by("noticed"), by("pull"), by("join")
    assert len(cut) >= 10 and len(told) >= 3 and len(pulling) >= 3 and len(joining) >= 3
    assert summary["migrations"] > 100 and summary["tokens_kept"] > 500 and summary["tokens_recomputed"] > 500
    assert min(tokens_by_kind(disturbed).values()) > 0  # both reserved and preemptible workers generated
    assert (
        expected["optimizer_steps"] == 2 * STEPS and len(set(digests(quiet))) == STEPS + 1
    )  # every step changed the weights

    # The same samples and the same weights.
    difference = compare(quiet, disturbed)
    assert difference.differing_tokens == 0
    assert difference.differing_samples == 0
    assert difference.differing_steps == 0
    assert difference.same_files
    assert summary["weights_digest"] == expected["weights_digest"]
    assert summary["eval"] == expected["eval"]

    # At most the tokens of one interrupted tick are lost per sample.
    assert [one for one in cut if not 0 < one.tokens_lost == one.tokens_of_cut_tick <= one.tick_tokens] == []
    assert [one for one in (*told, *pulling, *joining) if one.tokens_lost] == []
    # No token reported by the fleet was generated twice.
    assert sum(tokens_by_kind(disturbed).values()) == sum(tokens_by_kind(quiet).values()) == difference.tokens


@pytest.mark.timeout(240)
@pytest.mark.slow  # tests/unit/sim/test_faults.py evicts simulated workers at every lag
@pytest.mark.parametrize("lag", [2, 3])
def test_evictions_do_not_change_the_weights_with_a_policy_lag(tmp_path: Path, lag: int) -> None:
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    expected = quiet_run(quiet, steps=STEPS, lag=lag)
    found = disturbed_run(disturbed, steps=STEPS, lag=lag)

    assert found.summary["evictions"] >= 10 and found.summary["migrations"] > 20
    difference = compare(quiet, disturbed)
    assert difference.differing_tokens == difference.differing_samples == difference.differing_steps == 0
    assert difference.same_files
    assert found.summary["weights_digest"] == expected["weights_digest"]
