"""What is kept of the RLHF recipe's seeds, and the interval of pairs that come in questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks import rlhf
from benchmarks.rlhf_runs import CURVES, Change, Pairs, RlhfRun, over_questions


def change(before: float, after: float, p_value: float = 0.01) -> Change:
    return Change(n=39, before=before, after=after, low=0.1, high=0.5, p_value=p_value)


def made(seed: int, **changes: object) -> RlhfRun:
    plain = RlhfRun(
        seed=seed,
        minutes=6.0,
        cpu_minutes=5.0,
        stage_s={"ppo": 120.0},
        peak_rss_bytes=4_000_000_000,
        pairs=Pairs(pairs=200, questions=35, accuracy=0.8, low=0.7, high=0.9),
        score=change(0.1, 0.5),
        accuracy=change(0.3, 0.7),
        drawn=change(0.3, 0.6),
        first=dict.fromkeys(CURVES, 0.5),
        last=dict.fromkeys(CURVES, 0.25),
        curves={name: {1: 0.5, 2: 0.25} for name in CURVES},
        held_out={0: 0.3, 20: 0.7},
    )
    return msgspec.structs.replace(plain, **changes)


def test_pairs_of_one_question_are_resampled_together() -> None:
    # Three questions of 10 pairs each: one all right, one all wrong, one half: a resample has 0, 1/6, ... 1 of them.
    outcomes = [(question, place < right) for question, right in (("a", 10), ("b", 0), ("c", 5)) for place in range(10)]
    found = over_questions(outcomes)
    assert found.value == 0.5
    # All three draws the same question happens in 1 of 27, so that both extremes lie within 2.5 %.
    assert (found.low, found.high) == (0.0, 1.0)
    # As pairs by themselves, 15 of 30 would have about 0.33-0.67.
    alone = over_questions([(str(number), right) for number, (_, right) in enumerate(outcomes)])
    assert 0.25 < alone.low < 0.4 < 0.6 < alone.high < 0.75


def test_every_seed_must_reach_every_aim() -> None:
    assert all(rlhf.verdict([made(0), made(1)]).values())
    for worse, aim in (
        (made(1, cpu_minutes=20.5), "at most 20 minutes of CPU"),
        (made(1, pairs=msgspec.structs.replace(made(1).pairs, accuracy=0.79)), "reward model right on 0.8 of pairs"),
        (made(1, score=change(0.5, 0.1)), "reward-model score rises"),
        (made(1, drawn=change(0.3, 0.3)), "true accuracy of samples rises"),
    ):
        assert [name for name, reached in rlhf.verdict([made(0), worse]).items() if not reached] == [aim]


def test_a_significant_rise_is_recognised() -> None:
    runs = [made(0), made(1, accuracy=change(0.3, 0.4, p_value=0.06), score=change(0.5, 0.1))]
    assert rlhf.beyond_chance(runs) == {
        "reward-model score": 1,
        "true greedy accuracy": 1,
        "true accuracy of samples": 2,
    }


def test_only_seeds_of_this_recipe_that_are_missing_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlhf, "RESULTS", tmp_path)
    monkeypatch.setattr(rlhf, "_recipe", lambda: "one")
    ran: list[int] = []

    def run(seed: int) -> RlhfRun:
        ran.append(seed)
        if ran == [2]:  # another call that is running meanwhile adds its own
            write([made(7)])
        return made(seed)

    def write(runs: Sequence[RlhfRun]) -> None:
        content = {"recipe": "one", "runs": [msgspec.to_builtins(one, str_keys=True) for one in runs]}
        (tmp_path / "rlhf.json").write_bytes(msgspec.json.encode(content))

    found = rlhf.measured([2, 0], again=False, run=run, write=write)
    assert found == [made(0), made(2), made(7)]
    rlhf.measured([0, 1], again=False, run=run, write=write)
    assert ran == [2, 0, 1]
    monkeypatch.setattr(rlhf, "_recipe", lambda: "another")
    assert rlhf.earlier_runs() == []
