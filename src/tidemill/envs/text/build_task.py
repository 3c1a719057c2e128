"""Builds the task of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tidemill.config.task import ArithmeticTask, FileTask, PythonTask, ReasoningGymTask, TaskConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec
from tidemill.core.records import count
from tidemill.envs.text.arithmetic import build_arithmetic
from tidemill.envs.text.examples import read_split
from tidemill.envs.text.prompts import (
    Item,
    ListedSource,
    Render,
    Task,
    common_columns,
    content_digest,
    distinct,
    in_content_order,
    longest_prompt,
    renderer,
    split_by_content,
)
from tidemill.envs.text.reasoning_gym import build_reasoning_gym
from tidemill.envs.text.rows import PROMPT_SHAPE, Row, read_items, to_item
from tidemill.extensions.calls import CallError, CallTimeout, call_blocking
from tidemill.extensions.loading import IMPORT_DEADLINE_S
from tidemill.extensions.registry import resolve


def build_files(config: FileTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of one file, or of a training and an evaluation file.

    Raises:
        UserError: a file cannot be read or has too few rows; names file and row.
    """
    columns = {str(name): column for name, column in config.columns.items()}
    read = partial(read_items, columns=columns, system_prompt=config.system_prompt)
    if config.held_out_fraction == 1 and config.held_out_path is None:
        train = distinct(read(config.path))
        held_out, left_out = in_content_order(train), ""
    else:
        sides = read_split(read, config.path, config.held_out_path, config.held_out_fraction, section="task")
        train, held_out, left_out = sides.train, sides.held_out, sides.left_out
    if config.max_prompt_tokens:
        rows = len(train) + len(held_out)
        train, held_out = (_short_enough(side, config.max_prompt_tokens, render) for side in (train, held_out))
        if not (train and held_out):
            what = f"no prompt of one side has at most {config.max_prompt_tokens} tokens"
            raise UserError(what, where="task.max_prompt_tokens", hint="raise it, or shorten the prompts")
        if dropped := rows - len(train) - len(held_out):
            long = f"{dropped} longer than {config.max_prompt_tokens} tokens"
            left_out = ", ".join(filter(None, (left_out, long)))
    return Task(
        source=ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=None,
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_prompt([*train, *held_out], render),
        digest=content_digest(train, held_out),
        columns=common_columns(train, held_out),
        description=f"{config.path.name}" + (f" (left out of training: {left_out})" if left_out else ""),
    )


def _short_enough(items: Sequence[Item], limit: int, render: Render) -> list[Item]:
    return [item for item in items if count(render(item).token_ids) <= limit]


def build_python(config: PythonTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of a user function that returns rows.

    Raises:
        UserError: the function does not exist, raises, or returns something else; names the row.
    """
    extension = resolve(config.function, "task", where="task.function")
    try:
        rows = call_blocking(lambda: extension.function(**config.params), timeout_s=IMPORT_DEADLINE_S)
    except (CallError, CallTimeout) as error:
        what = str(error) or f"did not return within {IMPORT_DEADLINE_S:g} s"
        raise UserError(what, where=f"task {extension.name}", hint="correct the function, or task.params") from None
    given = rows if isinstance(rows, Mapping) else {"train": rows}
    train = distinct(_given_items(given.get("train"), extension.name))
    if "held_out" in given:
        held_out = distinct(_given_items(given["held_out"], f"{extension.name}, held_out"))
    else:
        train, held_out = split_by_content(train, config.held_out_fraction)
    if not (train and held_out):
        hint = "return more rows, or a table with train and held_out rows"
        raise UserError("has too few rows to train and evaluate", where=f"task {extension.name}", hint=hint)
    held_out = in_content_order(held_out)
    return Task(
        source=ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=None,
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_prompt([*train, *held_out], render),
        digest=content_digest(train, held_out),
        columns=common_columns(train, held_out),
        description=extension.name,
    )


def _given_items(rows: Any, name: str) -> list[Item]:
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        hint = f"return a list of rows; {PROMPT_SHAPE}"
        raise UserError(f"returned a {type(rows).__name__} instead of rows", where=f"task {name}", hint=hint)
    items = []
    for number, fields in enumerate(rows):
        where = f"task {name}, row {number} (from 0)"
        if not isinstance(fields, Mapping):
            raise UserError(f"expected a table, found {type(fields).__name__}", where=where, hint=PROMPT_SHAPE)
        items.append(to_item(Row(fields=dict(fields), where=where), columns={}, system_prompt=""))
    return items


def build_task(task: TaskConfig, *, codec: Codec, batch_prompts: int, seed: int, chat_template: bool) -> Task:
    """The task of a configuration.

    Training and held-out prompts are separated by content, so every `seed` is evaluated on the same prompts; `seed`
    orders the training prompts.

    Raises:
        UserError: the configuration or a file is invalid, or a package is missing.
    """
    render = renderer(codec, chat_template=chat_template)
    if isinstance(task, ArithmeticTask):
        return build_arithmetic(task, batch_prompts=batch_prompts, seed=seed, render=render)
    if isinstance(task, ReasoningGymTask):
        return build_reasoning_gym(task, batch_prompts=batch_prompts, seed=seed, render=render)
    if isinstance(task, PythonTask):
        return build_python(task, batch_prompts=batch_prompts, seed=seed, render=render)
    return build_files(task, batch_prompts=batch_prompts, seed=seed, render=render)
