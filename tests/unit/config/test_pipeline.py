from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.config_issues import issues_of
from tidemill.config.issues import ConfigError, ConfigIssue
from tidemill.config.load import load_spec
from tidemill.config.pipeline import KINDS, PipelineSpec, StageKind, StageSpec, graph_issues, load_recipe
from tidemill.config.schema import RunSpec

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


def issues(*argv: str) -> list[ConfigIssue]:
    return issues_of(lambda: load_recipe(["@r.toml", *argv]))


def test_top_level_sections_are_defaults_of_stages(load: Load) -> None:
    pipeline = load()
    first, second, measured = pipeline.stages
    assert (pipeline.run.name, pipeline.directory) == ("two", Path("runs/two"))
    assert [stage.name for stage in pipeline.stages] == ["first", "second", "measured"]
    assert (first.spec.model.source, second.spec.model.source) == ("char", "stage:first")
    assert (first.spec.trainer.steps, second.spec.trainer.steps) == (2, 5)
    assert (first.spec.batch.prompts, first.spec.batch.group_size) == (4, 8)
    assert (second.spec.batch.prompts, second.spec.batch.group_size) == (4, 16)
    assert (measured.spec.eval.prompts, first.spec.eval.prompts) == (9, 64)
    assert measured.spec.batch == RunSpec().batch  # eval has no [batch]
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
    assert steps(load("--trainer.steps=9")) == [9, 9, 9]  # overrides the recipe's stages too
    assert steps(load("--stage.first.trainer.steps=1", "--trainer.steps=9")) == [1, 9, 9]  # whatever the order
    assert load("--stage.first.engine.batch_invariant").stages[0].spec.engine.batch_invariant  # a flag


def test_an_override_of_all_stages_keeps_references(load: Load) -> None:
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
    assert steps(load("@short.toml")) == [2, 1, 1]  # a stage's own value overrides the defaults of every recipe


def test_input_paths_start_at_the_recipes_folder_and_references_are_not_paths(
    write: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "r.toml").write_text(
        '[[stage]]\nname = "a"\nkind = "eval"\ntask = { kind = "file", path = "x.jsonl" }\n'
        '[[stage]]\nname = "b"\nkind = "eval"\ntask = { kind = "file", path = "stage:a" }\n',
        encoding="utf-8",
    )
    (issue,) = issues_of(lambda: load_recipe(["@sub/r.toml"]))
    assert issue.key == "stage.b.task.path"
    assert "needs prompts" in issue.what
    changed = load_recipe(["@sub/r.toml", "--stage.b.task.path=y.jsonl"])
    assert isinstance(changed, PipelineSpec)
    assert [stage.sections()["task"]["path"] for stage in changed.stages] == [
        str(tmp_path / "sub" / "x.jsonl"),
        str(tmp_path / "y.jsonl"),
    ]


def test_a_section_that_no_stage_uses_is_reported_and_not_an_error(load: Load, write: Callable[[str], None]) -> None:
    assert load().unused == ()
    write("[preference]\nbeta = 0.2\n\n" + RECIPE)
    (message,) = load().unused
    assert message.startswith("r.toml:1: no stage uses [preference]")
    assert "dpo" in message


def test_a_recipe_without_stages_is_a_run(tmp_path: Path) -> None:
    recipe = load_recipe(["--trainer.steps=3"])
    assert isinstance(recipe, RunSpec)
    assert recipe == load_spec(["--trainer.steps=3"])


def test_other_commands_refuse_stages(load: Load) -> None:
    (issue,) = issues_of(lambda: load_spec(["@r.toml"], purpose="eval"))
    assert (issue.key, issue.source) == ("stage", "r.toml:17")


@pytest.mark.parametrize(
    ("argv", "key", "source", "what", "hint"),
    [
        (["--stage.sekond.trainer.steps=3"], "--stage.sekond", "", "no stage of that name", "did you mean second?"),
        (["--stage.xyz.trainer.steps=3"], "--stage.xyz", "", "no stage of that name", "first, second, measured"),
        (["--stage.second=3"], "--stage.second", "", "needs a key", "--stage.second.section.key VALUE"),
        (["--stage=3"], "--stage", "", "needs a key", "--stage.NAME.section.key VALUE"),
        (
            ["--stage.second.trainer.stpes=3"],
            "trainer.stpes",
            "command line, stage second",
            "unknown key",
            "did you mean trainer.steps?",
        ),
        (["--stage.second.trainer.steps=many"], "trainer.steps", "command line, stage second", '"many"', ""),
        (["--stage.second.trainer.steps"], "--stage.second.trainer.steps", "", "needs a value", "VALUE"),
        (["--trainer.steps=many"], "trainer.steps", "command line", '"many"', ""),
        (["--trianer.steps=3"], "trianer", "command line", "unknown section", "did you mean trainer?"),
        (["--export.dtype=bf16"], "export", "command line", "no stage of this recipe", "a stage of kind export"),
        (["--stage.measured.batch.prompts=3"], "batch", "command line, stage measured", "kind eval", "(rl has it)"),
        (["--stage.first.run.dir=x"], "run.dir", "command line, stage first", "whole pipeline", "top of the recipe"),
        (["--stage.second.kind=rll"], "stage.second.kind", "command line, stage second", "'rll'", "did you mean rl?"),
        (
            ["--stage.first.batch.minibatches=3"],
            "",
            "stage first",
            "batch.minibatches = 3 does not divide batch.prompts = 4",
            "multiple of minibatches",
        ),
        (["--stage.first.sampling.top_p=0.5"], "sampling.top_p", "stage first", "0.5", "sampling.top_p = 1"),
    ],
)
def test_an_invalid_override_is_one_issue(
    load: Load, argv: list[str], key: str, source: str, what: str, hint: str
) -> None:
    (issue,) = issues(*argv)
    assert (issue.key, issue.source) == (key, source)
    assert what in issue.what
    assert hint in issue.hint


@pytest.mark.parametrize(
    ("text", "key", "source", "what"),
    [
        ('[stage.a]\nkind = "rl"\n', "stage", "r.toml", "needs an array of tables"),
        ("stage = []\n", "stage", "r.toml", "is empty"),
        ('[[stage]]\nkind = "rl"\n', "stage[0].name", "r.toml:1", "missing"),
        ('[[stage]]\nname = "a b"\nkind = "rl"\n', "stage[0].name", "r.toml:1", "'a b'"),
        ('[[stage]]\nname = "a"\n', "stage.a.kind", "r.toml:1, stage a", "missing"),
        (
            '[[stage]]\nname = "a"\nkind = "rl"\n[[stage]]\nname = "a"\nkind = "eval"\n',
            "stage[1].name",
            "r.toml:4",
            'two stages have the name "a"',
        ),
        ('[[stage]]\nname = "a"\nkind = "sft"\n', "data.path", "stage a", "missing"),
        (
            '[[stage]]\nname = "a"\nkind = "rl"\n[stage.trainer]\nsteps = 3\nstesp = 3\n',
            "trainer.stesp",
            "r.toml:6, stage a",
            "unknown key",
        ),
        (
            (
                '[[stage]]\nname = "a"\nkind = "rl"\n[[stage]]\nname = "b"\nkind = "rl"\n[[stage.scoring.rewards]]\n'
                'kind = "exact"\n[[stage.scoring.rewards]]\nkind = "exakt"\n'
            ),
            "scoring.rewards[1].kind",
            "r.toml:10, stage b",
            '"exakt"',
        ),
    ],
)
def test_an_invalid_stage_is_one_issue(
    write: Callable[[str], None], text: str, key: str, source: str, what: str
) -> None:
    write(text)
    (issue,) = issues()
    assert (issue.key, issue.source) == (key, source)
    assert what in issue.what


def test_an_issue_of_the_defaults_is_reported_once_and_every_stage_is_checked(write: Callable[[str], None]) -> None:
    stage = '[[stage]]\nname = "{}"\nkind = "rl"\nbatch.prompt = 2\n'
    write("[trainer]\nsteps = 0\n" + stage.format("a") + stage.format("b"))
    assert [(issue.key, issue.source) for issue in issues()] == [
        ("batch.prompt", "r.toml:6, stage a"),
        ("trainer.steps", "r.toml:2"),
        ("batch.prompt", "r.toml:10, stage b"),
    ]


def test_an_invalid_stage_does_not_hide_issues_of_references(write: Callable[[str], None]) -> None:
    names = [
        f'[[stage]]\nname = "{name}"\nkind = "{kind}"\nmodel.source = "{source}"\n'
        for name, kind, source in [("a", "sft", "char"), ("b", "eval", "stage:nope"), ("c", "eval", "stage:a")]
    ]
    write("".join(names))
    assert [issue.key for issue in issues("@r.toml")] == ["data.path", "stage.b.model.source"]


def test_issues_that_follow_from_a_missing_recipe_are_not_reported(load: Load) -> None:
    (issue,) = issues("@nowhere.toml", "--stage.xyz.trainer.steps=3")
    assert (issue.key, issue.what) == ("@nowhere.toml", "no such file")


def test_the_cluster_is_that_of_all_stages(load: Load) -> None:
    loaded = load("--deploy.target=gke", "--deploy.image=a", "--deploy.queue=research")
    assert (loaded.deploy.target, loaded.deploy.queue, loaded.unused) == ("gke", "research", ())
    assert not any("deploy" in stage.sections() for stage in loaded.stages)


def test_the_sections_of_kinds_exist() -> None:
    for kind, row in KINDS.items():
        assert set(row.sections) <= set(RunSpec.model_fields), kind
    assert set(KINDS["rl"].sections) == set(RunSpec.model_fields) - {
        "data",
        "supervised",
        "reward_model",
        "preference",
        "data_generation",
        "export",
        *("robot", "control", "clone", "optimise", "identify", "twin", "bundle"),
        "deploy",
    }


def stage(name: str, source: str = "char", kind: StageKind = "rl", critic: str | None = None) -> StageSpec:
    spec = RunSpec.model_validate({"model": {"source": source}, "critic": {"source": critic}})
    return StageSpec(name=name, kind=kind, spec=spec)


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [stage("a")],
        [stage("a"), stage("b", "stage:a"), stage("c", "stage:a"), stage("d", "stage:c", "eval")],
        [stage("a", kind="sft"), stage("b", "stage:a", "dpo"), stage("c", "stage:b", "export"), stage("d", "stage:c")],
        [stage("rm", kind="reward_model"), stage("b", critic="stage:rm")],
    ],
)
def test_valid_references(stages: Sequence[StageSpec]) -> None:
    assert graph_issues(stages) == []


@pytest.mark.parametrize(
    ("stages", "key", "what", "hint"),
    [
        ([stage("sft"), stage("b", "stage:stf")], "stage.b.model.source", '"stage:stf"', "did you mean sft?"),
        ([stage("sft"), stage("b", "stage:xyz")], "stage.b.model.source", '"stage:xyz"', "stages before it: sft"),
        ([stage("a", "stage:")], "stage.a.model.source", '"stage:" names no stage', "stages before it: none"),
        (
            [stage("a", "stage:b"), stage("b")],
            "stage.a.model.source",
            '"stage:b" is a later stage',
            "move stage b before stage a",
        ),
        (
            [stage("m", kind="reward_model"), stage("b", "stage:m")],
            "stage.b.model.source",
            'needs a model, and "stage:m" is of kind reward_model, which outputs a reward model',
            "sft or dpo or rl or export",
        ),
        (
            [stage("e", kind="eval"), stage("b", "stage:e")],
            "stage.b.model.source",
            'needs a model, and "stage:e" is of kind eval, which outputs nothing',
            "sft or dpo or rl or export",
        ),
        ([stage("a", "stage:a")], "stage", "a → a", ""),
        (
            [stage("x"), stage("a", "stage:c"), stage("b", "stage:a"), stage("c", "stage:b")],
            "stage",
            "a → c → b → a",
            "",
        ),
    ],
)
def test_an_invalid_reference_is_one_issue(stages: Sequence[StageSpec], key: str, what: str, hint: str) -> None:
    (issue,) = graph_issues(stages)
    assert issue.key == key
    assert what in issue.what
    assert hint in issue.hint


def data_stage(name: str, kind: StageKind, path: str) -> StageSpec:
    return StageSpec(name=name, kind=kind, spec=RunSpec.model_validate({"data": {"path": path}}))


@pytest.mark.parametrize(
    ("kind", "source", "needs", "hint"),
    [
        ("sft", "demonstrations", "", ""),
        ("reward_model", "pairs", "", ""),
        ("dpo", "pairs", "", ""),
        ("sft", "pairs", "needs demonstrations", "kind demonstrations"),
        ("dpo", "demonstrations", "needs preference pairs", "kind pairs"),
        ("reward_model", "sft", "needs preference pairs", "kind pairs"),
    ],
)
def test_a_stage_needs_data_of_its_kind(kind: StageKind, source: StageKind, needs: str, hint: str) -> None:
    found = graph_issues([stage("source", kind=source), data_stage("b", kind, "stage:source")])
    assert len(found) == bool(needs)
    for issue in found:
        assert issue.key == "stage.b.data.path"
        assert issue.what.startswith(needs)
        assert issue.hint.endswith(hint)


def test_a_robot_needs_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text('[robot]\ntask = "swingup"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(["@r.toml"])
    (issue,) = caught.value.issues
    assert (issue.key, issue.source) == ("robot", "r.toml:1")
    assert 'kind = "control"' in issue.hint


DEPLOY = """\
[deploy]
target = "osmo"
image = "registry/tidemill@sha256:0"
accelerator = "l4"
[deploy.osmo]
pool = "robots"
platform = "sim"

"""


def stage_deploy(text: str) -> str:
    """RECIPE with [deploy], and a [stage.deploy] of the second stage."""
    return RECIPE.replace("[run]", DEPLOY + "[run]", 1).replace(
        "[stage.batch]", f"[stage.deploy]\n{text}\n[stage.batch]"
    )


def test_a_stage_has_its_own_machine_over_that_of_the_job(load: Load, write: Callable[[str], None]) -> None:
    write(stage_deploy('accelerator = "h100-80gb"\nhead_memory_gb = 64\nosmo.platform = "dgx"'))
    first, second, _ = (stage.deploy for stage in load("--deploy.osmo.url=s3://b/c").stages)
    assert first is None
    assert second is not None
    assert (second.accelerator, second.head_memory_gb) == ("h100-80gb", 64)
    assert (second.osmo.pool, second.osmo.platform, second.osmo.url) == ("robots", "dgx", "s3://b/c")
    assert (second.target, second.image) == ("osmo", "registry/tidemill@sha256:0")


def test_an_option_of_a_stage_overrides_the_machine_in_its_table(load: Load, write: Callable[[str], None]) -> None:
    write(stage_deploy("head_memory_gb = 64"))
    _, second, third = load("--stage.second.deploy.head_memory_gb=8", "--stage.measured.deploy.accelerator=").stages
    assert second.deploy is not None and third.deploy is not None
    assert second.deploy.head_memory_gb == 8
    assert third.deploy.accelerator == ""


def test_the_machine_of_a_stage_is_no_part_of_its_configuration(load: Load, write: Callable[[str], None]) -> None:
    plain = [stage.sections() for stage in load().stages]
    write(stage_deploy("head_memory_gb = 64"))
    assert [stage.sections() for stage in load().stages] == plain


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('target = "gke"', "deploy.target"),
        ('image = "other"', "deploy.image"),
        ('namespace = "other"', "deploy.namespace"),
        ('storage = "other"', "deploy.storage"),
        ("sweep.seeds = [1]", "deploy.sweep"),
        ("hours = 1", "deploy.hours"),
        ('priority_class = "low"', "deploy.priority_class"),
        ('osmo.pool = "other"', "deploy.osmo.pool"),
    ],
)
def test_what_the_whole_job_shares_is_refused_in_a_stage(
    load: Load, write: Callable[[str], None], line: str, key: str
) -> None:
    write(stage_deploy(line))
    (issue,) = issues_of(load)
    assert (issue.key, issue.hint) == (key, f"set {key} at the top of the recipe")
    assert issue.source.endswith("stage second")


def test_an_unknown_key_of_a_machine_is_named_with_its_stage(load: Load, write: Callable[[str], None]) -> None:
    write(stage_deploy('acelerator = "l4"'))
    (issue,) = issues_of(load)
    assert issue.key == "deploy.acelerator"
    assert "accelerator" in issue.hint
    assert "stage second" in issue.source


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_stage_may_have_its_own_machine(
    load: Load, write: Callable[[str], None], kind: StageKind
) -> None:
    write(f'[[stage]]\nname = "one"\nkind = "{kind}"\n[stage.deploy]\nhead_memory_gb = 4\n')
    issues: list[ConfigIssue] = []  # of kinds that need keys which are not given here
    try:
        load()
    except ConfigError as error:
        issues += error.issues
    assert not [issue for issue in issues if "deploy" in issue.key]
