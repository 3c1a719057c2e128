from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pretend_stages import pipeline
from tests.slider import SLIDER
from tidemill.config.keys import belongs_to, flattened, neutral_keys, resumable_keys
from tidemill.config.pipeline import KINDS, StageKind, StageSpec
from tidemill.pipeline.stage_plan import contents_of, file_inputs, folder_name, output_values, stage_digest

RL = '[[stage]]\nname = "a"\nkind = "rl"\nmodel.source = "char"\n[[stage]]\nname = "b"\nkind = "rl"\n'
RL += 'model.source = "stage:a"\n'
EVAL = '[[stage]]\nname = "a"\nkind = "eval"\nmodel.source = "char"\n'
EXPORT = '[[stage]]\nname = "a"\nkind = "export"\nmodel.source = "char"\n'


def digest(stage: StageSpec, upstream: str = "u", **contents: str) -> str:
    return stage_digest(stage, output_values(stage, upstream=dict.fromkeys(stage.needs, upstream), contents=contents))


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
        "--fleet.heartbeat_timeout_s=99",
        "--engine.tick_s=0.2",
    ],
)
def test_neutral_keys_do_not_change_the_digest(tmp_path: Path, override: str) -> None:
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
def test_other_keys_change_the_digest(tmp_path: Path, override: str) -> None:
    assert digest(first(tmp_path, RL, override)) != digest(first(tmp_path, RL))


def test_eval_keys_change_the_digest_of_an_evaluation(tmp_path: Path) -> None:
    plain = digest(first(tmp_path, EVAL))
    assert digest(first(tmp_path, EVAL, "--eval.prompts=3")) != plain
    assert digest(first(tmp_path, EVAL, "--eval.every_steps=3")) == plain


def test_the_checkpoint_interval_changes_the_digest_of_a_supervised_stage(tmp_path: Path) -> None:
    text = '[[stage]]\nname = "a"\nkind = "sft"\ndata.path = "x.jsonl"\n'
    contents = {"data.path": "1"}
    plain = digest(first(tmp_path, text), **contents)
    assert digest(first(tmp_path, text, "--checkpoint.every_steps=1"), **contents) != plain
    assert digest(first(tmp_path, text, "--checkpoint.keep_last=5"), **contents) == plain
    # trainer.steps matters only without epochs.
    assert digest(first(tmp_path, text, "--trainer.steps=3"), **contents) == plain
    without = digest(first(tmp_path, text, "--supervised.epochs=0"), **contents)
    assert digest(first(tmp_path, text, "--supervised.epochs=0", "--trainer.steps=3"), **contents) != without


def test_the_kind_changes_the_digest(tmp_path: Path) -> None:
    assert digest(first(tmp_path, EVAL)) != digest(first(tmp_path, EXPORT))
    assert digest(first(tmp_path, EXPORT, "--export.dtype=bf16")) != digest(first(tmp_path, EXPORT))
    assert digest(first(tmp_path, EXPORT, "--export.path=x")) != digest(first(tmp_path, EXPORT))


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_neutral_or_changes_the_digest(tmp_path: Path, kind: StageKind) -> None:
    model = 'model.source = "char"\n' if "model" in KINDS[kind].sections else ""
    stage = first(tmp_path, f'[data]\npath = "x.jsonl"\n[[stage]]\nname = "a"\nkind = "{kind}"\n{model}')
    contents = {file.key: "1" for file in file_inputs(stage)}
    keys = flattened(stage.sections()).keys() - {"data.path"}  # its content counts
    without_effect = {key for key in keys if digest(_changed(stage, key), **contents) == digest(stage, **contents)}
    if "supervised" in KINDS[kind].sections:
        without_effect.remove("trainer.steps")  # epochs decide
    assert without_effect == {key for key in keys if belongs_to(key, neutral_keys(kind))}


def _changed(stage: StageSpec, key: str) -> StageSpec:
    """The stage with another value of a key, valid or not."""

    class Changed(StageSpec):
        def sections(self) -> dict[str, Any]:
            tree = super().sections()
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node[section]
            node[name] = "other"
            return tree

    return Changed(name=stage.name, kind=stage.kind, spec=stage.spec)


@pytest.mark.parametrize(
    ("kind", "override", "repeats"),
    [
        ("demonstrations", "--sampling.temperature=0.9", False),
        ("demonstrations", "--model.lora.rank=8", False),
        ("demonstrations", "--data_generation.pairs_per_prompt=1", False),
        ("demonstrations", '--sampling.stop=["."]', True),
        ("demonstrations", "--data_generation.split=held_out", True),
        ("demonstrations", "--run.seed=1", True),
        ("pairs", "--trainer.steps=40", False),
        ("pairs", "--trainer.logits_budget_mb=1", False),
        ("pairs", "--trainer.activation_checkpointing", False),
        ("pairs", "--scoring.truncated=masked", False),
        ("pairs", "--sampling.temperature=0.9", True),
        ("pairs", "--trainer.precision=bf16", True),
        ("eval", "--trainer.steps=40", False),
        ("eval", "--eval.samples_per_prompt=4", True),
        ("eval", "--sampling.temperature=0.9", True),
        ("export", "--model.chat_template", False),
        ("export", "--model.char.seed=1", True),
    ],
)
def test_keys_of_training_do_not_change_the_digest_of_other_kinds(
    tmp_path: Path, kind: str, override: str, repeats: bool
) -> None:
    source = "./folder" if override == "--model.chat_template" else "char"
    text = f'[[stage]]\nname = "a"\nkind = "{kind}"\nmodel.source = "{source}"\n'
    contents = {"model.source": "1"}
    assert (digest(first(tmp_path, text, override), **contents) != digest(first(tmp_path, text), **contents)) == repeats


def test_the_digest_depends_on_inputs_and_not_on_the_name(tmp_path: Path) -> None:
    stage = pipeline(tmp_path, RL).stages[1]
    assert digest(stage, "one") != digest(stage, "two")
    renamed = pipeline(tmp_path, RL.replace('"a"', '"z"').replace("stage:a", "stage:z")).stages[1]
    assert digest(renamed, "one") == digest(stage, "one")
    # model.char matters only for source = "char".
    assert digest(pipeline(tmp_path, RL, "--model.char.layers=2").stages[1]) == digest(stage)


def test_the_digest_depends_on_the_content_of_files_and_not_on_their_path(tmp_path: Path) -> None:
    reward = f'{{kind = "python", function = "{tmp_path}/r.py:f"}}'
    text = (
        f'[task]\nkind = "file"\npath = "x.jsonl"\n[scoring]\nrewards = [{reward}]\n'
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


def test_the_digest_depends_on_the_files_of_all_functions_that_decide_what_is_learned(tmp_path: Path) -> None:
    keys = {"algorithm.advantage": "f", "algorithm.loss": "g", "batch.sampler": "h", "task.function": "i"}
    named = [f'--{key}="{tmp_path}/mine.py:{name}"' for key, name in keys.items()]
    terms = f'--algorithm.loss_terms=[{{function = "{tmp_path}/mine.py:j"}}]'
    text = '[[stage]]\nname = "a"\nkind = "rl"\nmodel.source = "char"\n'
    stage = first(tmp_path, text, "--task.kind=python", *named, terms)
    contents = {file.key: "1" for file in file_inputs(stage)}
    assert contents.keys() == {*keys, "algorithm.loss_terms[0].function"}
    digests = {digest(stage, **{**contents, key: "2"}) for key in contents}
    assert len({digest(stage, **contents), *digests}) == 6


def test_the_digest_of_an_evaluation_depends_on_its_sets(tmp_path: Path) -> None:
    stage = first(tmp_path, EVAL, f'--eval.sets=[{{name = "math", path = "{tmp_path}/m.jsonl"}}]')
    (file,) = [file for file in file_inputs(stage) if file.location[0] == "eval"]
    assert (file.key, file.path) == ("eval.sets[0].path", tmp_path / "m.jsonl")
    assert digest(stage, **{file.key: "1"}) != digest(stage, **{file.key: "2"})


def test_the_digest_depends_on_the_file_of_a_reward_function_in_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modules"
    (folder / "of_mine").mkdir(parents=True)
    (folder / "of_mine" / "__init__.py").write_text(
        "raise SystemExit('planning imports no modules')\n", encoding="utf-8"
    )
    (folder / "of_mine" / "score.py").write_text("one", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    text = '[scoring]\nrewards = [{kind = "python", function = "of_mine.score:f"}]\n'
    text += '[[stage]]\nname = "a"\nkind = "eval"\nmodel.source = "char"\n'
    stage = first(tmp_path, text)
    before = contents_of([stage])["a"]
    assert list(before) == ["scoring.rewards[0].function"]
    (folder / "of_mine" / "score.py").write_text("two", encoding="utf-8")
    assert digest(stage, **contents_of([stage])["a"]) != digest(stage, **before)


def test_the_digest_depends_on_the_model_of_a_control_task(tmp_path: Path) -> None:
    (tmp_path / "cart.xml").write_text(SLIDER)
    (tmp_path / "cart.py").write_text(
        'from tests.slider import Slider\nclass Cart(Slider):\n    model = "cart.xml"\n', encoding="utf-8"
    )
    text = f'[robot]\ntask = "{tmp_path}/cart.py:Cart"\n[[stage]]\nname = "a"\nkind = "control"\n'
    stage = first(tmp_path, text)
    before = contents_of([stage])["a"]
    assert contents_of([stage])["a"] == before
    (tmp_path / "cart.xml").write_text(SLIDER.replace('mass="1"', 'mass="2"'))
    assert digest(stage, **contents_of([stage])["a"]) != digest(stage, **before)


@pytest.mark.parametrize("source", ["smollm2-135m", "char", "organisation/name"])
def test_names_of_models_are_not_files(tmp_path: Path, source: str) -> None:
    text = f'[[stage]]\nname = "a"\nkind = "export"\nmodel.source = "{source}"\n'
    stage = first(tmp_path, text)
    assert file_inputs(stage) == []
    assert output_values(stage, upstream={}, contents={})["model.source"] == source


def test_a_folder_with_the_name_of_a_built_in_model_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "char").mkdir()
    assert file_inputs(first(tmp_path, EXPORT)) == []


def test_the_digest_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    stage = first(tmp_path, RL)
    values: dict[str, Any] = output_values(stage, upstream={}, contents={})
    assert stage_digest(stage, dict(reversed(values.items()))) == stage_digest(stage, values)
    assert folder_name(stage, stage_digest(stage, values)) == f"a-{stage_digest(stage, values)[:10]}"


def test_a_training_stage_resumes_after_a_change_of_neutral_keys() -> None:
    """Equal digests share a folder, and a resume in a folder allows changes only of certain keys."""
    neutral = neutral_keys("rl")
    assert neutral < resumable_keys()
    # More steps or another schedule resume a run, but are another stage; other numbers of shards round differently, and
    # a guard may return to a checkpoint.
    others = {"trainer.steps", "trainer.shards", "supervised.epochs", "optimizer.schedule_steps"}
    guard = {key for key in resumable_keys() - neutral if key.startswith("guard.")}
    assert resumable_keys() - neutral == others | guard
    assert {"guard.action", "guard.amend.kl_beta"} <= guard
    assert not any(key.startswith("guard.machines.") for key in guard)
