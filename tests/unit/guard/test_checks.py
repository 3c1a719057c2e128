"""Which samples people are asked about."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.unit.guard.test_verdicts import verdict
from tidemill.controller.entries import NEVER_PRUNED, Judged, encode
from tidemill.core.evidence import Evidence, GoldPair
from tidemill.guard.checks import agreement, candidates, chosen, read_pairs
from tidemill.guard.verdicts import sample_key
from tidemill.jobs.journal import SqliteJournal
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import write_samples


def write_run(folder: Path, rewards: dict[int, list[float]], gold: dict[int, list[float]]) -> RunDirectory:
    (folder / "samples").mkdir()
    for step, values in rewards.items():
        lines = [
            {"step": step, "prompt_id": f"p{at}", "completion": "x", "reward": reward, "valid": True}
            | ({"components": {"judge": gold[step][at]}} if step in gold else {})
            for at, reward in enumerate(values)
        ]
        write_samples(folder / "samples" / samples_name(step), [*lines, {"step": step, "valid": False}])
        write_samples(folder / "samples" / samples_name(step, "eval:held_out"), lines)
    return RunDirectory(folder)


def test_disagreement_comes_first_then_high_and_low_rewards_of_all_steps(tmp_path: Path) -> None:
    # Ranks of the reward: 0 → 0.25, 1 → 0.75. In step 2 gold is 1, 0 and six times 0.5, with the ranks 0.94, 0.06 and
    # 0.5: the first two samples are 0.69 away from their gold, the others 0.25.
    rewards = {step: [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0] for step in (1, 2, 3)}
    run = write_run(tmp_path, rewards, {2: [1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]})
    found = candidates(run, ["judge"], [])
    assert len(found) == 24
    assert Counter(each.stratum for each in found) == {"disagreement": 2, "high reward": 11, "low reward": 11}
    first = chosen(found, (), 8)
    places = [(each.stratum, each.sample.step) for each in first]
    assert places[:4] == [("disagreement", 2), ("high reward", 3), ("disagreement", 2), ("low reward", 3)]
    assert Counter(places)["high reward", 2] == Counter(places)["high reward", 1] == 1  # one of each step
    judged = {sample_key(each.sample) for each in first}
    second = chosen(found, judged, 100)
    assert len(second) == 16
    assert judged.isdisjoint(sample_key(each.sample) for each in second)
    assert chosen(found, (), 8) == first


def test_scores_of_the_guard_tell_disagreement_too(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: [0.0, 1.0, 0.0, 1.0]}, {})
    golds = {1: 0.0, 2: 0.0, 3: 1.0}  # ranks 1/3, 1/3, 5/6; of the rewards 3/4, 1/4, 3/4
    pairs = [GoldPair(prompt_id=f"p{at}", index=0, step=1, proxy=0.0, gold=gold) for at, gold in golds.items()]
    canary = GoldPair(prompt_id="p0", index=0, step=1, proxy=0.0, gold=1.0, source="canary")
    found = {each.sample.prompt_id: each.stratum for each in candidates(run, [], [*pairs, canary])}
    assert found == {"p0": "low reward", "p1": "disagreement", "p2": "low reward", "p3": "high reward"}


def test_of_a_long_run_some_steps_are_read_the_newest_included(tmp_path: Path) -> None:
    run = write_run(tmp_path, {step: [0.0] for step in range(1, 201)}, {})
    steps = [each.sample.step for each in candidates(run, [], [])]
    assert len(steps) == 40
    assert max(steps) == 200
    assert min(steps) <= 5


def test_agreement_of_verdicts_with_the_halves_of_the_reward() -> None:
    # high rewards: 1, 0, 0 accepted; low ones: 0 and 1: they agree on the first, and on one of the two low ones
    verdicts = [
        verdict(reward=reward, verdict=accepted)
        for reward, accepted in ((0.9, 1.0), (0.8, 0.0), (0.6, 0.0), (0.1, 0.0), (0.2, 1.0))
    ]
    found = agreement(verdicts, [0.0, 1.0])
    assert found["people accept"].value == pytest.approx(2 / 5)
    assert found["with a high reward:"].value == pytest.approx(1 / 3)
    assert found["with a low reward:"].value == pytest.approx(1 / 2)
    assert found["reward and people agree on"].value == pytest.approx(2 / 5)
    assert found["reward and people agree on"].low == pytest.approx(
        0.118, abs=1e-3
    )  # Wilson's interval of 2 of 5: 0.118 to 0.769
    assert found["reward and people agree on"].high == pytest.approx(0.769, abs=1e-3)


async def test_the_scores_of_a_guard_are_read_beside_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    assert read_pairs(path) == []
    pairs = [GoldPair(prompt_id="p", index=0, step=step, proxy=1.0, gold=0.0) for step in (1, 2)]
    seen = [Evidence(step=pair.step, proxy_mean=0.5, proxy_spread=0.1, samples=4, pairs=(pair,)) for pair in pairs]
    journal = await SqliteJournal.open(path)
    await journal.append([(1, b"samples"), *((NEVER_PRUNED, encode(Judged(each))) for each in seen)])
    assert read_pairs(path) == pairs
    await journal.close()
    assert read_pairs(path) == pairs


def test_a_damaged_journal_has_no_scores(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"garbage")
    assert read_pairs(tmp_path / "ledger.sqlite") == []
