"""The prompts of `eval.sets`: data files that are only evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tidemill.config.addresses import HUB
from tidemill.config.schema import EvalSetConfig, RunSpec
from tidemill.config.task import FileTask, PythonTask, TaskConfig
from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec
from tidemill.data.build_task import AgentTasks, build_task, counted_task, served_task
from tidemill.data.prompts import EvalSet, Task


def with_eval_sets(task: Task, spec: RunSpec, *, codec: Codec, agent: AgentTasks | None = None) -> Task:
    """The task with the prompts of `eval.sets`; its longest prompt is the longest of all.

    Raises:
        UserError: a file is missing, has no rows, or has an invalid row.
    """
    build = partial(
        build_task,
        codec=codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
        agent=agent,
    )
    return _with_sets(task, spec, build)


def counted(spec: RunSpec) -> Task:
    """The task and its sets without prompts: rows of files and of a function are only counted.

    Raises:
        UserError: as `counted_task` and `with_eval_sets`.
    """
    task = counted_task(spec.task) if isinstance(spec.task, FileTask | PythonTask) else served_task()
    return _with_sets(task, spec, counted_task)


def _with_sets(task: Task, spec: RunSpec, build: Callable[[FileTask], Task]) -> Task:
    sets, longest = dict[str, EvalSet](), task.longest
    for index, config in enumerate(spec.eval.sets):
        key = f"eval.sets[{index}]"
        if not str(config.path).startswith(HUB) and not config.path.exists():
            raise UserError("no such file or folder", where=f"{key}.path: {config.path}", hint="correct the path")
        try:
            found = build(_file_task(config, spec.task))
        except UserError as error:
            raise UserError(error.what, where=error.where, hint=error.hint.replace("task.", f"{key}.")) from error
        prompts = tuple(found.source.held_out(config.prompts or spec.eval.prompts))
        assert found.held_out_rows is not None
        sets[config.name] = EvalSet(prompts=prompts, rows=found.held_out_rows, digest=found.digest)
        longest = max(longest, found.longest, key=lambda each: each.tokens)
    return replace(task, eval_sets=sets, longest=longest)


def _file_task(config: EvalSetConfig, task: TaskConfig) -> FileTask:
    """A task whose held-out prompts are all rows of the file."""
    columns, system_prompt = config.columns, config.system_prompt
    if isinstance(task, FileTask):
        columns = task.columns if columns is None else columns
        system_prompt = task.system_prompt if system_prompt is None else system_prompt
    return FileTask(
        kind="file",
        path=config.path,
        columns=columns or {},
        system_prompt=system_prompt or "",
        held_out_fraction=1.0,
    )
