from __future__ import annotations

from tests.unit.cli.conftest import Run
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS


def test_everything_a_recipe_can_name_is_listed(run: Run) -> None:
    data = run("algorithms", "--json").data
    names = {kind: [row["name"] for row in rows] for kind, rows in data.items()}
    assert names["presets"] == list(PRESETS)
    assert names["corrections"] == list(CORRECTION_LIMITS)
    assert names["losses"] == ["ppo_clip", "gspo", "cispo"]
    assert "gae" in names["advantages"]
    assert names["preference"] == ["dpo", "ipo"]
    assert all(row["formula"] for kind, rows in data.items() if kind != "presets" for row in rows)


def test_defaults_are_those_that_hold_when_the_row_is_chosen(run: Run) -> None:
    data = run("algorithms", "--json").data
    rows = {row["name"]: row for kind in ("losses", "advantages", "corrections") for row in data[kind]}
    assert rows["ppo_clip"]["defaults"] == {"clip_low": 0.2, "clip_high": 0.2}
    assert rows["gspo"]["defaults"] == {"clip_low": 0.0003, "clip_high": 0.0004}
    assert rows["cispo"]["defaults"] == {"clip_high": 5.0}
    assert rows["gae"]["defaults"] == {"gamma": 1.0, "lam": 0.95}
    assert rows["grpo"]["defaults"] == {}
    assert rows["icepop"]["defaults"] == {"low": 0.5, "high": 5.0}


def test_people_get_tables(run: Run) -> None:
    out = run("algorithms").out
    for words in ("algorithm.name", "algorithm.loss", "dynamic_sampling = true", "(R - mean_G)", "2503.14476"):
        assert words in out
