from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.issues import ConfigError
from tidemill.config.load import load_spec
from tidemill.config.pipeline import KINDS, PipelineSpec
from tidemill.config.schema import RunSpec
from tidemill.config.stages import load_recipe
from tidemill.core.errors import UserError

RECIPE = """\
[run]
name = "two"
seed = 7

[model]
source = "char"

[trainer]
steps = 5

[batch]
prompts = 4

[task]
shots = 0

[[stage]]
name = "first"
kind = "rl"
[stage.trainer]
steps = 2

[[stage]]
name = "second"
kind = "rl"
model.source = "stage:first"
[stage.batch]
group_size = 16

[[stage]]
name = "measured"
kind = "eval"
[stage.model]
source = "stage:second"
[stage.eval]
prompts = 9
"""
Load = Callable[..., PipelineSpec]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> None:
        (tmp_path / "r.toml").write_text(text, encoding="utf-8")

    return written


@pytest.fixture
def load(write: Callable[[str], None]) -> Load:
    write(RECIPE)

    def loaded(*argv: str) -> PipelineSpec:
        recipe = load_recipe(["@r.toml", *argv])
        assert isinstance(recipe, PipelineSpec)
        return recipe

    return loaded


def steps(pipeline: PipelineSpec) -> list[int]:
    return [stage.spec.trainer.steps for stage in pipeline.stages]


def faults(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(["@r.toml", *argv])
    return str(caught.value).splitlines()


def test_top_level_sections_are_defaults_and_a_stage_wins(load: Load) -> None:
    pipeline = load()
    first, second, measured = pipeline.stages
    assert (pipeline.run.name, pipeline.directory) == ("two", Path("runs/two"))
    assert [stage.name for stage in pipeline.stages] == ["first", "second", "measured"]
    assert (first.spec.model.source, second.spec.model.source) == ("char", "stage:first")
    assert (first.spec.trainer.steps, second.spec.trainer.steps) == (2, 5)
    assert (first.spec.batch.prompts, first.spec.batch.group_size) == (4, 8)
    assert (second.spec.batch.prompts, second.spec.batch.group_size) == (4, 16)
    assert (measured.spec.eval.prompts, first.spec.eval.prompts) == (9, 64)
    assert measured.spec.batch == RunSpec().batch  # a kind that has no such section does not get its defaults
    assert [stage.needs for stage in pipeline.stages] == [(), ("first",), ("second",)]


def test_the_run_belongs_to_the_pipeline_and_its_seed_to_the_stages(load: Load) -> None:
    pipeline = load("--run.dir=D", "--stage.second.run.seed=8")
    assert pipeline.directory == Path("D")
    assert [stage.spec.run.name for stage in pipeline.stages] == ["first", "second", "measured"]
    assert [stage.spec.run.dir for stage in pipeline.stages] == [None] * 3
    assert [stage.spec.run.seed for stage in pipeline.stages] == [7, 8, 7]


def test_overrides_reach_one_stage_or_all(load: Load) -> None:
    assert steps(load()) == [2, 5, 5]
    assert steps(load("--stage.second.trainer.steps", "3")) == [2, 3, 5]
    assert steps(load("--trainer.steps=9")) == [9, 9, 9]  # also where the recipe's stage has a value of its own
    assert steps(load("--stage.first.trainer.steps=1", "--trainer.steps=9")) == [1, 9, 9]  # whatever the order
    assert load("--stage.first.engine.batch_invariant").stages[0].spec.engine.batch_invariant  # a flag


def test_an_override_of_all_goes_around_what_one_stage_takes_from_another(load: Load) -> None:
    sources = [stage.spec.model.source for stage in load("--model.source=smollm2-135m").stages]
    assert sources == ["smollm2-135m", "stage:first", "stage:second"]
    asked = load("--stage.second.model.source=smollm2-135m").stages[1]
    assert asked.spec.model.source == "smollm2-135m"
    assert asked.needs == ()


def test_a_later_recipe_adds_to_a_stage_of_the_same_name(load: Load) -> None:
    Path("small.toml").write_text(
        '[[stage]]\nname = "second"\ntrainer.steps = 1\n[[stage]]\nname = "third"\nkind = "export"\n', encoding="utf-8"
    )
    pipeline = load("@small.toml")
    assert [stage.name for stage in pipeline.stages] == ["first", "second", "measured", "third"]
    assert steps(pipeline)[:2] == [2, 1]
    assert pipeline.stages[1].needs == ("first",)


def test_a_later_recipe_may_have_defaults_only(load: Load) -> None:
    Path("short.toml").write_text("[trainer]\nsteps = 1\n", encoding="utf-8")
    assert steps(load("@short.toml")) == [2, 1, 1]  # what a stage says of itself is stronger than any recipe's default


def test_input_paths_start_at_the_recipes_folder_but_references_are_no_paths(
    write: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "r.toml").write_text(
        '[[stage]]\nname = "a"\nkind = "eval"\ntask = { kind = "jsonl", path = "x.jsonl" }\n'
        '[[stage]]\nname = "b"\nkind = "eval"\ntask = { kind = "jsonl", path = "stage:a" }\n',
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r'stage.b.task.path: asks for prompts, and "stage:a"'):
        load_recipe(["@sub/r.toml"])
    changed = load_recipe(["@sub/r.toml", "--stage.b.task.path=y.jsonl"])
    assert isinstance(changed, PipelineSpec)
    assert [stage.sections()["task"]["path"] for stage in changed.stages] == [
        str(tmp_path / "sub" / "x.jsonl"),
        str(tmp_path / "y.jsonl"),
    ]


def test_a_section_that_no_stage_has_a_use_for_is_told_and_no_fault(load: Load, write: Callable[[str], None]) -> None:
    assert load().unused == ()
    write("[preference]\nbeta = 0.2\n\n" + RECIPE)
    assert load().unused == ("r.toml:1: no stage has a use for [preference] (kinds that do: dpo)",)


def test_a_recipe_without_stages_is_a_run(tmp_path: Path) -> None:
    recipe = load_recipe(["--trainer.steps=3"])
    assert isinstance(recipe, RunSpec)
    assert recipe == load_spec(["--trainer.steps=3"])


def test_other_verbs_do_not_take_stages(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"stage: a recipe of several stages, and this is for one run \(r.toml:17\)"):
        load_spec(["@r.toml"], purpose="eval")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--stage.sekond.trainer.steps=3"],
            "--stage.sekond: no stage of that name; did you mean second?",
        ),
        (["--stage.xyz.trainer.steps=3"], "--stage.xyz: no stage of that name; stages: first, second, measured"),
        (["--stage.second=3"], "--stage.second: sets no key; write --stage.second.section.key VALUE"),
        (["--stage=3"], "--stage: sets no key; write --stage.NAME.section.key VALUE"),
        (
            ["--stage.second.trainer.stpes=3"],
            "trainer.stpes: unknown key (command line, stage second); did you mean trainer.steps?",
        ),
        (
            ["--stage.second.trainer.steps=many"],
            'trainer.steps: needs integer >= 1, was given "many" (command line, stage second)',
        ),
        (["--stage.second.trainer.steps"], "--stage.second.trainer.steps: needs a value"),
        (["--trainer.steps=many"], 'trainer.steps: needs integer >= 1, was given "many" (command line)'),
        (["--trianer.steps=3"], "trianer: unknown section (command line); did you mean trainer?"),
        (
            ["--export.dtype=bf16"],
            (
                "export: no stage of this recipe has such a section (command line); leave it out, or "
                "add a stage of kind export"
            ),
        ),
        (
            ["--stage.measured.batch.prompts=3"],
            "batch: a stage of kind eval has no such section (command line, stage measured); leave it out (rl has it)",
        ),
        (
            ["--stage.first.run.dir=x"],
            (
                "run.dir: belongs to the whole pipeline (command line, stage first); set run.dir at the top of the "
                "recipe; each stage gets a folder of its own name below it"
            ),
        ),
        (
            ["--stage.second.kind=rll"],
            (
                'stage.second.kind: needs one of "demonstrations", "pairs", "sft", "reward_model", "dpo", "rl", '
                '"eval", "export", was given '
                "'rll' (command line, stage second); did you mean rl?"
            ),
        ),
        (
            ["--stage.first.batch.minibatches=3"],
            (
                "batch.minibatches = 3 does not divide batch.prompts = 4 (stage first); make prompts a "
                "multiple of minibatches"
            ),
        ),
        (["--stage.first.sampling.top_p=0.5"], "sampling.top_p: 0.5 cannot be trained on"),
    ],
)
def test_faults_of_overrides(load: Load, argv: list[str], says: str) -> None:
    found = faults(*argv)
    assert len(found) == 1
    assert found[0].startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[stage.a]\nkind = "rl"\n', "stage: is an array of tables (r.toml); write [[stage]]"),
        ("stage = []\n", "stage: is empty (r.toml); give at least one"),
        ('[[stage]]\nkind = "rl"\n', "stage[0].name: not given (r.toml:1); give the stage a name"),
        ('[[stage]]\nname = "a b"\nkind = "rl"\n', "stage[0].name: 'a b' cannot name a stage (r.toml:1); use letters"),
        ('[[stage]]\nname = "a"\n', "stage.a.kind: not given (r.toml:1, stage a); give one of "),
        (
            '[[stage]]\nname = "a"\nkind = "rl"\n[[stage]]\nname = "a"\nkind = "eval"\n',
            'stage[1].name: two stages are called "a" (r.toml:4); rename one of them',
        ),
        (
            '[[stage]]\nname = "a"\nkind = "sft"\n',
            "data.path: not given, and there is no default (stage a); give --stage.a.data.path VALUE",
        ),
        (
            '[[stage]]\nname = "a"\nkind = "rl"\n[stage.trainer]\nsteps = 3\nstesp = 3\n',
            "trainer.stesp: unknown key (r.toml:6, stage a); did you mean trainer.steps?",
        ),
        (
            (
                '[[stage]]\nname = "a"\nkind = "rl"\n[[stage]]\nname = "b"\nkind = "rl"\n[[stage.scoring.rewards]]\n'
                'kind = "exact"\n[[stage.scoring.rewards]]\nkind = "exakt"\n'
            ),
            'scoring.rewards[1].kind: needs one of "exact"',
        ),
    ],
)
def test_faults_of_recipes(write: Callable[[str], None], text: str, says: str) -> None:
    write(text)
    found = faults()
    assert len(found) == 1
    assert found[0].startswith(says)


def test_a_fault_of_the_defaults_is_told_once_and_every_stage_is_looked_at(write: Callable[[str], None]) -> None:
    stage = '[[stage]]\nname = "{}"\nkind = "rl"\nbatch.prompt = 2\n'
    write("[trainer]\nsteps = 0\n" + stage.format("a") + stage.format("b"))
    assert [line.partition(";")[0] for line in faults()] == [
        "batch.prompt: unknown key (r.toml:6, stage a)",
        "trainer.steps: needs integer >= 1, was given 0 (r.toml:2)",
        "batch.prompt: unknown key (r.toml:10, stage b)",
    ]


def test_one_faulty_stage_does_not_hide_who_takes_what_from_whom(write: Callable[[str], None]) -> None:
    names = [
        f'[[stage]]\nname = "{name}"\nkind = "{kind}"\nmodel.source = "{source}"\n'
        for name, kind, source in [("a", "sft", "char"), ("b", "eval", "stage:nope"), ("c", "eval", "stage:a")]
    ]
    write("".join(names))
    assert faults("@r.toml") == [
        "data.path: not given, and there is no default (stage a); give --stage.a.data.path VALUE",
        'stage.b.model.source: "stage:nope" names no stage; stages before it: none',
    ]


def test_a_missing_recipe_is_told_without_what_follows_from_it(load: Load) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(["@r.toml", "@nowhere.toml", "--stage.xyz.trainer.steps=3"])
    assert "@nowhere.toml: no such file" in str(caught.value)
    assert "xyz" not in str(caught.value)


def test_kinds_know_sections_that_there_are() -> None:
    for kind, row in KINDS.items():
        assert set(row.sections) <= set(RunSpec.model_fields), kind
        assert {key.partition(".")[0] for key in row.neutral} <= set(row.sections), kind
    assert set(KINDS["rl"].sections) == set(RunSpec.model_fields) - {
        "data",
        "supervised",
        "reward_model",
        "preference",
        "data_generation",
        "export",
    }
