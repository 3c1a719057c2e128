"""How the prompts of a trained model are formatted, and what a configuration replaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.load import load_spec
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.models.model_source import locate
from tidemill.models.prompt_format import formatted_as_trained, prompt_format

FILE = ["--task.kind=file", "--task.path=rows.jsonl"]
SETS = ["--eval.sets=[{name = 'a', path = 'a.jsonl'}, {name = 'b', path = 'b.jsonl', system_prompt = 'Own.'}]"]


def trained(folder: Path, kind: str, *given: str, chat: bool = True, system: str = "Brief.") -> Path:
    """A run with one checkpoint."""
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    (folder / "checkpoints" / "step_1" / "config.json").write_text("{}")
    (folder / "config.toml").write_text(to_toml(load_spec(given, purpose="read")))
    prompts = {"chat": chat, "system_prompt": system}
    (folder / "manifest.json").write_text(json.dumps({"format": 3, "kind": kind, "prompts": prompts}))
    return folder


def spec_of(run: Path, *given: str) -> RunSpec:
    return load_spec([f"@{run / 'config.toml'}", *given], purpose="eval")


@pytest.mark.parametrize(
    ("stored", "given", "system"),
    [
        ([], FILE, "Brief."),
        ([], [*FILE, "--task.system_prompt=Given."], "Given."),
        ([], [*FILE, "--task.system_prompt="], ""),
        (FILE, [], "Brief."),  # the task of its recipe, which an SFT stage does not use
        (FILE, ["--task.path=other.jsonl"], "Brief."),
        ([*FILE, "--task.system_prompt=Task."], [], "Task."),
        ([*FILE, "--task.system_prompt=Task."], ["--task.system_prompt="], ""),
        ([], ["--task.kind=reasoning_gym", "--task.name=leg_counting"], "Brief."),
    ],
)
def test_a_supervised_model_is_evaluated_and_generates_after_its_system_prompt(
    tmp_path: Path, stored: list[str], given: list[str], system: str
) -> None:
    model = locate(trained(tmp_path / "run", "sft", *stored))
    spec, notes = spec_of(tmp_path / "run", *given, *SETS), list[str]()
    found = formatted_as_trained(spec, model, note=notes.append)
    assert found.task.system_prompt == system == prompt_format(spec, model).system_prompt  # type: ignore[union-attr]
    assert found.model.chat_template and prompt_format(spec, model).chat
    assert formatted_as_trained(found, model, note=notes.append) == found
    of_set = system if found.task.kind == "reasoning_gym" else None  # None: that of the file task
    assert [each.system_prompt for each in found.eval.sets] == [of_set, "Own."]
    assert not notes


def test_a_task_without_a_system_prompt_is_reported(tmp_path: Path) -> None:
    model, notes = locate(trained(tmp_path / "run", "dpo", chat=False)), list[str]()
    found = formatted_as_trained(spec_of(tmp_path / "run", *SETS), model, note=notes.append)
    assert [each.system_prompt for each in found.eval.sets] == ["Brief.", "Own."]
    assert notes == [
        'warning: the model was trained after a system prompt, and prompts of task.kind = "arithmetic" have none'
    ]


def test_the_task_of_an_rl_run_is_evaluated_as_in_that_run(tmp_path: Path) -> None:
    model = locate(trained(tmp_path / "run", "rl", *FILE, "--task.system_prompt=Brief."))
    same = spec_of(tmp_path / "run", *SETS)
    assert formatted_as_trained(same, model, note=pytest.fail) is same
    other: Any = formatted_as_trained(spec_of(tmp_path / "run", "--task.path=b.jsonl"), model, note=pytest.fail)
    assert (other.task.system_prompt, other.model.chat_template) == ("Brief.", True)
