from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config_issues import issues_of
from tidemill.config.issues import COMMAND_LINE, ConfigIssue
from tidemill.config.keys import find
from tidemill.config.load import (
    Layer,
    command_line,
    merge,
    missing_values,
    nearby_recipes,
    parse_value,
    recipe_layer,
    split_arguments,
    with_absolute_paths,
)


def test_arguments_are_split() -> None:
    found = split_arguments(
        ["@a.toml", "--run.seed", "-5", "prompt", "--sampling.top_p=0.5", "--engine.batch_invariant", "@b.toml"]
    )
    assert found.recipes == ["a.toml", "b.toml"]
    assert found.assignments == [
        (("run", "seed"), "-5"),  # a negative number is a value
        (("sampling", "top_p"), "0.5"),
        (("engine", "batch_invariant"), None),  # a flag does not swallow what follows
    ]
    assert found.rest == ["prompt"]


def test_a_flag_takes_true_or_false() -> None:
    found = split_arguments(["--engine.batch_invariant", "false", "--checkpoint.keep_best", "other"])
    assert found.assignments == [(("engine", "batch_invariant"), "false"), (("checkpoint", "keep_best"), None)]
    assert found.rest == ["other"]


def test_a_known_key_may_take_a_value_that_looks_like_a_recipe() -> None:
    assert split_arguments(["--run.name", "@x"]).assignments == [(("run", "name"), "@x")]
    assert split_arguments(["--unknown", "@x"]).recipes == ["x"]


def test_a_value_may_contain_an_equals_sign() -> None:
    assert split_arguments(["--task.operators=a=b"]).assignments == [(("task", "operators"), "a=b")]


def test_arguments_round_trip() -> None:
    args = ["@a.toml", "--run.seed=3", "--engine.batch_invariant"]
    assert split_arguments(args).items == args


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("trainer.steps", "5", 5),
        ("trainer.steps", "007", 7),  # not a TOML number, but clear
        ("trainer.steps", "-5", -5),
        ("sampling.top_p", ".5", 0.5),
        ("sampling.top_p", "1e-3", 0.001),
        ("trainer.steps", "many", "many"),
        ("run.name", "2024", "2024"),  # text needs no quotes, even if it is numeric
        ("run.name", '"quoted"', "quoted"),
        ("run.name", "true", "true"),
        ("run.dir", "runs/x", "runs/x"),
        ("run.dir", "none", None),
        ("run.name", "none", "none"),  # may not be unset
        ("algorithm.kl_stop", "none", None),
        ("trainer.precision", "bf16", "bf16"),
        ("sampling.stop", r'["\n", "x"]', ["\n", "x"]),
        ("scoring.rewards", '[{kind="exact"}]', [{"kind": "exact"}]),
        ("engine.batch_invariant", "true", True),
        ("engine.batch_invariant", "yes", "yes"),
        ("task.params.depth", "3", 3),
        ("task.params.name", "abc", "abc"),
        ("task.params.two", "1\nx = 2", "1\nx = 2"),  # a value is one value
    ],
)
def test_values(path: str, text: str, value: Any) -> None:
    parsed = parse_value(text, find(tuple(path.split("."))))
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_order_of_overrides_does_not_matter() -> None:
    one = command_line([(("task", "path"), "/x"), (("task", "kind"), "file")])
    other = command_line([(("task", "kind"), "file"), (("task", "path"), "/x")])
    assert one.tree == other.tree == {"task": {"kind": "file", "path": "/x"}}
    assert one.name == COMMAND_LINE


def test_the_last_of_equal_overrides_wins() -> None:
    layer = command_line([(("run", "seed"), "1"), (("run", "seed"), "2")])
    assert layer.tree == {"run": {"seed": 2}}


@pytest.mark.parametrize("prefix", [(), ("stage", "sft")])
def test_a_value_in_place_of_a_section_is_kept_for_validation(prefix: tuple[str, ...]) -> None:
    value, key = ((*prefix, "run"), "1"), ((*prefix, "run", "seed"), "2")
    for assignments in ([value, key], [key, value]):
        layer = command_line(assignments)
        assert layer.locate((*prefix, "run")) and not layer.locate((*prefix, "run", "seed"))


@pytest.mark.parametrize(
    ("path", "what", "hint"),
    [
        ("trainer.steps", "needs a value", "write --trainer.steps VALUE (integer >= 1)"),
        ("dry-rnu", "unknown option", "did you mean --dry-run?"),
        ("trainer.stpes", "unknown option", "did you mean --trainer.steps?"),
        ("xyzzy", "unknown option", "`tidemill train --help-all` lists every key"),
    ],
)
def test_options_without_a_value(path: str, what: str, hint: str) -> None:
    assignment = (tuple(path.split(".")), None)
    assert missing_values([assignment]) == [ConfigIssue(key=f"--{path}", what=what, hint=hint)]
    assert command_line([assignment]).tree == {}


def test_tables_merge_and_other_values_are_replaced() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    over = {"a": {"y": [3]}, "b": {"z": 1}}
    assert merge(base, over) == {"a": {"x": 1, "y": [3]}, "b": {"z": 1}}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 1}  # unchanged


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"kind": "file", "path": "x"}, {"kind": "arithmetic"}, {"kind": "arithmetic"}),
        ({"kind": "file", "path": "x"}, {"kind": "file"}, {"kind": "file", "path": "x"}),
        ({"kind": "file", "path": "x"}, {"path": "y"}, {"kind": "file", "path": "y"}),
        ({"digits": 2}, {"kind": "arithmetic"}, {"digits": 2, "kind": "arithmetic"}),  # the default kind
        ({"digits": 2}, {"kind": "file"}, {"kind": "file"}),
    ],
)
def test_a_changed_kind_drops_the_old_keys(base: dict[str, Any], over: dict[str, Any], merged: dict[str, Any]) -> None:
    assert merge({"task": base}, {"task": over}) == {"task": merged}


def test_a_kind_in_a_free_table_is_an_ordinary_value() -> None:
    base, over = {"kind": "a", "x": 1}, {"kind": "b"}
    assert merge({"params": base}, {"params": over}) == {"params": {"kind": "b", "x": 1}}


def test_input_paths_start_at_the_folder(tmp_path: Path) -> None:
    tree = {
        "run": {"dir": "runs/x"},
        "task": {"kind": "file", "path": "../data/x.jsonl", "held_out_path": "/abs/y.jsonl"},
        "data": {"path": "pairs", "held_out_path": "../held_out.parquet"},
        "pool": {"kind": "trace", "path": "spot.csv"},
        "model": {"source": "./weights"},
        "scoring": {
            "rewards": [
                {"kind": "python", "function": "mine.py:score"},
                {"kind": "python", "function": "package.mine:score"},
                {"kind": "exact"},
                "not a table",
            ]
        },
    }
    changed = with_absolute_paths(tree, tmp_path / "recipes")
    assert changed["run"] == {"dir": "runs/x"}  # an output stays relative to the working directory
    assert changed["task"]["path"] == str(tmp_path / "data/x.jsonl")
    assert changed["task"]["held_out_path"] == "/abs/y.jsonl"
    assert changed["data"] == {
        "path": str(tmp_path / "recipes/pairs"),
        "held_out_path": str(tmp_path / "held_out.parquet"),
    }
    assert changed["pool"]["path"] == str(tmp_path / "recipes/spot.csv")
    assert changed["model"]["source"] == str(tmp_path / "recipes/weights")
    assert [each["function"] for each in changed["scoring"]["rewards"][:2]] == [
        f"{tmp_path}/recipes/mine.py:score",
        "package.mine:score",
    ]
    assert changed["scoring"]["rewards"][2:] == [{"kind": "exact"}, "not a table"]


def test_files_of_functions_start_at_the_folder(tmp_path: Path) -> None:
    tree = {
        "algorithm": {"advantage": "mine.py:f", "loss": "ppo", "loss_terms": [{"function": "../mine.py:g"}]},
        "task": {"kind": "python", "function": "mine.py:rows", "sources": [{"path": "a.jsonl"}, {"path": "hub:a/b"}]},
        "batch": {"sampler": "package.mine:h"},
        "eval": {"rewards": [{"kind": "python", "function": "/abs/mine.py:i"}], "sets": [{"path": "b.jsonl"}]},
        "telemetry": {"callbacks": ["mine.py:Watch", "package.mine:Watch"]},
    }
    changed = with_absolute_paths(tree, tmp_path / "recipes")
    here = f"{tmp_path}/recipes"
    assert changed == {
        "algorithm": {
            "advantage": f"{here}/mine.py:f",
            "loss": "ppo",
            "loss_terms": [{"function": f"{tmp_path}/mine.py:g"}],
        },
        "task": {
            "kind": "python",
            "function": f"{here}/mine.py:rows",
            "sources": [{"path": f"{here}/a.jsonl"}, {"path": "hub:a/b"}],
        },
        "batch": {"sampler": "package.mine:h"},
        "eval": {
            "rewards": [{"kind": "python", "function": "/abs/mine.py:i"}],
            "sets": [{"path": f"{here}/b.jsonl"}],
        },
        "telemetry": {"callbacks": [f"{here}/mine.py:Watch", "package.mine:Watch"]},
    }


def test_hub_ids_are_not_paths_and_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    tree = {"model": {"source": "organisation/name"}, "run": {"dir": "~/runs"}}
    changed = with_absolute_paths(tree, tmp_path)
    assert changed == {"model": {"source": "organisation/name"}, "run": {"dir": "/home/someone/runs"}}


def test_invalid_types_are_left_to_validation(tmp_path: Path) -> None:
    tree = {"task": 3, "scoring": {"rewards": 1}, "model": {"source": 5}, "run": [], "pool": {"path": 1}}
    assert with_absolute_paths(tree, tmp_path) == tree


def test_a_layer_locates_its_keys() -> None:
    text = '[run]\nname = "a"\n\n[[scoring.rewards]]\nkind = "exact"\n'
    layer = Layer(name="r.toml", tree={"run": {"name": "a"}, "scoring": {"rewards": [{"kind": "exact"}]}}, text=text)
    assert layer.locate(("run", "name")) == "r.toml:2"
    assert layer.locate(("scoring", "rewards", 0, "kind")) == "r.toml:5"
    assert layer.locate(("scoring", "rewards", 1)) == ""
    assert layer.locate(("run", "name", "deeper")) == ""
    assert Layer(name=COMMAND_LINE, tree={"run": {}}).locate(("run",)) == COMMAND_LINE


def recipe_issue(name: str) -> ConfigIssue:
    (issue,) = issues_of(lambda: recipe_layer(name))
    assert issue.key == f"@{name}"
    return issue


def test_a_missing_recipe_suggests_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-experiment.toml").touch()
    issue = recipe_issue("my-experimant.toml")
    assert (issue.what, issue.hint) == ("no such file", "did you mean @my-experiment.toml?")
    assert recipe_issue("smollm-addition").hint.startswith("did you mean @smollm2-addition")
    assert nearby_recipes(Path("zzz.toml")).startswith("available recipes: @my-experiment.toml, @")


def test_a_built_in_recipe_is_found_by_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_layer("smollm2-addition").tree["model"]["source"] == "smollm2-135m"
    (tmp_path / "smollm2-addition").write_text('[model]\nsource = "char"\n')
    assert recipe_layer("smollm2-addition").tree["model"]["source"] == "char"


def test_unreadable_recipes(tmp_path: Path) -> None:
    assert recipe_issue(str(tmp_path)).what == "cannot be read: is a directory"
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    assert recipe_issue(str(tmp_path / "latin.toml")).what == "not UTF-8 text"
    (tmp_path / "file").touch()
    assert recipe_issue(str(tmp_path / "file" / "x.toml")).what == "no such file"


def test_the_path_of_a_reward_model_starts_at_its_recipe(tmp_path: Path) -> None:
    rewards = [{"kind": "model", "model": each} for each in ("./reward", "stage:reward", "/elsewhere")]
    changed = with_absolute_paths({"scoring": {"rewards": rewards}}, tmp_path)
    found = [each["model"] for each in changed["scoring"]["rewards"]]
    assert found == [str(tmp_path / "reward"), "stage:reward", "/elsewhere"]
