"""What a run reports of its rows at the start, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.char_codec import CharCodec
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.data.build_task import build_task
from tidemill.data.eval_sets import counted, with_eval_sets
from tidemill.scoring.row_report import report_rows
from tidemill.telemetry.statistics import few_items

Rows = Sequence[dict[str, Any]]
EXACT: dict[str, Any] = {"kind": "exact"}
LENGTH: dict[str, Any] = {"kind": "length", "target_tokens": 3}


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Different questions; the first row has number `first`."""
    first = columns.pop("first", 0)
    return [{"prompt": f"{number}+1=", **columns} for number in range(first, first + count)]


def written(folder: Path, name: str, of: Rows) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in of))
    return path


def report(folder: Path, train: Rows, *, held_out: Rows = (), in_set: Rows = (), **config: Any) -> dict[str, Any]:
    paths = {"path": written(folder, "train", train)}
    if held_out:
        paths["held_out_path"] = written(folder, "held_out", held_out)
    if in_set:
        config["eval"] = {"sets": [{"name": "more", "path": written(folder, "more", in_set)}]}
    rewards = {"rewards": config.pop("rewards", [EXACT])}
    spec = RunSpec.model_validate({"task": {"kind": "file", **paths}, "scoring": rewards, **config})
    task = build_task(spec.task, codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False)
    return report_rows(spec, with_eval_sets(task, spec, codec=CharCodec()))


def function(folder: Path, signature: str) -> dict[str, Any]:
    (folder / "mine.py").write_text(f"def judge({signature}):\n    return 1.0\n")
    return {"kind": "python", "function": f"{folder / 'mine.py'}:judge"}


ANSWERED, BLANK = rows(6, answer="1"), rows(6, answer="")
UNANSWERED, NULL = rows(7, first=6, solution="1"), rows(7, first=6, answer=None, level=1)


@pytest.mark.parametrize(
    ("train", "others", "signature", "what", "hint"),
    [
        (UNANSWERED, {}, "", "task: 7 of 7 rows have no answer, which the reward exact needs", "they have solution; "),
        ([*ANSWERED, *NULL], {}, "", "7 of 13 rows have no answer", 'set task.columns = { answer = "..." }'),
        (ANSWERED, {"held_out": UNANSWERED}, "", "7 of 7 evaluation rows have no answer", "solution"),
        (UNANSWERED, {"held_out": ANSWERED}, "", "7 of 7 training rows have no answer", "solution"),
        (ANSWERED, {"in_set": UNANSWERED}, "", "eval.sets, more: 7 of 7 rows of more have", "set its columns"),
        (UNANSWERED, {}, "completion, answer", "which the reward judge needs", "solution"),
        (
            rows(6, level=1),
            {"held_out": rows(3, first=6)},
            "completion, level",
            "the evaluation rows have no column `level`, which the reward judge takes",
            "give the argument a default value",
        ),
        ([*rows(1, tests=[{"input": "", "output": ""}]), *rows(2, first=1)], {"rewards": [{"kind": "tests"}]}, "",
         "2 of 3 rows have no `tests`, which the reward tests needs", "they have only prompts"),
    ],
)  # fmt: skip
def test_rows_that_mostly_lack_what_a_reward_needs_are_refused(
    tmp_path: Path, train: Rows, others: dict[str, Any], signature: str, what: str, hint: str
) -> None:
    rewards = {"rewards": [function(tmp_path, signature)]} if signature else {}
    with pytest.raises(UserError) as caught:
        report(tmp_path, train, **rewards, **others)
    assert what in f"{caught.value.where}: {caught.value.what}"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("train", "others", "signature", "warnings"),
    [
        (ANSWERED, {}, "", []),
        (BLANK, {}, "", []),  # an empty text is an answer
        ([*ANSWERED, *UNANSWERED[:6]], {}, "",
         ["6 of 12 rows have no answer, which the reward exact needs: their samples are invalid"]),
        (ANSWERED, {"in_set": [*ANSWERED, *NULL[:1]]}, "",
         ["1 of 7 rows of more have no answer, which the reward exact needs: their samples are invalid"]),
        (UNANSWERED, {"rewards": [LENGTH]}, "", []),
        (UNANSWERED, {"gateway": {"sessions": True}}, "",
         ["7 of 7 rows have no answer, which the reward exact needs: their samples are invalid"]),
        (UNANSWERED, {}, "completion, answer=None", []),
        (UNANSWERED, {}, "completion, metadata, **rest", []),
        ([*NULL[:2], *UNANSWERED[2:]], {}, "level",
         ["5 of 7 rows have no `level`, which the reward judge takes: it gets None"]),
        ([*NULL[:2], *UNANSWERED[2:]], {}, "level=0", []),
    ],
)  # fmt: skip
def test_fewer_rows_are_counted(
    tmp_path: Path, train: Rows, others: dict[str, Any], signature: str, warnings: list[str]
) -> None:
    rewards = {"rewards": [function(tmp_path, signature)]} if signature else {}
    assert report(tmp_path, train, **rewards, **others)["warnings"] == warnings


def test_rows_that_are_left_out_and_values_that_are_missing_are_counted(tmp_path: Path) -> None:
    train = [*rows(6, answer="1", level=1), *rows(3, answer="1", level=1), *rows(4, first=6, answer="1", level=None)]
    found = report(tmp_path, train, held_out=[*rows(2), *rows(1)], in_set=[*ANSWERED, *ANSWERED], rewards=[LENGTH])
    assert found == {
        "training": 8,
        "held_out": 2,
        "left_out": {"repeated": 4, "kept_for_evaluation": 2, "repeated in more": 6},
        "rows": 16,
        "missing": {"answer": 3, "level": 7},
        "warnings": [],
        "few": [few_items(2, "held-out prompt", "hold out more rows"), few_items(12, "more prompt", "add rows")],
    }


@pytest.mark.parametrize(
    ("held_out", "settings", "few"),
    [
        (3, {}, [few_items(3, "held-out prompt", "hold out more rows")]),
        (19, {}, [few_items(19, "held-out prompt", "hold out more rows")]),
        (20, {}, []),
        (40, {"prompts": 8}, [few_items(8, "held-out prompt", "raise eval.prompts")]),
    ],
)  # fmt: skip
def test_sets_that_are_too_small_to_tell_are_named(
    tmp_path: Path, held_out: int, settings: dict[str, Any], few: list[str]
) -> None:
    found = report(tmp_path, rows(8, answer="1"), held_out=rows(held_out, first=8, answer="1"), eval=settings)
    assert found.get("few", []) == few


def test_counting_alone_finds_the_same_rows_and_leaves_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path, "rows", [*ANSWERED, *ANSWERED[:2]])
    spec = RunSpec.model_validate({"task": {"kind": "file", "path": path, "index_above_mb": 0}})
    found = report_rows(spec, counted(spec))
    assert not (tmp_path / "cache").exists()
    built = build_task(spec.task, codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False)
    assert found == report_rows(spec, built)
    assert found["left_out"] == {"repeated": 2}


@pytest.mark.parametrize(
    ("in_set", "expected"),
    [
        (
            [*ANSWERED, *ANSWERED],
            {
                "left_out": {"repeated in more": 6},
                "warnings": [],
                "few": [few_items(12, "more prompt", "add rows")],
            },
        ),
        (
            [*ANSWERED, *NULL[:1]],
            {
                "left_out": {},
                "warnings": [
                    "1 of 7 rows of more have no answer, which the reward exact needs: their samples are invalid"
                ],
                "few": [few_items(7, "more prompt", "add rows")],
            },
        ),
        (rows(30, answer="1"), {}),
    ],
)
def test_sets_of_a_task_without_rows_are_counted(tmp_path: Path, in_set: Rows, expected: dict[str, Any]) -> None:
    config = {"eval": {"sets": [{"name": "more", "path": written(tmp_path, "more", in_set)}]}}
    spec = RunSpec.model_validate({"task": {"kind": "arithmetic"}, "scoring": {"rewards": [EXACT]}, **config})
    assert report_rows(spec, counted(spec)) == expected
