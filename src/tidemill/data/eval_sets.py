"""The prompts of `eval.sets`: data files that are only evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tidemill.config.addresses import HUB
from tidemill.config.schema import RunSpec
from tidemill.config.task import Column, FileTask, PythonTask
from tidemill.core.errors import UserError
from tidemill.core.protocols import Codec
from tidemill.data.build_task import AgentTasks, configured_task, counted_task, served_task
from tidemill.data.prompts import EvalSet, Task


def with_eval_sets(task: Task, spec: RunSpec, *, codec: Codec, agent: AgentTasks | None = None) -> Task:
    """The task with the prompts of `eval.sets`; its longest prompt is the longest of all.

    Raises:
        UserError: a file is missing, has no rows, or has an invalid row.
    """

    def build(config: FileTask) -> Task:
        return configured_task(spec.model_copy(update={"task": config}), codec=codec, agent=agent)

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
    columns, system_prompt = dict[Column, str](), ""
    if isinstance(spec.task, FileTask):
        columns, system_prompt = spec.task.columns, spec.task.system_prompt
    for index, config in enumerate(spec.eval.sets):
        key = f"eval.sets[{index}]"
        if not str(config.path).startswith(HUB) and not config.path.exists():
            raise UserError("no such file or folder", where=f"{key}.path: {config.path}", hint="correct the path")
        rows = FileTask(
            kind="file",
            path=config.path,
            columns=columns if config.columns is None else config.columns,
            system_prompt=system_prompt if config.system_prompt is None else config.system_prompt,
            held_out_fraction=1.0,  # all of them
        )
        try:
            found = build(rows)
        except UserError as error:
            raise UserError(error.what, where=error.where, hint=error.hint.replace("task.", f"{key}.")) from error
        prompts = tuple(found.source.held_out(config.prompts or spec.eval.prompts))
        assert found.held_out_rows is not None
        sets[config.name] = EvalSet(prompts=prompts, rows=found.held_out_rows, digest=found.digest)
        longest = max(longest, found.longest, key=lambda each: each.tokens)
    return replace(task, eval_sets=sets, longest=longest)
