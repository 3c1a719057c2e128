"""Builds the task of a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from tidemill.config.schema import RunSpec
from tidemill.config.task import (
    ArithmeticTask,
    EnvironmentTask,
    FileTask,
    PythonTask,
    ReasoningGymTask,
    ServedTask,
    TaskConfig,
)
from tidemill.core.errors import UserError
from tidemill.core.formatting import left_out_text
from tidemill.core.protocols import Codec
from tidemill.core.records import Prompt, count, pack_tokens
from tidemill.data.arithmetic import build_arithmetic
from tidemill.data.prompts import (
    Item,
    ListedSource,
    LongestPrompt,
    Render,
    Task,
    longest_prompt,
    renderer,
    row_values,
)
from tidemill.data.reasoning_gym import build_reasoning_gym
from tidemill.data.row_files import DataRow
from tidemill.data.row_split import TrainEvalSplit, read_split, split_rows
from tidemill.data.row_table import ExampleT, Progress, RowTable, RowUse, table_in_memory
from tidemill.data.rows import PROMPT_SHAPE, to_item
from tidemill.extensions.calls import CallError, CallTimeout, call_blocking
from tidemill.extensions.loading import IMPORT_DEADLINE_S
from tidemill.extensions.registry import resolve
from tidemill.extensions.results import placed, shown

SPLITS = ("train", "held_out")
"""Keys of the dict that the function of a task may return."""


def build_files(
    config: FileTask, *, batch_prompts: int, seed: int, render: Render, progress: Progress = lambda _: None
) -> Task:
    """The task of one or several files, or of training and evaluation files.

    Raises:
        UserError: a file cannot be read or has too few rows; names file and row.
    """
    split = read_split(config, partial(_use_of_items, render), section="task", progress=progress)
    left_out = split.left_out
    reasons = left_out_text(left_out)
    if limit := config.max_prompt_tokens:
        split, long = split.at_most(limit)
        if not (len(split.train) and len(split.held_out)):
            what = f"no prompt of one side has at most {limit} tokens"
            raise UserError(what, where="task.max_prompt_tokens", hint="raise it, or shorten the prompts")
        if too_long := sum(map(len, long)):
            left_out |= {"too_long": too_long}
            reasons = ", ".join(filter(None, (reasons, f"{too_long} longer than {limit} tokens")))
    description = config.description + (f" (left out of training: {reasons})" if reasons else "")
    task = _task(split, batch_prompts=batch_prompts, seed=seed, render=render, description=description)
    return replace(task, left_out=left_out)


def _use_of_items(render: Render, **settings: Any) -> RowUse[Item, Item]:
    return RowUse(
        section="task",
        shape=PROMPT_SHAPE,
        parse=partial(to_item, **settings),
        encode=lambda item: item,
        tokens=lambda item: count(render(item).token_ids),
        values=row_values,
        settings=repr(("prompts", settings)),
    )


def _task(split: TrainEvalSplit[Item], *, batch_prompts: int, seed: int, render: Render, description: str) -> Task:
    train, held_out = split.train.examples(), split.held_out.examples()
    order = split.order(batch=batch_prompts, seed=seed)
    side = max((split.train, split.held_out), key=lambda side: int(side.tokens.max()))
    longest = side.table.example(int(side.rows[side.tokens.argmax()]))
    return Task(
        source=ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render, order=order),
        default_stop_strings=(),
        check=None,
        longest=longest_prompt([longest], render),
        description=description,
        **_row_facts(split),
    )


def build_python(config: PythonTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of a user function that returns rows.

    Raises:
        UserError: the function does not exist, raises, or returns something else; names the row.
    """
    split = _python_split(config, _use_of_items(render, columns={}, system_prompt=""))
    name = resolve(config.function, "task", where="task.function").name
    return _task(split, batch_prompts=batch_prompts, seed=seed, render=render, description=name)


def _python_split(config: PythonTask, use: RowUse[Item, ExampleT]) -> TrainEvalSplit[ExampleT]:
    extension = resolve(config.function, "task", where="task.function")
    name = placed(f"task {extension.name}", extension.function)
    try:
        returned = call_blocking(lambda: _listed(extension.function(**config.params)), timeout_s=IMPORT_DEADLINE_S)
    except (CallError, CallTimeout) as error:
        what = str(error) or f"did not return within {IMPORT_DEADLINE_S:g} s"
        raise UserError(what, where=name, hint="correct the function, or task.params") from None
    splits = dict(returned) if isinstance(returned, Mapping) else {"train": returned}
    if unknown := [split for split in splits if split not in SPLITS]:
        what = f"returned a dict with {', '.join(map(repr, unknown))}"
        raise UserError(what, where=name, hint="return a list of rows, or a dict of the lists `train` and `held_out`")

    def table(rows: Any, where: str) -> RowTable[ExampleT]:
        return table_in_memory(_given_rows(rows, where), use, where=partial(_place, where))

    held_out = table(splits["held_out"], f"{name}, held_out") if "held_out" in splits else None
    train = table(splits.get("train"), name)
    if not len(train.index) or (held_out and not len(held_out.index)):
        hint = "return more rows, or a table with train and held_out rows"
        raise UserError("has too few rows to train and evaluate", where=name, hint=hint)
    return split_rows(train, held_out, config.held_out_fraction, where=name, section="task")


def _listed(returned: Any) -> Any:
    """What a task returned, with a list in place of a generator, so that it raises where it is called."""
    if isinstance(returned, Mapping):
        return {name: _listed(rows) for name, rows in returned.items()}
    return list(returned) if isinstance(returned, Iterator) else returned


def counted_task(config: FileTask | PythonTask) -> Task:
    """A task without prompts: its rows are only counted, neither rendered nor kept, and without an index on disk.

    Raises:
        UserError: as `build_files` and `build_python`.
    """

    def use(**settings: Any) -> RowUse[Item, None]:
        return RowUse(
            section="task",
            shape=PROMPT_SHAPE,
            parse=partial(to_item, **settings),
            encode=lambda _: None,
            tokens=lambda _: 0,
            values=row_values,
        )

    if isinstance(config, PythonTask):
        split = _python_split(config, use(columns={}, system_prompt=""))
    else:
        in_memory = config.model_copy(update={"index_above_mb": math.inf})
        split = read_split(in_memory, use, section="task", progress=lambda _: None)
    return replace(served_task(), description=config.kind, **_row_facts(split))


def _row_facts(split: TrainEvalSplit[Any]) -> dict[str, Any]:
    """Fields of a task."""
    return {
        "train_size": len(split.train),
        "held_out_size": len(split.held_out),
        "digest": split.digest,
        "train_rows": split.train.table.figures,
        "held_out_rows": split.held_out.table.figures,
        "left_out": split.left_out,
    }


def _given_rows(rows: Any, name: str) -> Iterator[DataRow]:
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        hint = f"return a list of rows; {PROMPT_SHAPE}"
        raise UserError(f"returned {shown(rows)} instead of rows", where=name, hint=hint)
    for number, fields in enumerate(rows):
        where = _place(name, number)
        if not isinstance(fields, Mapping):
            raise UserError(f"expected a table, found {type(fields).__name__}", where=where, hint=PROMPT_SHAPE)
        yield DataRow(fields=dict(fields), where=where, number=number)


def _place(rows: str, number: int) -> str:
    return f"{rows}, row {number} (from 0)"


class AgentTasks(Protocol):
    """Makes the prompts of an agent (`agents.prompts`)."""

    def render(self, item: Item) -> Prompt: ...

    def adapted(self, task: Task) -> Task: ...

    def task(self, config: EnvironmentTask, *, batch_prompts: int, seed: int) -> Task: ...


def build_task(
    task: TaskConfig,
    *,
    codec: Codec,
    batch_prompts: int,
    seed: int,
    chat_template: bool,
    progress: Progress = lambda _: None,
    agent: AgentTasks | None = None,
) -> Task:
    """The task of a configuration.

    Training and held-out prompts are separated by content, so every `seed` is evaluated on the same prompts; `seed`
    orders the training prompts.

    Args:
        agent: makes the prompts of an agent.

    Raises:
        UserError: the configuration or a file is invalid, or a package is missing.
    """
    if isinstance(task, ServedTask):
        return served_task()
    if isinstance(task, EnvironmentTask):
        if agent is None:
            what = 'task.kind = "environment" needs an environment'
            raise UserError(what, where="env.name", hint="name one, or choose another task.kind")
        return agent.task(task, batch_prompts=batch_prompts, seed=seed)
    render = renderer(codec, chat_template=chat_template) if agent is None else agent.render
    if isinstance(task, ArithmeticTask):
        built = build_arithmetic(task, batch_prompts=batch_prompts, seed=seed, render=render)
    elif isinstance(task, ReasoningGymTask):
        built = build_reasoning_gym(task, batch_prompts=batch_prompts, seed=seed, render=render)
    elif isinstance(task, PythonTask):
        built = build_python(task, batch_prompts=batch_prompts, seed=seed, render=render)
    else:
        built = build_files(task, batch_prompts=batch_prompts, seed=seed, render=render, progress=progress)
    return built if agent is None else agent.adapted(built)


def configured_task(
    spec: RunSpec, *, codec: Codec, progress: Progress = lambda _: None, agent: AgentTasks | None = None
) -> Task:
    """The task of a run, without `eval.sets`. Arguments and errors: as `build_task`."""
    task = build_task(
        spec.task,
        codec=codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
        progress=progress,
        agent=agent,
    )
    if spec.schedule.tail == "batching" and spec.short_round > task.train_size:
        what = f"a round would start {spec.short_round} prompts, and the task has {task.train_size} training prompts"
        raise UserError(what, where="schedule.oversample", hint="lower it, or batch.prompts, or use more prompts")
    return task


class _NoPrompts:
    """Implements `core.protocols.PromptSource`; the one prompt is for the probe of new weights."""

    prompt = Prompt(prompt_id="probe", token_ids=pack_tokens([0, 1] * 8), text="", answer="")

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        return [(0, self.prompt)]

    def held_out(self, limit: int | None = None) -> Sequence[Prompt]:
        return []


def served_task() -> Task:
    """The task of a model that is only served."""
    return Task(
        source=_NoPrompts(),
        default_stop_strings=(),
        check=None,
        train_size=0,
        held_out_size=0,
        longest=LongestPrompt(tokens=1, text=""),
        digest="served",
        description="prompts of clients",
    )
