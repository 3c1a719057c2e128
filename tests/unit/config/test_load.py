from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tests.config_issues import issues_of
from tidemill.config.issues import ConfigIssue
from tidemill.config.load import RECIPES, differences, from_toml, load_spec
from tidemill.config.schema import RunConfig, RunSpec
from tidemill.config.task import ArithmeticTask, FileTask, ReasoningGymTask
from tidemill.config.toml import to_toml

ALL_RECIPES = sorted(RECIPES.glob("*.toml"))
PIPELINES = ("rlhf", "guess", "hacked", "calc-tool", "python-tool", "robot", "spot-market")  # tested with the stages


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"@{name}"


def issues(*args: str) -> list[ConfigIssue]:
    return issues_of(lambda: load_spec(args))


def issue(*args: str) -> ConfigIssue:
    (found,) = issues(*args)
    return found


def test_without_arguments_the_run_has_the_defaults() -> None:
    assert load_spec([]) == RunSpec()


def test_recipes_apply_from_left_to_right_then_overrides() -> None:
    first = recipe("a.toml", '[run]\nname = "a"\nseed = 1\n[trainer]\nsteps = 3\n[sampling]\nstop = ["x", "y"]\n')
    second = recipe("b.toml", '[run]\nname = "b"\n[sampling]\nstop = ["z"]\n')
    # Overrides apply last even when they precede a recipe.
    spec = load_spec(["--trainer.steps", "7", first, second, "--run.seed=-0"])
    assert (spec.run.name, spec.run.seed, spec.trainer.steps, spec.sampling.stop) == ("b", 0, 7, ("z",))


@pytest.mark.parametrize(
    "path", [path for path in ALL_RECIPES if path.stem not in PIPELINES], ids=lambda path: path.stem
)
def test_the_recipes_of_the_project_are_valid(path: Path) -> None:
    spec = load_spec([f"@{path}"])
    assert spec != RunSpec()
    assert from_toml(to_toml(spec)) == spec


def test_types_are_strict_but_integers_are_numbers() -> None:
    assert load_spec(["--sampling.temperature", "2"]).sampling.temperature == 2.0
    for args, key, source in (
        ([recipe("a.toml", '[trainer]\nsteps = "5"\n')], "trainer.steps", "a.toml:2"),
        (["--trainer.steps", "5.5"], "trainer.steps", "command line"),
        (["--engine.batch_invariant=1"], "engine.batch_invariant", "command line"),
    ):
        found = issue(*args)
        assert (found.key, found.source) == (key, source)


def test_a_changed_kind_drops_the_old_keys() -> None:
    jsonl = recipe("a.toml", '[task]\nkind = "file"\npath = "x.jsonl"\n')
    assert load_spec([jsonl, "--task.kind", "arithmetic"]).task == ArithmeticTask()
    spec = load_spec([jsonl, "--task.name", "gym", "--task.kind", "reasoning_gym", "--task.params.depth=2"])
    assert spec.task == ReasoningGymTask(kind="reasoning_gym", name="gym", params={"depth": 2})


def test_a_table_without_kind_keeps_the_default_kind() -> None:
    assert load_spec([recipe("a.toml", "[task]\ndigits = 2\n")]).task == ArithmeticTask(digits=2)


def test_paths_start_at_the_recipe_or_the_working_directory(tmp_path: Path) -> None:
    jsonl = recipe("sub/a.toml", '[task]\nkind = "file"\npath = "../data/x.jsonl"\n')
    task = load_spec([jsonl]).task
    assert isinstance(task, FileTask)
    assert task.path == tmp_path / "data/x.jsonl"
    task = load_spec([jsonl, "--task.path", "y.jsonl"]).task
    assert isinstance(task, FileTask)
    assert task.path == tmp_path / "y.jsonl"
    sets = recipe("sub/b.toml", '[[eval.sets]]\nname = "math"\npath = "m.jsonl"\n')
    assert load_spec([sets]).eval.sets[0].path == tmp_path / "sub/m.jsonl"
    (given,) = load_spec([sets, '--eval.sets=[{name = "code", path = "c.jsonl"}]']).eval.sets
    assert (given.name, given.path, given.columns) == ("code", tmp_path / "c.jsonl", None)


def test_all_issues_are_reported_with_their_sources() -> None:
    text = """\
[run]
seed = -1
[trainer]
stpes = 3
[herd]
workers = 2
[[scoring.rewards]]
kind = "exact"
[[scoring.rewards]]
kind = "regx"
wieght = 1
"""
    found = issues(recipe("a.toml", text), "--sampling.top_p", "2", "--batch.order=arival")
    assert [(each.key, each.source, each.hint) for each in found] == [
        ("run.seed", "a.toml:2", ""),
        ("scoring.rewards[1].kind", "a.toml:10", "did you mean regex?"),
        ("scoring.rewards[1].wieght", "a.toml:11", "did you mean scoring.rewards[].weight?"),
        ("sampling.top_p", "command line", ""),
        ("batch.order", "command line", "did you mean arrival?"),
        ("trainer.stpes", "a.toml:4", "did you mean trainer.steps?"),
        ("herd", "a.toml:5", "`tidemill train --help-all` lists every key"),
    ]


@pytest.mark.parametrize(
    ("args", "key", "what", "hint"),
    [
        (
            ("--task.path", "x"),
            "task.path",
            'belongs to task.kind = "file", and kind is "arithmetic"',
            "change the kind",
        ),
        (("--task.kind", "file"), "task", 'kind = "file" needs path', "set it to a file with prompts"),
        (("--task.kind", "filex"), "task.kind", '"filex"', "did you mean file?"),
        (("--trainer", "5"), "trainer", "needs a table, was given 5", "trainer.steps, trainer.hours, "),
        (("--task", "5"), "task", "needs a table, was given 5", "task.kind, task.operators, task.digits, ..."),
        (("--scoring.rewards", "[{weight=1.0}]"), "scoring.rewards[0].kind", "missing", "add kind to that table (one"),
        (("--scoring.rewards", "[]"), "scoring.rewards", "is empty", "at least one"),
        (("--scoring.rewards", "[3]"), "scoring.rewards[0]", "needs table, was given 3", ""),
        (("--sampling.stop", "x"), "sampling.stop", 'needs array of text, was given "x"', '["x"]'),
        (("--sampling.stop", "[x]"), "sampling.stop", 'was given "[x]"', "close every bracket and quote every text"),
        (("--scoring.rewards", "[{kind='exact'"), "scoring.rewards", "needs array of tables", "close every bracket"),
        (
            ("--scoring.rewards", "3"),
            "scoring.rewards",
            "needs array of tables, was given 3",
            'write [{ kind = "exact" }]',
        ),
        (("--sampling.stop", '["x", ""]'), "sampling.stop[1]", "is empty", "at least one character"),
        (("--sampling.stop", "[1]"), "sampling.stop[0]", "needs text, was given 1", ""),
        (("--telemetry.sinks", '["wandbb"]'), "telemetry.sinks[0]", '"wandbb"', "did you mean wandb?"),
        (("--optimizer.betas", "[0.9]"), "optimizer.betas", "needs array of 2: number >= 0 and < 1, number", ""),
        (("--optimizer.betas", "[0.9, 1.5]"), "optimizer.betas[1]", "needs number >= 0 and < 1, was given 1.5", ""),
        (
            ("--task.kind=reasoning_gym", "--task.name=x", "--task.params.a=[1]"),
            "task.params.a",
            "needs true or false or integer or number or text, was given [1]",
            "",
        ),
        (("--run.seed.x", "3"), "run.seed", 'was given {"x": 3}', ""),
        (("--optimizer.learning_rate", "nan"), "optimizer.learning_rate", "needs number > 0, was given NaN", ""),
        (("--model.char.hidden_size", "30"), "model.char", "heads = 4", "multiple of heads"),
        (("--run.name=",), "run.name", "is empty", "at least one character"),
        (("--steps", "5"), "steps", "unknown key", "did you mean trainer.steps?"),
    ],
)
def test_an_invalid_override_is_one_issue(args: tuple[str, ...], key: str, what: str, hint: str) -> None:
    found = issue(*args)
    assert (found.key, found.source) == (key, "command line")
    assert what in found.what
    assert hint in found.hint


@pytest.mark.parametrize(
    ("text", "args", "source"),
    [
        ("trainer = 3", ("--trainer.steps=2",), "r.toml:1"),
        ("trainer.steps = 2", ("--trainer=3",), "command line"),
        ("", ("--trainer=3", "--trainer.steps=2"), "command line"),
        ("", ("--trainer.steps=2", "--trainer=3"), "command line"),
        ("", ("--trainer=3", "--trainer={steps = 2}"), "command line"),
    ],
)
def test_a_value_in_place_of_a_section_is_refused_in_every_layer(text: str, args: tuple[str, ...], source: str) -> None:
    found = issue(recipe("r.toml", text), *args)
    assert (found.key, found.source) == ("trainer", source)
    assert "needs a table, was given 3" in found.what


def test_a_value_in_place_of_a_section_is_refused_in_the_first_of_two_recipes() -> None:
    a = recipe("a.toml", "[model]\nchar = 4\n")
    b = recipe("b.toml", "[model.char]\nlayers = 1\n[trainer]\nstpes = 1\n")
    assert [(each.key, each.source) for each in issues(a, b)] == [
        ("model.char", "a.toml:2"),
        ("trainer.stpes", "b.toml:4"),
    ]


def test_keys_of_a_section_add_to_its_inline_table_in_any_order() -> None:
    for args in itertools.permutations(("--trainer={steps = 2}", "--trainer.precision=fp32")):
        trainer = load_spec(args).trainer
        assert (trainer.steps, trainer.precision) == (2, "fp32")


@pytest.mark.parametrize("name", ["..", ".", "../outside", "/outside", "a/b", "a/../../b", "a/", "~/x"])
def test_a_run_name_that_is_not_a_folder_name_is_refused(name: str) -> None:
    (found,) = issues_of(lambda: from_toml(f"run.name = {json.dumps(name)}\n"))
    assert found.key == "run.name"
    assert repr(name) in found.what


@pytest.mark.parametrize("name", ["grpo-0.1_b", "two words", "größe", "@x", "-5"])
def test_a_run_name_is_the_folder_under_runs(name: str) -> None:
    assert from_toml(f'run.name = "{name}"\n').directory == Path("runs", name)


@pytest.mark.parametrize("key", ["run.dir", "export.path"])
def test_an_empty_output_folder_is_refused(key: str) -> None:
    found = issue(f"--{key}=")
    assert (found.key, found.what) == (key, "is empty")
    assert load_spec(["--run.dir=."]).directory == Path()


@pytest.mark.parametrize("key", ["run.seed", "model.lora.seed"])
def test_a_seed_has_64_bits(key: str) -> None:
    found = issue(f"--{key}={2**64}")
    assert found.key == key
    assert str(2**64) in found.what
    seed = load_spec([f"--run.seed={2**64 - 1}"]).run.seed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seed)) == seed  # as in the journal


def test_long_values_are_shortened() -> None:
    assert issue("--trainer.steps", "x" * 200).what == f'needs integer >= 1, was given "{"x" * 56}...'


def test_missing_values_are_reported_with_other_issues() -> None:
    found = issues("--trainer.stpes=1", "--dryrun")
    assert [(each.key, each.what) for each in found] == [
        ("--dryrun", "unknown option"),
        ("trainer.stpes", "unknown key"),
    ]
    assert issue("--dryrun").hint == "did you mean --dry-run?"


def test_issues_that_follow_from_a_missing_recipe_are_not_reported() -> None:
    broken = recipe("b.toml", "a = \n")
    assert [each.key for each in issues("@none.toml", broken, "--task.path=x")] == ["@none.toml", "b.toml:1"]


def test_text_in_a_recipe_that_looks_like_an_array_is_still_text() -> None:
    found = issue(recipe("a.toml", '[sampling]\nstop = "[END]"\n'))
    assert found.source == "a.toml:2"
    assert '["[END]"]' in found.hint


def test_unexpected_arguments() -> None:
    Path("settings").touch()
    found = issues("a.toml", "settings", "word")
    assert [(each.key, each.hint) for each in found] == [
        ("a.toml", "write @a.toml"),
        ("settings", "write @settings"),
        ("word", "write @recipe.toml or --section.key value"),
    ]


def test_issues_of_the_run_and_of_training_are_reported_together() -> None:
    found = issues("--batch.minibatches", "3", "--sampling.top_k", "5", "--sampling.temperature", "0")
    assert found[0].what.startswith("batch.minibatches = 3 does not divide batch.prompts = 8")
    assert [each.key for each in found[1:]] == ["sampling.top_k", "sampling.temperature"]


def test_other_purposes_allow_what_training_refuses() -> None:
    args = ["--sampling.top_k=5", "--sampling.temperature=0", "--batch.microbatch_tokens=1"]
    assert load_spec(args, purpose="generate").sampling.top_k == 5
    assert len(issues(*args)) == 3


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], "auto"),
        (["--trainer.activation_checkpointing"], True),
        (["--trainer.activation_checkpointing", "false"], False),
        (["--trainer.activation_checkpointing=true"], True),
        (["--trainer.activation_checkpointing", "selective", "--trainer.steps=3"], "selective"),
    ],
)
def test_a_flag_with_further_choices(words: list[str], value: object) -> None:
    assert load_spec(words).trainer.activation_checkpointing == value


@pytest.mark.parametrize(("given", "hint"), [("yes", "write true"), ("0", "write false"), ("full", "")])
def test_a_value_that_a_flag_with_further_choices_does_not_take(given: str, hint: str) -> None:
    (found,) = issues(f"--trainer.activation_checkpointing={given}")
    assert (found.key, found.hint) == ("trainer.activation_checkpointing", hint)
    assert found.what.startswith('needs true or false or one of "selective", "auto", was given')


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--task.kind=file", "--task.path=x", "--run.dir=runs/ü", "--algorithm.kl_stop=0.5"],
        ["--task.kind=reasoning_gym", "--task.name=n", '--task.params={a=1, "b c"=true, d=1.0, e="x"}'],
        ['--scoring.rewards=[{kind="regex", pattern="\\\\d+"}, {kind="length", target_tokens=3, weight=-0.5}]'],
        ["--sampling.top_k=5", "--sampling.temperature=0"],
    ],
)
def test_a_written_run_parses_back_equal(args: list[str]) -> None:
    spec = load_spec(args, purpose="generate")
    assert from_toml(to_toml(spec)) == spec


def test_paths_of_a_stored_run_start_at_the_given_folder(tmp_path: Path) -> None:
    text = '[task]\nkind = "file"\npath = "x.jsonl"\n'
    kept, moved = from_toml(text).task, from_toml(text, folder=tmp_path / "f").task
    assert isinstance(kept, FileTask)
    assert isinstance(moved, FileTask)
    assert (kept.path, moved.path) == (Path("x.jsonl"), tmp_path / "f/x.jsonl")


def test_issues_of_a_stored_run_name_its_file() -> None:
    (found,) = issues_of(lambda: from_toml("[run]\nseeed = 1\n", source="runs/x/config.toml"))
    assert found.source == "runs/x/config.toml:2"


def test_differences() -> None:
    old = RunSpec(run=RunConfig(seed=1))
    new = load_spec(["--run.seed=2", "--task.kind=file", "--task.path=/x", "--model.char.layers=2"])
    assert differences(old, old) == []
    assert differences(old, new) == [
        ("run.seed", 1, 2),
        ("model.char.layers", 4, 2),
        ("task.kind", "arithmetic", "file"),
        ("task.operators", "+", None),
        ("task.digits", 1, None),
        ("task.shots", 2, None),
        ("task.held_out_fraction", 0.25, 0.1),
        ("task.path", None, "/x"),
        ("task.sources", None, []),
        ("task.system_prompt", None, ""),
        ("task.index_above_mb", None, 256.0),
        ("task.max_prompt_tokens", None, 0),
    ]


def test_the_bounds_of_a_key_depend_on_the_kind() -> None:
    assert "integer >= 0" in issue("--pool.kind", "static", "--pool.workers", "-1").what
    assert "integer >= 1" in issue("--pool.kind", "synthetic", "--pool.workers", "0").what
