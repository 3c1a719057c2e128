"""Objects given to `tidemill.train`, as configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_environments import Stateless, Tools
from tests.char_codec import CharCodec
from tidemill.api.inputs import Inputs
from tidemill.config.schema import RunSpec
from tidemill.config.task import DataConfig, FileTask
from tidemill.core.errors import UserError
from tidemill.envs.text.build_task import counted_task
from tidemill.envs.text.eval_sets import counted
from tidemill.envs.text.examples import load_demonstrations, load_pairs


@pytest.mark.parametrize(("environment", "scores"), [(Tools, True), (Stateless, False)])
def test_an_environment_with_a_score_rewards_rows(environment: type, scores: bool, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path, kept=False)
    inputs.add_data([{"prompt": "a", "answer": "b"}], None, None)
    inputs.add_environment(environment, None)
    assert inputs.overrides.get("scoring.rewards") == ([{"kind": "environment"}] if scores else None)
    inputs.add_rewards(["exact"])
    assert [each["kind"] for each in inputs.overrides["scoring.rewards"]] == ["exact"]


GOOD = {"prompt": "1+1=", "answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}
BAD = {"prompt": 4}
WRONG = [GOOD, {**GOOD, "prompt": "1+2="}, BAD]


def prompts(inputs: Inputs) -> None:
    counted_task(FileTask(**inputs.overrides["task"]))


def examples(load: Callable[..., Any], **config: Any) -> Callable[[Inputs], Any]:
    def read(inputs: Inputs) -> Any:
        data = DataConfig(**{name: value for name, value in inputs.overrides["data"].items() if value}, **config)
        return load(data, codec=CharCodec(), context_limit=9, chat_template=False)

    return read


@pytest.mark.parametrize("index_above_mb", [256, 0])
@pytest.mark.parametrize("load", [load_demonstrations, load_pairs])
def test_examples_of_a_call_are_located_in_its_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any], index_above_mb: int
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    read = examples(load, index_above_mb=index_above_mb)
    for number, (data, held_out, where) in enumerate(
        [
            (WRONG, None, "data[2]"),
            (WRONG[:2], [GOOD, BAD], "eval_data[1]"),
            ([(1.0, [GOOD]), (2.0, WRONG[1:])], None, "data[1][1][1]"),
        ]
    ):
        inputs = Inputs(tmp_path / str(number), kept=False)
        inputs.add_data(data, held_out, None, section="data")
        with pytest.raises(UserError) as caught:
            read(inputs)
        assert caught.value.where == where
    long = Inputs(tmp_path / "long", kept=False)
    long.add_data([GOOD, {**GOOD, "prompt": "1111+1111="}], None, None, section="data")
    with pytest.raises(UserError, match=r"longer than 9 tokens .*: data\[1\], 1[12] tokens"):
        read(long)
    single = Inputs(tmp_path / "single", kept=False)
    single.add_data([GOOD], None, None, section="data")
    with pytest.raises(UserError, match=r"^data: a single question"):
        read(single)


def test_prompts_of_a_call_are_located_in_its_argument(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path, kept=False)
    inputs.add_data(iter(WRONG), None, None)
    with pytest.raises(UserError, match=r"^data\[2\]: `prompt` must be"):
        prompts(inputs)
    inputs.add_data(WRONG[:2], None, None)
    inputs.add_eval_sets({"math": [GOOD, BAD]})
    sets = [{**each, "path": Path(each["path"])} for each in inputs.overrides["eval.sets"]]
    spec = RunSpec.model_validate({"task": {"kind": "arithmetic"}, "eval": {"sets": sets}})
    with pytest.raises(UserError, match=r'^eval_sets\["math"\]\[1\]: `prompt` must be'):
        counted(spec)
    with pytest.raises(UserError, match=r"^data\[1\]: expected a dict"):
        inputs.add_data([GOOD, 3], None, None)
