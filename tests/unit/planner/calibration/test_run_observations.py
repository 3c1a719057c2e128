from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planted import observed, planted, spec_of, write_run
from tidemill.core.errors import UserError
from tidemill.planner.calibration.fit import calibrate, fit
from tidemill.planner.calibration.run_observations import Observed, observe
from tidemill.telemetry.run_dir import RunDirectory


@pytest.fixture(scope="module")
def seen() -> Observed:
    spec = spec_of()
    return observed(spec, planted(spec))


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_run_is_observed_as_it_was_written(seen: Observed, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seen)
    assert fit(observe(run.path)).numbers == fit(seen).numbers


def test_a_line_that_is_there_twice_is_one_observation(seen: Observed, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seen)
    run.events.write_bytes(run.events.read_bytes() * 2)
    assert fit(observe(run.path)).numbers == fit(seen).numbers


def test_prompt_tokens_that_were_not_counted_are_none(seen: Observed, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seen)
    replaced(run.metrics, '"prompt_tokens_reused":', '"x":')
    computed = sum(line.values["prompt_tokens_computed"] / line.values["samples"] for line in seen.metrics)
    assert observe(run.path).prompt_tokens == pytest.approx(computed / len(seen.metrics))


@pytest.mark.parametrize(
    ("harm", "where", "says"),
    [
        (lambda run: shutil.rmtree(run.samples), "samples", "no samples of training"),
        (lambda run: [path.write_bytes(b"x\n") for _, _, path in run.sample_files()], "samples", "no samples of"),
        (lambda run: run.config.write_bytes(b"\xff"), "config.toml", "UTF-8"),
        (lambda run: run.manifest.unlink(), "manifest.json", "does not name the machine"),
        (lambda run: run.manifest.write_text("{"), "manifest.json", "does not name the machine"),
        (lambda run: replaced(run.manifest, '"cores": 2', '"cores": 0'), "manifest.json", "does not name the machine"),
        (lambda run: replaced(run.metrics, '"time_step_s":', '"time_step_s":"s","x":'), "run", "0 timed steps"),
        (lambda run: replaced(run.metrics, '"samples":', '"x":'), "run", "no measurements of the engines"),
        (lambda run: replaced(run.events, '"work":', '"work":3,"x":'), "run", "no measurements of the engines"),
        (lambda run: replaced(run.events, '"work":', '"work":[3],"x":'), "run", "no measurements of the engines"),
    ],
)  # fmt: skip
def test_missing_and_damaged_files_are_reported(
    seen: Observed, tmp_path: Path, harm: Callable[[RunDirectory], object], where: str, says: str
) -> None:
    run = write_run(tmp_path / "run", seen)
    harm(run)
    with pytest.raises(UserError, match=says) as caught:
        calibrate(run.path)
    assert caught.value.where.endswith(where)
    assert caught.value.hint
