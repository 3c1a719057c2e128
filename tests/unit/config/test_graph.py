from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tidemill.config.pipeline import StageKind, StageSpec, graph_faults
from tidemill.config.schema import RunSpec


def stage(name: str, source: str = "char", kind: StageKind = "rl") -> StageSpec:
    return StageSpec(name=name, kind=kind, spec=RunSpec.model_validate({"model": {"source": source}}))


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [stage("a")],
        [stage("a"), stage("b", "stage:a"), stage("c", "stage:a"), stage("d", "stage:c", "eval")],
        [stage("a", kind="sft"), stage("b", "stage:a", "dpo"), stage("c", "stage:b", "export"), stage("d", "stage:c")],
    ],
)
def test_nothing_is_wrong(stages: Sequence[StageSpec]) -> None:
    assert graph_faults(stages) == []


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            [stage("sft"), stage("b", "stage:stf")],
            'stage.b.model.source: "stage:stf" names no stage; did you mean sft?',
        ),
        (
            [stage("sft"), stage("b", "stage:xyz")],
            'stage.b.model.source: "stage:xyz" names no stage; stages before it: sft',
        ),
        ([stage("a", "stage:")], 'stage.a.model.source: "stage:" names no stage; stages before it: none'),
        (
            [stage("a", "stage:b"), stage("b")],
            (
                'stage.a.model.source: "stage:b" comes later in the recipe, and stages run in its order; '
                "move stage b before stage a"
            ),
        ),
        (
            [stage("m", kind="reward_model"), stage("b", "stage:m")],
            (
                'stage.b.model.source: asks for a model, and "stage:m", a stage of kind reward_model, gives a reward '
                "model; name a stage of kind sft or dpo or rl or export"
            ),
        ),
        (
            [stage("e", kind="eval"), stage("b", "stage:e")],
            (
                'stage.b.model.source: asks for a model, and "stage:e", a stage of kind eval, gives none; '
                "name a stage of kind sft or dpo or rl or export"
            ),
        ),
        (
            [stage("a", "stage:a")],
            "stage: the stages a → a wait for one another; let one of them take its input from elsewhere",
        ),
        (
            [stage("x"), stage("a", "stage:c"), stage("b", "stage:a"), stage("c", "stage:b")],
            "stage: the stages a → c → b → a wait for one another; let one of them take its input from elsewhere",
        ),
    ],
)
def test_one_clear_fault(stages: Sequence[StageSpec], says: str) -> None:
    assert [fault.line for fault in graph_faults(stages)] == [says]


def learning(name: str, kind: StageKind, path: str) -> StageSpec:
    return StageSpec(name=name, kind=kind, spec=RunSpec.model_validate({"data": {"path": path}}))


@pytest.mark.parametrize(
    ("learner", "maker", "able"),
    [
        ("sft", "demonstrations", ""),
        ("reward_model", "pairs", ""),
        ("dpo", "pairs", ""),
        ("sft", "pairs", "asks for demonstrations, .* gives preference pairs; name a stage of kind demonstrations"),
        ("dpo", "demonstrations", "asks for preference pairs, .* gives demonstrations; name a stage of kind pairs"),
        ("reward_model", "sft", "asks for preference pairs, .* gives a model; name a stage of kind pairs"),
    ],
)
def test_a_stage_learns_from_rows_of_its_kind(learner: StageKind, maker: StageKind, able: str) -> None:
    faults = graph_faults([stage("made", kind=maker), learning("b", learner, "stage:made")])
    assert len(faults) == bool(able)
    for fault in faults:
        assert re.search(f"^stage.b.data.path: {able}$", fault.line)
