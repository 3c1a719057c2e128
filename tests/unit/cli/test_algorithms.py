from __future__ import annotations

from typing import get_args

from tests.unit.cli.conftest import Run
from tidemill.algos.losses import TERMS
from tidemill.config.algorithm import CORRECTION_LIMITS, PRESETS, AlgorithmConfig, NormalizeName


def test_everything_a_recipe_can_name_is_listed(run: Run) -> None:
    data = run("algorithms", "--json").data
    names = {kind: [row["name"] for row in rows] for kind, rows in data.items()}
    assert names["presets"] == list(PRESETS)
    assert names["corrections"] == list(CORRECTION_LIMITS)
    assert names["losses"] == ["ppo_clip", "gspo", "cispo"]
    assert "gae" in names["advantages"]
    assert {"outcome", *names["credits"]} == set(get_args(AlgorithmConfig.model_fields["credit"].annotation))
    assert names["preference"] == ["dpo", "ipo"]
    assert names["normalize"] == list(get_args(NormalizeName))
    assert names["kl"] == ["loss", "reward", "kl_target", "kl_stop"]
    assert names["value"] == ["value_clip", "normalize"]
    assert names["shaping"] == ["overlong", "entropy_bonus"]
    assert names["supervised"] == ["sft", "reward_model"]
    assert all(row["source"] for rows in data.values() for row in rows)
    assert all(row["formula"] for kind, rows in data.items() if kind != "presets" for row in rows)


def test_defaults_are_those_that_hold_when_the_row_is_chosen(run: Run) -> None:
    data = run("algorithms", "--json").data
    rows = {row["name"]: row for kind in ("losses", "advantages", "corrections", *TERMS) for row in data[kind]}
    assert rows["ppo_clip"]["defaults"] == {"clip_low": 0.2, "clip_high": 0.2}
    assert rows["gspo"]["defaults"] == {"clip_low": 0.0003, "clip_high": 0.0004}
    assert rows["cispo"]["defaults"] == {"clip_high": 5.0}
    assert rows["gae"]["defaults"] == {"gamma": 1.0, "lam": 0.95}
    assert rows["grpo"]["defaults"] == {}
    assert rows["reward_model"]["defaults"] == {"centring": 0.01}
    assert rows["value_clip"]["defaults"] == {"value_clip": 0.2, "value_coefficient": 0.5}
    assert rows["overlong"]["defaults"] == {"overlong_buffer_tokens": 0}
    assert rows["kl_stop"]["defaults"] == {}
    assert {row["name"]: row["defaults"] for row in data["credits"]} == {
        "turn_returns": {"turn_gamma": 0.95},
        "gigpo": {"turn_gamma": 0.95, "step_weight": 1.0},
    }
    assert rows["icepop"]["defaults"] == {"low": 0.5, "high": 5.0}


def test_people_get_tables(run: Run) -> None:
    out = run("algorithms").out
    for words in (
        "algorithm.name",
        "algorithm.loss",
        "dynamic_sampling = true",
        "(R - mean_G)",
        "2505.10978",
        "2503.14476",
        "overlong_buffer_tokens = 0",
        "PopArt",
    ):
        assert words in out
