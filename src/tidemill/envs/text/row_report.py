"""What a run reports of its rows: those it leaves out, and the columns that its rewards need and some rows lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.config.task import RewardConfig
from tidemill.core.errors import UserError
from tidemill.envs.text.code_tests import COLUMN as TESTS
from tidemill.envs.text.prompts import ANSWER, RowFigures, Task
from tidemill.envs.text.rewards import COMPARES
from tidemill.envs.text.scorer import evaluation_scoring
from tidemill.envs.text.user_rewards import STANDARD, WHERE
from tidemill.extensions.registry import resolve
from tidemill.extensions.signature import wanted_arguments


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
    required = wanted_arguments(extension.function, called=extension.name, where=WHERE).required
    return Reads(
        name=config.name or extension.name,
        needs=(ANSWER,) if ANSWER in required else (),
        takes=tuple(name for name in required if name not in STANDARD),
    )


def report_rows(spec: RunSpec, task: Task) -> dict[str, Any]:
    """The fields of the event `data` of a run; empty for a task without rows.

    Raises:
        UserError: more than half of the rows lack what a reward needs, or all of them a column that a function takes.
    """
    if task.train_rows is None or task.held_out_rows is None:
        return {}
    evaluated = evaluation_scoring(spec.scoring, task=task, rewards=spec.eval.rewards).rewards
    warnings = row_warnings(task, trained=spec.scoring.rewards, evaluated=evaluated, refuse=not spec.gateway.sessions)
    rows = task.train_rows
    if task.held_out_rows is not rows:
        rows = rows.plus(task.held_out_rows)
    in_sets = {f"repeated in {name}": found.rows.repeated for name, found in task.eval_sets.items()}
    return {
        "training": task.train_size,
        "held_out": task.held_out_size,
        "left_out": {**task.left_out, **{reason: count for reason, count in in_sets.items() if count}},
        "rows": rows.rows,
        "missing": missing_values(rows),
        "warnings": warnings,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """Rows that are scored with the same rewards."""

    name: str  # "training rows"
    where: str  # key of the configuration
    figures: RowFigures
    rewards: Sequence[RewardConfig]


def row_warnings(
    task: Task, *, trained: Sequence[RewardConfig], evaluated: Sequence[RewardConfig], refuse: bool = True
) -> list[str]:
    """Compare the rows of a task and of its evaluation sets with what the rewards of each need.

    Args:
        trained: rewards of training samples.
        evaluated: rewards of held-out samples.
        refuse: False if the rewards may come from elsewhere.

    Returns:
        One line per reward and column that some rows lack.

    Raises:
        UserError: as `report_rows`.
    """
    sets = list[RowSet]()
    if task.train_rows is not None and task.train_rows is task.held_out_rows:
        sets.append(RowSet(name="rows", where="task", figures=task.train_rows, rewards=[*trained, *evaluated]))
    elif task.train_rows is not None and task.held_out_rows is not None:
        sets.append(RowSet(name="training rows", where="task", figures=task.train_rows, rewards=trained))
        sets.append(RowSet(name="evaluation rows", where="task", figures=task.held_out_rows, rewards=evaluated))
    sets += [
        RowSet(name=f"rows of {name}", where=f"eval.sets, {name}", figures=found.rows, rewards=evaluated)
        for name, found in task.eval_sets.items()
    ]
    found = [warning for rows in sets for config in rows.rewards for warning in _warnings(rows, config, refuse)]
    return list(dict.fromkeys(found))


def _warnings(rows: RowSet, config: RewardConfig, refuse: bool) -> Iterator[str]:
    reward, figures = reads(config), rows.figures
    total = f"{figures.rows} {rows.name}"
    for column in reward.needs:
        named = "answer" if column == ANSWER else f"`{column}`"
        what = f"{figures.missing(column)} of {total} have no {named}, which the reward {reward.name} needs"
        if refuse and figures.mostly_missing(column):
            raise UserError(what, where=rows.where, hint=_cure(column, rows))
        if figures.missing(column):
            yield f"{what}: their samples are invalid"
    for column in reward.takes:
        if refuse and column not in figures.columns:
            what = f"the {rows.name} have no column `{column}`, which the reward {reward.name} takes"
            raise UserError(what, where=rows.where, hint="add it, or give the argument a default value")
        if missing := figures.missing(column):
            yield f"{missing} of {total} have no `{column}`, which the reward {reward.name} takes: it gets None"


def _cure(column: str, rows: RowSet) -> str:
    others = [name for name in rows.figures.columns if name != column]
    there = f"the other columns are {', '.join(others)}" if others else "they have only prompts"
    if column != ANSWER:
        return f"{there}; add the values, or use another reward"
    key = "task.columns" if rows.where == "task" else "the set's columns"
    return f'{there}; name the column of the answers in {key}, as {{ answer = "..." }}, or use other rewards'


def missing_values(figures: RowFigures) -> Mapping[str, int]:
    """The rows without a value, by column; of the answer only if other rows have one."""
    names = [name for name in figures.filled if name != ANSWER or figures.filled[name]]
    return {name: count for name in names if (count := figures.missing(name))}
