from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tidemill.config.issues import ConfigError
from tidemill.config.load import differences, from_toml, load_spec
from tidemill.config.schema import RunConfig, RunSpec
from tidemill.config.task import ArithmeticTask, JsonlTask, ReasoningGymTask
from tidemill.config.toml import to_toml

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
PIPELINES = ("rlhf",)  # tested with the stages


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"@{name}"


def lines(*args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_spec(args)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_nothing_is_the_default_run() -> None:
    assert load_spec([]) == RunSpec()


def test_recipes_from_left_to_right_then_overrides() -> None:
    first = recipe("a.toml", '[run]\nname = "a"\nseed = 1\n[trainer]\nsteps = 3\n[sampling]\nstop = ["x", "y"]\n')
    second = recipe("b.toml", '[run]\nname = "b"\n[sampling]\nstop = ["z"]\n')
    # Overrides win even where they stand before a recipe.
    spec = load_spec(["--trainer.steps", "7", first, second, "--run.seed=-0"])
    assert (spec.run.name, spec.run.seed, spec.trainer.steps, spec.sampling.stop) == ("b", 0, 7, ("z",))


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem not in PIPELINES], ids=lambda path: path.stem)
def test_the_projects_own_recipes_are_valid(path: Path) -> None:
    spec = load_spec([f"@{path}"])
    assert spec != RunSpec()
    assert from_toml(to_toml(spec)) == spec


def test_types_are_exact_but_numbers_widen() -> None:
    assert load_spec(["--sampling.temperature", "2"]).sampling.temperature == 2.0
    assert lines(recipe("a.toml", '[trainer]\nsteps = "5"\n')) == [
        'trainer.steps: needs integer >= 1, was given "5" (a.toml:2)'
    ]
    assert lines("--trainer.steps", "5.5") == ["trainer.steps: needs integer >= 1, was given 5.5 (command line)"]
    assert lines("--engine.batch_invariant=1") == [
        "engine.batch_invariant: needs true or false, was given 1 (command line)"
    ]


def test_a_changed_kind_drops_the_old_keys() -> None:
    jsonl = recipe("a.toml", '[task]\nkind = "jsonl"\npath = "x.jsonl"\n')
    assert load_spec([jsonl, "--task.kind", "arithmetic"]).task == ArithmeticTask()
    spec = load_spec([jsonl, "--task.name", "gym", "--task.kind", "reasoning_gym", "--task.params.depth=2"])
    assert spec.task == ReasoningGymTask(kind="reasoning_gym", name="gym", params={"depth": 2})


def test_a_table_without_kind_keeps_the_default_kind() -> None:
    assert load_spec([recipe("a.toml", "[task]\ndigits = 2\n")]).task == ArithmeticTask(digits=2)


def test_paths_start_at_the_recipe_or_the_working_directory(tmp_path: Path) -> None:
    jsonl = recipe("sub/a.toml", '[task]\nkind = "jsonl"\npath = "../data/x.jsonl"\n')
    task = load_spec([jsonl]).task
    assert isinstance(task, JsonlTask)
    assert task.path == tmp_path / "data/x.jsonl"
    task = load_spec([jsonl, "--task.path", "y.jsonl"]).task
    assert isinstance(task, JsonlTask)
    assert task.path == tmp_path / "y.jsonl"


def test_every_fault_at_once_each_a_line_with_its_place() -> None:
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
    assert lines(recipe("a.toml", text), "--sampling.top_p", "2", "--batch.order=arival") == [
        "run.seed: needs integer >= 0 and <= 18446744073709551615, was given -1 (a.toml:2)",
        (
            'scoring.rewards[1].kind: needs one of "exact", "numeric", "math_verify", "regex", "length", '
            '"task", "random", "python", "model", "http", was given "regx" (a.toml:10); did you mean "regex"?'
        ),
        "scoring.rewards[1].wieght: unknown key (a.toml:11); did you mean scoring.rewards[].weight?",
        "sampling.top_p: needs number > 0 and <= 1, was given 2 (command line)",
        'batch.order: needs one of "canonical", "arrival", was given "arival" (command line); did you mean "arrival"?',
        "trainer.stpes: unknown key (a.toml:4); did you mean trainer.steps?",
        "herd: unknown section (a.toml:5); `tidemill train --help` lists every key",
    ]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ("--task.path", "x"),
            (
                'task.path: belongs to task.kind = "file", and the kind here is "arithmetic" (command line); '
                "change the kind or leave the key out"
            ),
        ),
        (
            ("--task.kind", "jsonl"),
            (
                "task.path: not given, and there is no default (command line); "
                'give --task.path VALUE (path, which task.kind = "jsonl" needs)'
            ),
        ),
        (
            ("--task.kind", "jsonk"),
            (
                'task.kind: needs one of "arithmetic", "reasoning_gym", "file", "jsonl", was given "jsonk" '
                '(command line); did you mean "jsonl"?'
            ),
        ),
        (
            ("--trainer", "5"),
            (
                "trainer: is a table of settings, was given 5 (command line); "
                "set its keys one by one: trainer.steps, trainer.precision, trainer.device, ..."
            ),
        ),
        (
            ("--task", "5"),
            (
                "task: is a table of settings, was given 5 (command line); "
                "set its keys one by one: task.kind, task.operators, task.digits, ..."
            ),
        ),
        (
            ("--scoring.rewards", "[{weight=1.0}]"),
            (
                "scoring.rewards[0].kind: not given, and there is no default (command line); add kind to that table "
                '(one of "exact", "numeric", "math_verify", "regex", "length", "task", "random", "python", "model", '
                '"http")'
            ),
        ),
        (("--scoring.rewards", "[]"), "scoring.rewards: is empty (command line); give at least one"),
        (("--scoring.rewards", "[3]"), "scoring.rewards[0]: needs table, was given 3 (command line)"),
        (
            ("--sampling.stop", "x"),
            'sampling.stop: needs array of text, was given "x" (command line); write it in brackets: ["x"]',
        ),
        (
            ("--sampling.stop", "[x]"),
            (
                'sampling.stop: needs array of text, was given "[x]" (command line); '
                "it is not valid TOML: close every bracket and quote every text"
            ),
        ),
        (
            ("--scoring.rewards", "[{kind='exact'"),
            (
                "scoring.rewards: needs array of tables, was given \"[{kind='exact'\" (command line); "
                "it is not valid TOML: close every bracket and quote every text"
            ),
        ),
        (
            ("--scoring.rewards", "3"),
            (
                "scoring.rewards: needs array of tables, was given 3 (command line); "
                "write each table in braces, and brackets around them: [{ KEY = VALUE }]"
            ),
        ),
        (
            ("--sampling.stop", '["x", ""]'),
            "sampling.stop[1]: is empty (command line); give at least one character, or leave it out",
        ),
        (("--sampling.stop", "[1]"), "sampling.stop[0]: needs text, was given 1 (command line)"),
        (
            ("--telemetry.sinks", '["wandbb"]'),
            (
                'telemetry.sinks[0]: needs one of "tensorboard", "wandb", "trackio", was given "wandbb" '
                '(command line); did you mean "wandb"?'
            ),
        ),
        (
            ("--optimizer.betas", "[0.9]"),
            (
                "optimizer.betas: needs array of 2: number >= 0 and < 1, number >= 0 and < 1, "
                "was given [0.9] (command line)"
            ),
        ),
        (
            ("--optimizer.betas", "[0.9, 1.5]"),
            "optimizer.betas[1]: needs number >= 0 and < 1, was given 1.5 (command line)",
        ),
        (
            ("--task.kind=reasoning_gym", "--task.name=x", "--task.params.a=[1]"),
            "task.params.a: needs true or false or integer or number or text, was given [1] (command line)",
        ),
        (
            ("--run.seed.x", "3"),
            'run.seed: needs integer >= 0 and <= 18446744073709551615, was given {"x": 3} (command line)',
        ),
        (
            ("--optimizer.learning_rate", "nan"),
            "optimizer.learning_rate: needs number > 0, was given NaN (command line)",
        ),
        (
            ("--model.char.hidden_size", "30"),
            "model.char: heads = 4 does not divide hidden_size = 30 (command line); make it a multiple of heads",
        ),
        (("--run.name=",), "run.name: is empty (command line); give at least one character, or leave it out"),
        (("--steps", "5"), "steps: unknown key (command line); did you mean trainer.steps?"),
    ],
)
def test_faults(args: tuple[str, ...], line: str) -> None:
    assert lines(*args) == [line]


NO_TABLE = "trainer: is a table of settings, was given 3 ({}); set its keys one by one: trainer.steps"


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
    (line,) = lines(recipe("r.toml", text), *args)
    assert line.startswith(NO_TABLE.format(source))


def test_a_value_in_place_of_a_section_is_refused_in_the_first_of_two_recipes() -> None:
    a = recipe("a.toml", "[model]\nchar = 4\n")
    b = recipe("b.toml", "[model.char]\nlayers = 1\n[trainer]\nstpes = 1\n")
    first, second = lines(a, b)
    assert first.startswith("model.char: is a table of settings, was given 4 (a.toml:2)")
    assert second.startswith("trainer.stpes: unknown key (b.toml:4)")


def test_keys_of_a_section_add_to_its_inline_table_in_any_order() -> None:
    for args in itertools.permutations(("--trainer={steps = 2}", "--trainer.precision=fp32")):
        trainer = load_spec(args).trainer
        assert (trainer.steps, trainer.precision) == (2, "fp32")


@pytest.mark.parametrize(
    "name", ["..", ".", "../outside", "/outside", "a/b", "a/../../b", "a/", "~/x", "a\0b", "a\nb", "x" * 256]
)
def test_a_run_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.name: .* cannot name a folder .*; use letters, digits"):
        from_toml(f"run.name = {json.dumps(name)}\n")


@pytest.mark.parametrize("name", ["grpo-0.1_b", "two words", "größe", "@x", "-5"])
def test_a_run_name_is_the_folder_under_runs(name: str) -> None:
    assert from_toml(f'run.name = "{name}"\n').directory == Path("runs", name)


@pytest.mark.parametrize("key", ["run.dir", "export.path"])
def test_an_empty_folder_to_write_to_is_not_the_working_directory(key: str) -> None:
    hint = 'name a folder ("." is the working directory), or leave it out'
    assert lines(f"--{key}=") == [f"{key}: is empty (command line); {hint}"]
    assert load_spec(["--run.dir=."]).directory == Path()


@pytest.mark.parametrize("key", ["run.seed", "model.lora.seed"])
def test_a_seed_has_64_bits(key: str) -> None:
    words = f"needs integer >= 0 and <= {2**64 - 1}, was given {2**64}"
    assert lines(f"--{key}={2**64}") == [f"{key}: {words} (command line)"]
    seed = load_spec([f"--run.seed={2**64 - 1}"]).run.seed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seed)) == seed  # as in the ledger


def test_long_values_are_cut_short() -> None:
    (line,) = lines("--trainer.steps", "x" * 200)
    assert line == f'trainer.steps: needs integer >= 1, was given "{"x" * 56}... (command line)'


def test_missing_options_are_told_with_the_rest() -> None:
    assert lines("--trainer.stpes=1", "--dryrun") == [
        "--dryrun: unknown option; did you mean --dry-run?",
        "trainer.stpes: unknown key (command line); did you mean trainer.steps?",
    ]
    assert len(lines("--dryrun")) == 1


def test_with_a_recipe_missing_its_consequences_are_not_told() -> None:
    broken = recipe("b.toml", "a = \n")
    assert [line.split(":")[0] for line in lines("@none.toml", broken, "--task.path=x")] == ["@none.toml", "b.toml"]


def test_text_in_a_recipe_that_looks_like_an_array_is_still_text() -> None:
    (line,) = lines(recipe("a.toml", '[sampling]\nstop = "[END]"\n'))
    assert line.endswith('was given "[END]" (a.toml:2); write it in brackets: ["[END]"]')


def test_stray_arguments() -> None:
    Path("settings").touch()
    assert lines("a.toml", "settings", "word") == [
        "a.toml: a recipe is named with @ before it; write @a.toml",
        "settings: a recipe is named with @ before it; write @settings",
        "word: unexpected argument; write @recipe.toml or --section.key value",
    ]


def test_contradictions_of_the_run_and_of_training_are_told_together() -> None:
    found = lines("--batch.minibatches", "3", "--sampling.top_k", "5", "--sampling.temperature", "0")
    assert [line.split(";")[0].split(":")[0] for line in found] == [
        "batch.minibatches = 3 does not divide batch.prompts = 8",
        "sampling.top_k",
        "sampling.temperature",
    ]


def test_other_purposes_allow_what_training_refuses() -> None:
    args = ["--sampling.top_k=5", "--sampling.temperature=0", "--batch.microbatch_tokens=1"]
    assert load_spec(args, purpose="generate").sampling.top_k == 5
    assert len(lines(*args)) == 3


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--task.kind=jsonl", "--task.path=x", "--run.dir=runs/ü", "--algorithm.kl_stop=0.5"],
        ["--task.kind=reasoning_gym", "--task.name=n", '--task.params={a=1, "b c"=true, d=1.0, e="x"}'],
        ['--scoring.rewards=[{kind="regex", pattern="\\\\d+"}, {kind="length", target_tokens=3, weight=-0.5}]'],
        ["--sampling.top_k=5", "--sampling.temperature=0"],
    ],
)
def test_a_run_reads_back_as_written(args: list[str]) -> None:
    spec = load_spec(args, purpose="generate")
    assert from_toml(to_toml(spec)) == spec


def test_a_stored_run_has_its_paths_where_it_says(tmp_path: Path) -> None:
    text = '[task]\nkind = "jsonl"\npath = "x.jsonl"\n'
    kept, moved = from_toml(text).task, from_toml(text, folder=tmp_path / "f").task
    assert isinstance(kept, JsonlTask)
    assert isinstance(moved, JsonlTask)
    assert (kept.path, moved.path) == (Path("x.jsonl"), tmp_path / "f/x.jsonl")


def test_faults_of_a_stored_run_name_its_file() -> None:
    with pytest.raises(ConfigError, match=r"runs/x/config\.toml:2"):
        from_toml("[run]\nseeed = 1\n", source="runs/x/config.toml")


def test_differences() -> None:
    old = RunSpec(run=RunConfig(seed=1))
    new = load_spec(["--run.seed=2", "--task.kind=jsonl", "--task.path=/x", "--model.char.layers=2"])
    assert differences(old, old) == []
    assert differences(old, new) == [
        ("run.seed", 1, 2),
        ("model.char.layers", 4, 2),
        ("task.kind", "arithmetic", "jsonl"),
        ("task.operators", "+", None),
        ("task.digits", 1, None),
        ("task.shots", 2, None),
        ("task.held_out_fraction", 0.25, 0.1),
        ("task.path", None, "/x"),
    ]


def test_of_several_kinds_keys_the_one_of_the_kind_given_is_meant() -> None:
    static = lines("--pool.kind", "static", "--pool.workers", "-1")
    assert static == ["pool.workers: needs integer >= 0, was given -1 (command line)"]
    synthetic = lines("--pool.kind", "synthetic", "--pool.workers", "0")
    assert synthetic == ["pool.workers: needs integer >= 1, was given 0 (command line)"]
