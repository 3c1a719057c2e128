"""The prompts of agents: rendered with system prompt and tools; and the tasks that an environment makes itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tidemill.agents.environment import Environment, Split
from tidemill.agents.episodes import EpisodeCalls, EpisodeError, EpisodePlayer
from tidemill.agents.tools import tools_of
from tidemill.agents.turn_plan import task_seed
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import EnvironmentTask
from tidemill.core.errors import UserError
from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Message, Prompt, pack_tokens
from tidemill.data.prompts import (
    Item,
    ListedSource,
    Task,
    after_system,
    content_digest,
    content_id,
    distinct,
    longest_prompt,
    row_figures,
    with_location,
)
from tidemill.extensions.calls import run_blocking
from tidemill.extensions.loading import IMPORT_DEADLINE_S

WHERE = "env.name"


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
        return [tool.schema for tool in tools_of(self.environment, self.config.params, self.sandbox).values()]

    def render(self, item: Item) -> Prompt:
        """The prompt of a row: system prompt, the row's messages, tools, and the start of the first turn."""
        messages = after_system(item.messages, self.environment.system_prompt)
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

    def player(self) -> EpisodePlayer:
        """For calls outside a run's turns, in an event loop."""
        return EpisodePlayer(self.environment, self.config, self.sandbox)

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
        made = run_blocking(partial(self._sides, sizes))
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

    async def _sides(self, sizes: Mapping[Split, int]) -> list[list[TaskItem]]:
        player = self.player()
        try:
            return [await self._items(player, split, count) for split, count in sizes.items()]
        finally:
            await player.close()

    async def _items(self, player: EpisodePlayer, split: Split, count: int) -> list[TaskItem]:
        """Raises UserError: the tasks cannot be made, or one cannot be reset."""

        async def made(calls: EpisodeCalls) -> list[dict[str, Any]]:
            outcome = await calls.make("tasks", {"split": split, "count": count}, timeout_s=IMPORT_DEADLINE_S)
            rows: list[dict[str, Any]] = json.loads(outcome.text)
            return rows

        async def first_message(row: dict[str, Any], calls: EpisodeCalls) -> str:
            outcome = await calls.make("reset", {"task": row, "seed": task_seed(row)})
            if not outcome.text:
                raise EpisodeError("reset returned no text", "reset")
            return outcome.text

        key = json.dumps([self.config.name, self.config.params], sort_keys=True)
        items = list[TaskItem]()
        try:
            for row in await player.play(made, attempts=1):
                item = TaskItem(
                    messages=(Message(role="user", content=await player.play(partial(first_message, row))),),
                    answer=None if row.get("answer") is None else str(row["answer"]),
                    metadata={"task": row},
                    environment=key,
                )
                items.append(item)
        except EpisodeError as error:
            hint = f"correct {error.method.rpartition('.')[2]}()"
            raise UserError(str(error), where=f"{self.config.name}, {split}", hint=hint) from None
        return items
