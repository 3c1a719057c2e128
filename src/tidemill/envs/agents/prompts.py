"""The prompts of agents: rendered with system prompt and tools; and the tasks that an environment makes itself."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import EnvironmentTask
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Message, Prompt, pack_tokens
from tidemill.envs.adapters.environments import close_connections
from tidemill.envs.agents.environment import Environment, Split, ToolEnvironment, current_sandbox
from tidemill.envs.agents.instances import Instances, Work
from tidemill.envs.agents.tools import tools_of
from tidemill.envs.agents.turn_plan import task_seed
from tidemill.envs.text.prompts import (
    Item,
    ListedSource,
    Task,
    content_digest,
    content_id,
    distinct,
    longest_prompt,
    row_figures,
    with_location,
)
from tidemill.extensions.calls import CallError, CallTimeout, call_blocking
from tidemill.extensions.loading import IMPORT_DEADLINE_S

WHERE = "env.name"
LONGEST = 1_000_000
"""Characters of a first message."""


class TaskItem(Item, kw_only=True):
    """A task that an environment made. Tasks with equal texts differ by their rows."""

    environment: str  # its name and arguments

    @property
    def replies(self) -> tuple[str, ...]:
        return (*super().replies, json.dumps(self.metadata, sort_keys=True, default=repr), self.environment)


@dataclass(frozen=True, kw_only=True)
class AgentPrompts:
    """Makes the prompts of one environment."""

    environment: type[Environment]
    config: EnvConfig
    format: TurnFormat
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools."""
        tools = (
            tools_of(self.environment, self.config.params, self.sandbox)
            if issubclass(self.environment, ToolEnvironment)
            else {}
        )
        return [tool.schema for tool in tools.values()]

    def render(self, item: Item) -> Prompt:
        """The prompt of a row: system prompt, the row's messages, tools, and the start of the first turn."""
        system = self.environment.system_prompt
        messages = ((Message(role="system", content=system),) if system else ()) + item.messages
        try:
            text, token_ids = self.format.prompt(messages, tools=self.schemas)
        except UserError as error:
            raise with_location(error, item) from error
        return Prompt(
            prompt_id=content_id(item),
            token_ids=pack_tokens(token_ids),
            text=text,
            answer=item.answer,
            metadata=item.metadata,
            messages=messages,
        )

    def instances(self) -> Instances:
        """For calls in this process."""
        return Instances(self.environment, dict(self.config.params), LONGEST, self.sandbox)

    def adapted(self, task: Task) -> Task:
        """A task of rows for this environment.

        Raises:
            UserError: the environment makes its first messages itself.
        """
        if not self.environment.takes_rows:
            hint = 'set task.kind = "environment", or derive it from tidemill.ToolEnvironment'
            raise UserError(f"{self.config.name} makes its own tasks", where="task.kind", hint=hint)
        return replace(task, default_stop_strings=self.environment.stop or task.default_stop_strings)

    def task(self, config: EnvironmentTask, *, batch_prompts: int, seed: int) -> Task:
        """The tasks of the environment.

        Raises:
            UserError: it makes none, the same for training and evaluation, or cannot be reset.
        """
        sizes: dict[Split, int] = {"train": config.train_size, "held_out": config.held_out_size}
        try:
            made = [self._items(split, count) for split, count in sizes.items()]
        finally:
            close_connections()
        train, held_out = (distinct(items) for items in made)
        figures = [row_figures(items) for items in made]
        repeated = sum(side.repeated for side in figures)
        common = {content_id(item) for item in train} & {content_id(item) for item in held_out}
        if common:
            what = f"{len(common)} training tasks are also held-out tasks"
            raise UserError(what, where=WHERE, hint="return different rows for train and held_out in tasks()")
        source = ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=self.render)
        return Task(
            source=source,
            default_stop_strings=self.environment.stop,
            check=None,
            train_size=len(train),
            held_out_size=len(held_out),
            longest=longest_prompt([*train, *held_out], self.render),
            digest=content_digest(train, held_out),
            description=self.config.name,
            train_rows=figures[0],
            held_out_rows=figures[1],
            left_out={"repeated": repeated} if repeated else {},
        )

    def _items(self, split: Split, count: int) -> list[TaskItem]:
        name = f"{self.config.name}, {split}"
        try:
            return call_blocking(lambda: self._made(split, count), timeout_s=IMPORT_DEADLINE_S)
        except (CallError, CallTimeout) as error:
            what = str(error) or f"its tasks were not made within {IMPORT_DEADLINE_S:g} s"
            raise UserError(what, where=name, hint="correct tasks() and reset()") from None

    def _made(self, split: Split, count: int) -> list[TaskItem]:
        current_sandbox.set(self.sandbox)
        rows = self.environment.tasks_for(dict(self.config.params), split, count)
        key = json.dumps([self.config.name, self.config.params], sort_keys=True)
        instances = self.instances()
        items = list[TaskItem]()
        for row in rows[:count]:
            if not isinstance(row, Mapping):
                raise TypeError(f"tasks() returned {type(row).__name__} instead of a table")
            arguments = json.dumps({"task": row, "seed": task_seed(dict(row))})
            work = Work(index=0, episode=0, method="reset", arguments=arguments)
            outcome = instances.outcome(work, _awaited(instances.invoke(work)))
            problem = outcome.text if outcome.error else ""
            if not problem and not 0 < len(outcome.text) <= LONGEST:
                problem = f"reset returned {len(outcome.text):,} characters; 1 to {LONGEST:,} are needed"
            if problem:
                raise UserError(problem, where=f"{self.config.name}, {split}", hint="correct reset()")
            _awaited(instances.invoke(Work(index=0, episode=0, method="close")))
            item = TaskItem(
                messages=(Message(role="user", content=outcome.text),),
                answer=None if row.get("answer") is None else str(row["answer"]),
                metadata={"task": dict(row)},
                environment=key,
            )
            items.append(item)
        if not items:
            raise ValueError("tasks() returned no rows")
        return items


def _awaited(value: Any) -> Any:
    return asyncio.run(_result(value)) if inspect.isawaitable(value) else value


async def _result(value: Any) -> Any:
    return await value
