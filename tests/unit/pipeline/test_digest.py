from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pretend_stages import pipeline
from tidemill.config.pipeline import KINDS, NEUTRAL, StageSpec
from tidemill.pipeline.digest import effective, file_inputs, folder_name, stage_digest
from tidemill.runtime.same_run import RESUMABLE

RL = '[[stage]]\nname = "a"\nkind = "rl"\nmodel.source = "char"\n[[stage]]\nname = "b"\nkind = "rl"\n'
RL += 'model.source = "stage:a"\n'
EVAL = '[[stage]]\nname = "a"\nkind = "eval"\nmodel.source = "char"\n'
EXPORT = '[[stage]]\nname = "a"\nkind = "export"\nmodel.source = "char"\n'


def digest(stage: StageSpec, upstream: str = "u", **contents: str) -> str:
    return stage_digest(stage, effective(stage, upstream=dict.fromkeys(stage.needs, upstream), contents=contents))


def first(tmp_path: Path, text: str, *overrides: str) -> StageSpec:
    return pipeline(tmp_path, text, *overrides).stages[0]


@pytest.mark.parametrize(
    "override",
    [
        "--run.name=other",
        "--trainer.threads=7",
        "--checkpoint.every_steps=1",
        "--checkpoint.keep_last=5",
        "--telemetry.live=false",
        "--eval.prompts=3",
        "--scoring.timeout_s=3",
        "--runtime=ray",
        "--pool.workers=3",
        "--fleet.silence_s=99",
        "--engine.tick_s=0.2",
    ],
)
def test_what_does_not_change_the_result_does_not_change_the_address(tmp_path: Path, override: str) -> None:
    assert digest(first(tmp_path, RL, override)) == digest(first(tmp_path, RL))


@pytest.mark.parametrize(
    "override",
    [
        "--run.seed=1",
        "--model.char.layers=2",
        "--task.shots=1",
        "--sampling.temperature=0.5",
        "--batch.prompts=4",
        "--algorithm.clip_low=0.1",
        "--optimizer.learning_rate=1e-3",
        "--trainer.steps=3",
        "--trainer.precision=bf16",
        "--engine.batch_invariant",
        '--scoring.rewards=[{kind="numeric"}]',
    ],
)
def test_what_changes_the_result_changes_the_address(tmp_path: Path, override: str) -> None:
    assert digest(first(tmp_path, RL, override)) != digest(first(tmp_path, RL))


def test_an_evaluation_is_decided_by_other_keys_than_training(tmp_path: Path) -> None:
    plain = digest(first(tmp_path, EVAL))
    assert digest(first(tmp_path, EVAL, "--eval.prompts=3")) != plain
    assert digest(first(tmp_path, EVAL, "--eval.every_steps=3")) == plain


def test_a_supervised_stage_may_give_its_best_checkpoint_so_its_cadence_counts(tmp_path: Path) -> None:
    text = '[[stage]]\nname = "a"\nkind = "sft"\ndata.path = "x.jsonl"\n'
    contents = {"data.path": "1"}
    plain = digest(first(tmp_path, text), **contents)
    assert digest(first(tmp_path, text, "--checkpoint.every_steps=1"), **contents) != plain
    assert digest(first(tmp_path, text, "--checkpoint.keep_last=5"), **contents) == plain
    # Epochs decide how long it is, unless there are none.
    assert digest(first(tmp_path, text, "--trainer.steps=3"), **contents) == plain
    without = digest(first(tmp_path, text, "--supervised.epochs=0"), **contents)
    assert digest(first(tmp_path, text, "--supervised.epochs=0", "--trainer.steps=3"), **contents) != without


def test_kinds_of_one_configuration_have_addresses_of_their_own(tmp_path: Path) -> None:
    assert digest(first(tmp_path, EVAL)) != digest(first(tmp_path, EXPORT))
    assert digest(first(tmp_path, EXPORT, "--export.dtype=bf16")) != digest(first(tmp_path, EXPORT))
    assert digest(first(tmp_path, EXPORT, "--export.path=x")) != digest(first(tmp_path, EXPORT))


def test_what_it_takes_from_is_part_of_it_and_the_name_is_not(tmp_path: Path) -> None:
    stage = pipeline(tmp_path, RL).stages[1]
    assert digest(stage, "one") != digest(stage, "two")
    renamed = pipeline(tmp_path, RL.replace('"a"', '"z"').replace("stage:a", "stage:z")).stages[1]
    assert digest(renamed, "one") == digest(stage, "one")
    # How a model of characters is built matters only where one is built.
    assert digest(pipeline(tmp_path, RL, "--model.char.layers=2").stages[1]) == digest(stage)


def test_files_count_by_content_not_by_place(tmp_path: Path) -> None:
    reward = f'{{kind = "python", function = "{tmp_path}/r.py:f"}}'
    text = (
        f'[task]\nkind = "jsonl"\npath = "x.jsonl"\n[scoring]\nrewards = [{reward}]\n'
        '[[stage]]\nname = "a"\nkind = "rl"\nmodel.source = "./folder"\n'
    )
    stage = first(tmp_path, text)
    assert {file.key: file.path for file in file_inputs(stage)} == {
        "model.source": tmp_path / "folder",
        "task.path": tmp_path / "x.jsonl",
        "scoring.rewards[0].function": tmp_path / "r.py",
    }
    contents = {file.key: "1" for file in file_inputs(stage)}
    plain = digest(stage, **contents)
    for key in contents:
        assert digest(stage, **{**contents, key: "2"}) != plain
    (tmp_path / "elsewhere").mkdir()
    moved = first(tmp_path / "elsewhere", text.replace(f"{tmp_path}/r.py", f"{tmp_path}/elsewhere/r.py"))
    assert digest(moved, **contents) == plain
    assert digest(first(tmp_path, text.replace("r.py:f", "r.py:g")), **contents) != plain


@pytest.mark.parametrize("source", ["smollm2-135m", "char", "organisation/name"])
def test_names_of_models_are_no_files(tmp_path: Path, source: str) -> None:
    text = f'[[stage]]\nname = "a"\nkind = "export"\nmodel.source = "{source}"\n'
    stage = first(tmp_path, text)
    assert file_inputs(stage) == []
    assert effective(stage, upstream={}, contents={})["model.source"] == source


def test_a_folder_that_is_called_like_a_built_in_model_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "char").mkdir()
    assert file_inputs(first(tmp_path, EXPORT)) == []


def test_the_address_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    stage = first(tmp_path, RL)
    values: dict[str, Any] = effective(stage, upstream={}, contents={})
    assert stage_digest(stage, dict(reversed(values.items()))) == stage_digest(stage, values)
    assert folder_name(stage, stage_digest(stage, values)) == f"a-{stage_digest(stage, values)[:10]}"


def test_a_training_stage_can_go_on_in_its_folder_whatever_neutral_key_changes() -> None:
    """Equal addresses share a folder, and a folder takes a run on only with the keys that a resume may change."""
    neutral = (*NEUTRAL, *KINDS["rl"].neutral)
    assert all(key.startswith(RESUMABLE) for key in neutral)
    # What a resume may change and an address does not overlook: more steps go on in a run, and are another stage.
    assert [key for key in RESUMABLE if not key.startswith(neutral)] == ["trainer.steps", "supervised.epochs"]
