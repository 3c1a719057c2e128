from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Pretend, Run
from tidemill.cli.evaluate import figures
from tidemill.config.schema import RunSpec
from tidemill.models.checkpoint_manifest import seal
from tidemill.models.model_source import ModelSource

Asked = list[tuple[RunSpec, str | None]]

TASK = "--task.kind=arithmetic"


@pytest.fixture
def asked(pretend: Pretend) -> Asked:
    calls: Asked = []

    def evaluate(
        spec: RunSpec, *, model: ModelSource | None, compare: ModelSource | None, progress: Callable[[str], None]
    ) -> dict[str, Any]:
        given = compare or model
        calls.append((spec, given.source if given else None))
        progress("half way")
        return {"greedy_accuracy": 0.8125, "n": 64, "samples": [{"prompt": "1+1="}]}

    pretend("tidemill.jobs.model_evaluation", "evaluate", evaluate)
    return calls


def test_figures_for_people_and_programs(run: Run, asked: Asked) -> None:
    ran = run("eval", TASK, "--eval.prompts=64")
    assert ran.code == 0
    assert ran.out.splitlines() == ["greedy_accuracy  0.8125", "n                64"]
    assert ran.err == "half way\n"
    assert run("eval", TASK, "--json").data["samples"] == [{"prompt": "1+1="}]
    assert asked[0][0].eval.prompts == 64
    assert asked[0][1] is None


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_a_checkpoint_brings_its_runs_configuration(run: Run, asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "config.toml").write_text("[run]\nseed = 7\n", encoding="utf-8")
    early, late = (checkpoint(tmp_path / "D" / "checkpoints" / name) for name in ("step_9", "step_10"))
    (tmp_path / "D" / "checkpoints" / "step_11.partial").mkdir()
    assert run("eval", "--checkpoint", "D/checkpoints/step_9").code == 0
    assert run("eval", "--checkpoint", "D", "--eval.prompts=3").code == 0
    assert run("eval", "--checkpoint=D/checkpoints").code == 0
    assert [spec.run.seed for spec, _ in asked] == [7, 7, 7]
    assert asked[1][0].eval.prompts == 3
    folders = [Path(folder).resolve() for _, folder in asked if folder]
    assert folders == [early, late, late]  # by number, not by spelling


def test_a_recipe_goes_before_the_checkpoints_own(run: Run, asked: Asked, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    (tmp_path / "r.toml").write_text("[run]\nseed = 1\n", encoding="utf-8")
    assert run("eval", "@r.toml", "--checkpoint", "model", "--checkpoint.keep_last=3").code == 0
    assert asked[0][0].run.seed == 1
    assert asked[0][0].checkpoint.keep_last == 3  # the option does not take the section's keys
    assert asked[0][1] == "model"


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("none", "error: --checkpoint none: 'none' is not a known model"),
        ("./none", "error: --checkpoint none: there is no such folder"),
        ("empty", "error: --checkpoint empty: the folder is empty"),
    ],
)
def test_no_checkpoint_there(run: Run, asked: Asked, tmp_path: Path, folder: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("eval", "--checkpoint", folder)
    assert ran.code == 2
    assert ran.err.startswith(says)
    assert asked == []


def test_another_model_may_be_named_to_compare_with(run: Run, asked: Asked, tmp_path: Path) -> None:
    late = checkpoint(tmp_path / "D" / "checkpoints" / "step_10")
    assert run("eval", TASK, "--compare", "D").code == 0
    assert run("eval", TASK, "--compare", "char").code == 0
    other = checkpoint(tmp_path / "char")  # the name goes first
    assert run("eval", TASK, "--compare", "char").code == 0
    assert run("eval", TASK, "--compare", "./char").code == 0
    assert [found for _, found in asked] == [str(late.relative_to(tmp_path)), "char", "char", str(other)]


def test_no_model_there_to_compare_with(run: Run, asked: Asked) -> None:
    ran = run("eval", TASK, "--compare", "./none")
    assert ran.code == 2
    assert ran.err.startswith("error: --compare none: there is no such folder")
    assert asked == []


def test_every_figure_for_people() -> None:
    interval = {"value": 0.5, "low": 0.25, "high": 0.75}
    paired = {"n": 64, "other": 0.25, "this": 0.5, "difference": interval, "higher": 20, "lower": 4, "p_value": 0.0015}
    found = {
        "greedy_accuracy": 0.8125,
        "greedy_accuracy_interval": [0.7, 0.9],
        "n": 64,
        "completion_tokens": {"mean": 2.5, "max": 3.0},
        "scores": {"liked": interval},
        "drawn": {"samples_per_prompt": 8, "pass_at": {"1": interval}, "distinct_1": 0.125},
        "compared_with": {
            "model": "char",
            "weights_digest": "ab",
            "figures": {"greedy_accuracy": paired},
            "samples": [],
        },
        "samples": [{}],
    }
    assert figures(found).splitlines() == [
        "greedy_accuracy    0.8125 (95 %: 0.7 to 0.9)",
        "n                  64",
        "completion_tokens  mean 2.5, max 3",
        "score liked        0.5 (95 %: 0.25 to 0.75)",
        "drawn              8 samples per prompt",
        "  pass@1           0.5 (95 %: 0.25 to 0.75)",
        "  distinct_1       0.125",
        "compared_with      char, weights ab",
        "  greedy_accuracy  0.25 -> 0.5, +0.5 (95 %: +0.25 to +0.75); higher on 20 of 64, lower on 4, p = 0.0015",
    ]


def test_dry_run(run: Run, asked: Asked) -> None:
    assert "evaluation  at most 64 held-out prompts" in run("eval", TASK, "--dry-run").out
    assert asked == []


def test_a_damaged_checkpoint_is_not_measured(run: Run, asked: Asked, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "D" / "checkpoints" / "step_3")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "moments").write_bytes(b"moments")
    seal(folder, step=3, score=None)
    (folder / "trainer_state" / "moments").unlink()  # a model is not loaded from that
    assert run("eval", "--checkpoint", "D").code == 0
    (folder / "model.safetensors").write_bytes(b"weightz")
    ran = run("eval", TASK, "--compare", "D")
    assert ran.code == 2
    assert "the checkpoint is damaged: model.safetensors does not match its checksum" in ran.err
    assert len(asked) == 1


def test_a_checkpoint_without_its_runs_configuration_is_said_to_have_none(
    run: Run, asked: Asked, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "D" / "checkpoints" / "step_3")
    assert "D has no config.toml" in run("eval", "--checkpoint", "D").err
    (tmp_path / "mine.toml").write_text("[eval]\nprompts = 3\n", encoding="utf-8")
    assert "config.toml" not in run("eval", "@mine.toml", "--checkpoint", "D").err
