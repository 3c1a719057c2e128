"""Objects given to `tidemill.train`, as configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_environments import Stateless, Tools
from tests.char_codec import CharCodec
from tidemill.api.inputs import Inputs
from tidemill.api.train import load_config, prepare
from tidemill.config.schema import RunSpec
from tidemill.config.task import DataConfig, FileTask
from tidemill.core.errors import UserError
from tidemill.data.build_task import counted_task
from tidemill.data.eval_sets import counted
from tidemill.data.examples import load_demonstrations, load_pairs


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


ROWS = [{"prompt": "a", "answer": "b"}]
ADDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a key": ({"task": {"max_prompt_tokens": 9}}, {"task.max_prompt_tokens": 9}),
    "two levels": (
        {"model": {"char": {"layers": 1}}, "model.char.heads": 2},
        {"model.char": {"layers": 1, "heads": 2}},
    ),
    "dots in a table": ({"model": {"char.layers": 1}}, {"model.char.layers": 1}),
    "what an argument only implies": ({"task": {"held_out_path": "held.jsonl"}}, {"task.held_out_path": "held.jsonl"}),
    "an equal value": ({"task": {"kind": "file"}}, {}),
    "parameters": ({"task": {"columns": {"prompt": "q"}}}, {"task.columns.prompt": "q"}),
}


@pytest.mark.parametrize("name", ADDED)
def test_nested_overrides_add_to_the_section_of_an_argument(name: str, tmp_path: Path) -> None:
    nested, dotted = (prepare("char-addition", data=ROWS, run_dir=tmp_path, overrides=each)[0] for each in ADDED[name])
    assert nested == dotted
    assert isinstance(nested, RunSpec) and isinstance(nested.task, FileTask)
    assert nested.task.path == tmp_path / "inputs/train.jsonl"


def test_nested_overrides_add_to_a_configuration(tmp_path: Path) -> None:
    given = load_config("char-addition", {"batch.group_size": 4})
    spec = prepare(given, data=ROWS, run_dir=tmp_path, overrides={"batch": {"prompts": 2}})[0]
    assert isinstance(spec, RunSpec) and (spec.batch.prompts, spec.batch.group_size) == (2, 4)


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"data": ROWS}, {"task": {"kind": "arithmetic"}}, "overrides, task.kind: is set to 'arithmetic'"),
    ({"data": ROWS}, {"task": {"path": "other.jsonl"}}, "overrides, task.path"),
    ({"model": "char"}, {"model": {"source": "smollm2-135m"}}, "overrides, model.source"),
    ({"advantage": "rloo"}, {"algorithm": {"advantage": "grpo"}}, "overrides, algorithm.advantage"),
    ({"rewards": ["exact"]}, {"scoring": {"rewards": [{"kind": "length"}]}}, "overrides, scoring.rewards"),
    ({"columns": {"prompt": "q"}, "data": ROWS}, {"task": {"columns": {"prompt": "p"}}}, "overrides, task.columns"),
    ({}, {"run": {"dir": "elsewhere"}}, "overrides, run.dir: is set to 'elsewhere'"),
]


@pytest.mark.parametrize(("arguments", "overrides", "says"), CONFLICTS)
def test_an_override_that_contradicts_an_argument_is_refused(
    arguments: dict[str, Any], overrides: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        prepare("char-addition", run_dir=tmp_path, overrides=overrides, **arguments)
    assert "an argument sets it to" in caught.value.what
    assert caught.value.hint == "leave one of them out"


def test_the_rewards_of_an_environment_are_a_default(tmp_path: Path) -> None:
    rewards = [{"kind": "length", "target_tokens": 4}]
    spec = prepare("char-addition", environment=Tools, run_dir=tmp_path, overrides={"scoring.rewards": rewards})[0]
    assert isinstance(spec, RunSpec) and [each.kind for each in spec.scoring.rewards] == ["length"]


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class Model:
    """As much of a model as is saved."""

    def __init__(self, weights: bytes) -> None:
        self.weights = weights

    def save_pretrained(self, folder: Path, **_: object) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(self.weights)

    def get_output_embeddings(self) -> object:
        return self


def test_a_resumed_run_refuses_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "inputs"
    saved = Inputs(folder, kept=False).model_source(Model(b"1"), Tokenizer())
    resumed = Inputs(folder, kept=True)
    assert resumed.model_source(Model(b"1"), Tokenizer()) == saved
    with pytest.raises(UserError, match="the model has changed since this run started") as caught:
        resumed.model_source(Model(b"2"), Tokenizer())
    assert f"another --run.dir, such as {tmp_path / 'run-2'}" in caught.value.hint
    assert [each.name for each in folder.iterdir()] == ["model"]
