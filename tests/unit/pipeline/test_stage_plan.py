from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend_stages import pipeline
from tidemill.core.errors import UserError
from tidemill.pipeline.stage_plan import EVERYTHING, Choice, FoundStage, Plan, PlannedStage, StageResult, make_plan

# a ── b ── d, and c by itself
RECIPE = """\
[model]
source = "char"
[[stage]]
name = "a"
kind = "rl"
[[stage]]
name = "b"
kind = "rl"
model.source = "stage:a"
[[stage]]
name = "c"
kind = "eval"
[[stage]]
name = "d"
kind = "eval"
model.source = "stage:b"
"""


def planned(
    tmp_path: Path, *overrides: str, found: dict[str, FoundStage] | None = None, choice: Choice = EVERYTHING
) -> Plan:
    stages = pipeline(tmp_path, RECIPE, *overrides).stages
    return make_plan(stages, contents={stage.name: {} for stage in stages}, found=found or {}, choice=choice)


def actions(plan: Plan) -> dict[str, str]:
    return {each.stage.name: each.action for each in plan.stages}


def finished(each: PlannedStage, at: str = "2026-01-01") -> tuple[str, FoundStage]:
    result = StageResult(
        name=each.stage.name,
        kind=each.stage.kind,
        digest=each.digest,
        product=None,
        headline="",
        figures={},
        wall_s=1.0,
        finished=at,
        values=each.values,
    )
    return each.folder, FoundStage(name=each.stage.name, result=result)


def started(each: PlannedStage) -> tuple[str, FoundStage]:
    return each.folder, FoundStage(name=each.stage.name, result=None)


def test_a_new_pipeline_is_due(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert actions(plan) == {"a": "run", "b": "wait", "c": "run", "d": "wait"}
    assert [each.stage.name for each in plan.due] == ["a", "b", "c", "d"]
    assert plan.stale == ()
    assert len({each.folder for each in plan.stages}) == 4


def test_finished_stages_are_skipped_and_started_ones_resume(tmp_path: Path) -> None:
    a, b, c, d = planned(tmp_path).stages
    plan = planned(tmp_path, found=dict([finished(a), started(b), finished(c)]))
    assert actions(plan) == {"a": "done", "b": "resume", "c": "done", "d": "wait"}
    plan = planned(tmp_path, found=dict(map(finished, (a, b, c, d))))
    assert actions(plan) == dict.fromkeys("abcd", "done")
    assert plan.due == ()


def test_a_change_affects_only_the_stages_that_depend_on_it(tmp_path: Path) -> None:
    before = planned(tmp_path).stages
    found = dict(map(finished, before))
    plan = planned(tmp_path, "--stage.a.trainer.steps=3", found=found)
    assert actions(plan) == {"a": "run", "b": "wait", "c": "done", "d": "wait"}
    assert {each.stage.name: each.changed for each in plan.stages} == {
        "a": ("trainer.steps",),
        "b": ("model.source.stage",),
        "c": (),
        "d": ("model.source.stage",),
    }
    assert plan.stale == tuple(sorted(before[index].folder for index in (0, 1, 3)))
    plan = planned(tmp_path, "--stage.d.eval.prompts=3", found=found)
    assert actions(plan) == {"a": "done", "b": "done", "c": "done", "d": "run"}
    # With the former configuration, the former results are valid again.
    assert actions(planned(tmp_path, found=found)) == dict.fromkeys("abcd", "done")


def test_a_result_stays_valid_when_its_input_is_missing(tmp_path: Path) -> None:
    a, b, _, d = planned(tmp_path).stages
    plan = planned(tmp_path, found=dict([started(a), finished(b), finished(d)]))
    assert actions(plan) == {"a": "resume", "b": "done", "c": "run", "d": "done"}


def test_changed_keys_are_relative_to_the_newest_result(tmp_path: Path) -> None:
    older = finished(planned(tmp_path, "--stage.a.trainer.steps=3").stages[0], "2026-01-01")
    newer = finished(planned(tmp_path, "--stage.a.run.seed=3").stages[0], "2026-01-02")
    plan = planned(tmp_path, found=dict([newer, older]))
    assert plan.stages[0].changed == ("run.seed",)


def test_a_result_with_another_digest_is_ignored(tmp_path: Path) -> None:
    a, b, *_ = planned(tmp_path).stages
    _, foreign = finished(b)
    assert actions(planned(tmp_path, found={a.folder: foreign}))["a"] == "resume"


def test_only_and_from(tmp_path: Path) -> None:
    a, b, c, d = planned(tmp_path).stages
    assert actions(planned(tmp_path, choice=Choice(only="a"))) == {"a": "run", "b": "leave", "c": "leave", "d": "leave"}
    ready = dict([finished(a)])
    plan = planned(tmp_path, found=ready, choice=Choice(start="b"))
    assert actions(plan) == {"a": "done", "b": "run", "c": "run", "d": "wait"}
    plan = planned(tmp_path, found=dict(map(finished, (a, b, c, d))), choice=Choice(only="d"))
    assert actions(plan) == dict.fromkeys("abcd", "done")


@pytest.mark.parametrize(
    ("choice", "where", "what", "hint"),
    [
        (Choice(only="x"), "--only x", "no stage of that name", "a, b, c, d"),
        (Choice(start="x"), "--from x", "no stage of that name", "a, b, c, d"),
        (Choice(only="a", start="b"), "--only, --from", "mutually exclusive", "leave one of them out"),
        (Choice(only="b"), "stage b", "needs stage a", "--from an earlier stage"),
    ],
)
def test_an_impossible_choice_is_refused(tmp_path: Path, choice: Choice, where: str, what: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, choice=choice)
    assert caught.value.where == where
    assert what in caught.value.what
    assert hint in caught.value.hint
