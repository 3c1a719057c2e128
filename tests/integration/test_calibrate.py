"""Fit a profile to a real run, and forecast the next run from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run_here
from tidemill.config.load import RECIPES
from tidemill.telemetry.manifest import read_forecast

RECIPE = (
    f"@{RECIPES / 'char-addition.toml'}",
    "--trainer.threads=1",
    "--trainer.steps=4",
    "--batch.prompts=4",
    "--batch.group_size=8",
    "--engine.slots=12",  # so that batches drain
    "--eval.every_steps=0",
)


def test_a_run_calibrates_the_forecast_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_here("train", *RECIPE, "--run.dir", str(first)).code == 0
    assert read_forecast(first) is None  # there was no profile of this machine
    profile = run_here("calibrate", str(first), "--json").data["profile"]
    numbers = profile["numbers"]
    assert all(numbers[name]["value"] > 0 for name in ("controller_sample_s", "start_s"))
    assert sum(numbers[f"train_{name}_s"]["value"] for name in ("step", "token", "pair")) > 0
    assert sum(numbers[f"engine_{name}_s"]["value"] for name in ("pass", "row", "drawn")) > 0
    assert numbers["prompt_tokens"]["value"] == 4  # "8+4="
    assert sum(profile["lengths"].values()) == 4 * 32
    forecast = run_here("plan", "run", *RECIPE, "--json").data
    assert forecast["unlike"] == []
    assert run_here("train", *RECIPE, "--run.dir", str(second)).code == 0
    kept = read_forecast(second)
    assert kept is not None
    assert kept.steps == 4
    assert kept.usual_step_s.mean == pytest.approx(forecast["usual_step_s"]["mean"], rel=0.3)
    assert "Forecast" in (second / "report.html").read_text(encoding="utf-8")
