"""Which samples people are asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.controller.entries import NEVER_PRUNED, Judged, encode
from tidemill.core.evidence import Evidence, GoldPair
from tidemill.guard.checks import chosen, read_pairs, strata
from tidemill.guard.verdicts import sample_key
from tidemill.jobs.journal import SqliteJournal
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import write_samples


def write_run(folder: Path, rewards: dict[int, list[float]]) -> RunDirectory:
    (folder / "samples").mkdir()
    for step, values in rewards.items():
        lines = [
            {"step": step, "prompt_id": f"p{at}", "completion": "x", "reward": reward, "valid": True}
            for at, reward in enumerate(values)
        ]
        write_samples(folder / "samples" / samples_name(step), [*lines, {"step": step, "valid": False}])
        write_samples(folder / "samples" / samples_name(step, "eval:held_out"), lines)
    return RunDirectory(folder)


def pair(step: int, at: int, gold: float, **fields: Any) -> GoldPair:
    return GoldPair(prompt_id=f"p{at}", index=0, step=step, proxy=0.0, gold=gold, **fields)


def test_samples_on_which_reward_and_gold_disagree_take_turns_with_high_and_low_rewards(tmp_path: Path) -> None:
    # Ranks of the reward: 0 → 0.25, 1 → 0.75. In step 2 gold is 1, 0 and six times 0.5, with the ranks 0.94, 0.06 and
    # 0.5: the first two samples are 0.69 away from their gold, the others 0.25.
    run = write_run(tmp_path, {step: [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0] for step in (1, 2, 3)})
    pairs = [pair(2, at, gold) for at, gold in enumerate([1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])]
    samples = strata(run, [*pairs, pair(1, 0, 1.0, source="canary")])
    assert {(sample.step, sample.prompt_id) for sample in samples[0]} == {(2, "p0"), (2, "p1")}
    assert [[sample.reward for sample in stratum] for stratum in samples[1:]] == [[1.0] * 11, [0.0] * 11]
    first = chosen(samples, ())[:8]
    assert first == [samples[turn][at] for turn, at in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2))]
    assert {sample.step for sample in first} == {1, 2, 3}
    judged = {sample_key(sample) for sample in first}
    second = chosen(samples, judged)[:100]
    assert len(second) == 16
    assert judged.isdisjoint(sample_key(sample) for sample in second)
    assert strata(run, pairs) == samples


def test_of_a_long_run_some_steps_are_read_the_newest_included(tmp_path: Path) -> None:
    run = write_run(tmp_path, {step: [0.0] for step in range(1, 201)})
    steps = [sample.step for stratum in strata(run, []) for sample in stratum]
    assert len(steps) == 40
    assert max(steps) == 200
    assert min(steps) <= 5


async def test_the_scores_of_a_guard_are_read_beside_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    assert read_pairs(path) == []
    pairs = [pair(step, 0, 0.0) for step in (1, 2)]
    seen = [Evidence(step=each.step, proxy_mean=0.5, proxy_spread=0.1, samples=4, pairs=(each,)) for each in pairs]
    journal = await SqliteJournal.open(path)
    await journal.append([(1, b"samples"), *((NEVER_PRUNED, encode(Judged(each))) for each in seen)])
    assert read_pairs(path) == pairs
    await journal.close()
    assert read_pairs(path) == pairs


def test_a_damaged_journal_has_no_scores(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"garbage")
    assert read_pairs(tmp_path / "ledger.sqlite") == []
