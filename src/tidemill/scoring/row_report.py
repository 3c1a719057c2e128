"""What a run reports of its rows: those it leaves out, and the columns that its rewards need and some rows lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.data.prompts import ANSWER, RowFigures, Task
from tidemill.extensions.registry import resolve
from tidemill.extensions.signature import wanted_arguments
from tidemill.scoring.builtin_rewards import COMPARES
from tidemill.scoring.code_tests import COLUMN as TESTS
from tidemill.scoring.scorer import evaluation_scoring
from tidemill.scoring.user_rewards import STANDARD, WHERE
from tidemill.telemetry.metrics import HELD_OUT_NAME
from tidemill.telemetry.statistics import few_items

REMARKS = ("left_out", "missing", "warnings", "few")
"""Fields that deserve a line before an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The columns that a reward reads.

    Args:
        needs: the samples of rows without one of them are invalid.
        takes: columns of the data that a function requires; None in rows without them.
    """

    name: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def reads(config: RewardConfig) -> Reads:
    """Raises UserError: the function of the reward does not exist."""
    if config.kind != "python":
        needs = (ANSWER,) if config.kind in COMPARES else (TESTS,) if config.kind == "tests" else ()
        return Reads(name=config.name or config.kind, needs=needs)
    extension = resolve(config.function, "reward", where=WHERE)
    called = f"{extension.name}(completion, answer)"
    required = wanted_arguments(extension.function, called=called, where=WHERE).required
    return Reads(
        name=config.name or extension.name,
        needs=(ANSWER,) if ANSWER in required else (),
        takes=tuple(name for name in required if name not in STANDARD),
    )


def report_rows(spec: RunSpec, task: Task) -> dict[str, Any]:
    """The fields of the event `data` of a run; without rows of the task only those of evaluation sets.

    Raises:
        UserError: more than half of the rows lack what a reward needs, or all of them a column that a function takes.
    """
    warnings = [warning for scored in _scored_rows(spec, task) for warning in _warnings(scored, task.columns)]
    in_sets = {f"repeated in {name}": found.rows.repeated for name, found in task.eval_sets.items()}
    sizes = {HELD_OUT_NAME: task.held_out_size, **{name: found.rows.rows for name, found in task.eval_sets.items()}}
    found: dict[str, Any] = {
        "left_out": {**task.left_out, **{reason: count for reason, count in in_sets.items() if count}},
        "warnings": list(dict.fromkeys(warnings)),
        **({"few": few} if (few := few_prompts(spec, sizes)) else {}),
    }
    if task.train_rows is None or task.held_out_rows is None:
        return found if any(found.values()) else {}
    rows = task.train_rows
    if task.held_out_rows is not rows:
        rows = rows.plus(task.held_out_rows)
    sizes = {"training": task.train_size, "held_out": task.held_out_size, "rows": rows.rows}
    return {**sizes, **found, "missing": missing_values(rows)}


def few_prompts(spec: RunSpec, sizes: Mapping[str, int]) -> list[str]:
    """A warning for each evaluated set that is too small to tell much.

    Args:
        sizes: prompts of the sets, by name; those of a set that is missing suffice for `eval.prompts`.
    """
    asked = {HELD_OUT_NAME: spec.eval.prompts} | {
        each.name: each.prompts or spec.eval.prompts for each in spec.eval.sets
    }
    found = list[str]()
    for name, most in asked.items():
        size = sizes.get(name, most)
        if most <= size:
            cure = "raise eval.prompts"
        elif name != HELD_OUT_NAME:
            cure = "add rows"
        else:
            cure = "raise task.held_out_size" if hasattr(spec.task, "held_out_size") else "hold out more rows"
        items = "held-out prompt" if name == HELD_OUT_NAME else f"{name} prompt"
        found.append(few_items(min(most, size), items, cure))
    return [text for text in found if text]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows that are scored with the same rewards."""

    name: str  # "training rows"
    where: str
    answers: str  # hint: how they get answers
    figures: RowFigures
    rewards: Sequence[RewardConfig]
    refuse: bool  # False: clients may give the rewards


def _scored_rows(spec: RunSpec, task: Task) -> Iterator[ScoredRows]:
    """Those for training, those for evaluation, and each evaluation set."""
    trained = spec.scoring.rewards
    evaluated = evaluation_scoring(spec.scoring, task=task, rewards=spec.eval.rewards).rewards
    columns = 'columns = { answer = "..." }'
    answers = f"set task.{columns}" if spec.task.kind == "file" else "return them as `answer`"
    rows = partial(ScoredRows, refuse=not spec.gateway.sessions)
    named = partial(rows, where="task", answers=answers)
    ours, theirs = task.train_rows, task.held_out_rows
    if ours is not None and ours is theirs:
        yield named(name="rows", figures=ours, rewards=(*trained, *evaluated))
    elif ours is not None and theirs is not None:
        yield named(name="training rows", figures=ours, rewards=trained)
        yield named(name="evaluation rows", figures=theirs, rewards=evaluated)
    for name, found in task.eval_sets.items():
        of_set = partial(rows, name=f"rows of {name}", where=f"eval.sets, {name}", answers=f"set its {columns}")
        yield of_set(figures=found.rows, rewards=evaluated)


def _warnings(rows: ScoredRows, columns: Sequence[str]) -> Iterator[str]:
    """One line per reward and column that some rows lack.

    Args:
        columns: of the whole task.

    Raises:
        UserError: as `report_rows`.
    """
    figures, total = rows.figures, f"{rows.figures.rows} {rows.name}"
    for reward in map(reads, rows.rewards):
        for column in reward.needs:
            named = "answer" if column == ANSWER else f"`{column}`"
            what = f"{figures.missing(column)} of {total} have no {named}, which the reward {reward.name} needs"
            if rows.refuse and figures.mostly_missing(column):
                others = ", ".join(name for name in figures.columns if name != column)
                there = f"besides the prompt they have {others}" if others else "they have only prompts"
                cure = rows.answers if column == ANSWER else "add it"
                raise UserError(what, where=rows.where, hint=f"{there}; {cure}, or use rewards that need none")
            if figures.missing(column):
                yield f"{what}: their samples are invalid"
        for column in reward.takes:
            if rows.refuse and column in columns and column not in figures.columns:
                what = f"the {rows.name} have no column `{column}`, which the reward {reward.name} takes"
                raise UserError(what, where=rows.where, hint="add it, or give the argument a default value")
            if missing := figures.missing(column):
                yield f"{missing} of {total} have no `{column}`, which the reward {reward.name} takes: it gets None"


def missing_values(figures: RowFigures) -> Mapping[str, int]:
    """The rows without a value, by column; of the answer only if other rows have one."""
    names = [name for name in figures.filled if name != ANSWER or figures.filled[name]]
    return {name: count for name in names if (count := figures.missing(name))}
