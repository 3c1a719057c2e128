from __future__ import annotations

from typing import Any

import pytest

from benchmarks.demo_compare import (
    ALONE,
    DEMO,
    RECIPE,
    RESERVED,
    RESERVED_USD_PER_HOUR,
    RUNS,
    check_runs,
    result_of,
    title_of,
)
from tidemill.config.pipeline import PipelineSpec, load_recipe


def summary(evictions: int = 0, tokens: int = 1000, steps: int = 15) -> dict[str, Any]:
    return {
        "steps": steps,
        "optimizer_steps": steps,
        "eval": {"n": 48},
        "tokens_generated": tokens,
        "evictions": evictions,
    }


def row(name: str, wall_s: float, usd: float) -> dict[str, Any]:
    curve = [{"step": 0, "accuracy": 0.2}, {"step": 15, "accuracy": 0.8}]
    return {
        "run": name,
        "seed": 0,
        "wall_s": wall_s,
        "cost_usd": usd,
        "reserved_only_usd": usd,
        "evictions": 1,
        "curve": curve,
    }


def test_the_runs_differ_only_in_their_machines() -> None:
    recipes = {name: load_recipe([f"@{RECIPE}", *arguments]) for name, arguments in RUNS.items()}
    specs = {name: recipe.stages[-1].spec for name, recipe in recipes.items() if isinstance(recipe, PipelineSpec)}
    assert {spec.fleet.reserved_usd_per_hour for spec in specs.values()} == {RESERVED_USD_PER_HOUR}
    assert specs[RESERVED].fleet.preemptible_usd_per_hour == RESERVED_USD_PER_HOUR
    apart: Any = {"pool": True, "fleet": {"preemptible_usd_per_hour"}}
    (_,) = {spec.model_dump_json(exclude=apart) for spec in specs.values()}


def test_unequal_work_is_refused() -> None:
    same = {DEMO: summary(evictions=3), ALONE: summary(), RESERVED: summary(tokens=1100)}
    check_runs(same)
    for name, wrong in ((ALONE, summary(steps=14)), (ALONE, summary(tokens=1200)), (RESERVED, summary(evictions=1))):
        with pytest.raises(RuntimeError):
            check_runs(same | {name: wrong})
    with pytest.raises(RuntimeError, match="no evictions"):
        check_runs(same | {DEMO: summary()})


def test_the_title_says_what_was_measured() -> None:
    result = result_of([row(DEMO, 120.0, 0.03), row(ALONE, 200.0, 0.04), row(RESERVED, 100.0, 0.05)])
    # 0.03 / 0.04 - 1 = -25 %, 1 - 120 / 200 = 40 %
    assert result["cost_relative_by_seed"] == pytest.approx([0.75])
    assert result["pays"] and title_of(result).endswith(": 25 % cheaper, 40 % less time, evictions a run: 1")
    result = result_of([row(DEMO, 190.0, 0.05), row(ALONE, 200.0, 0.04), row(RESERVED, 100.0, 0.05)])
    assert not result["pays"] and title_of(result).endswith(": 25 % more expensive, 5 % less time, evictions a run: 1")
