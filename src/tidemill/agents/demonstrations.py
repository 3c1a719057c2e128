"""Demonstrations of agents: episodes that an environment's own teacher plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from tidemill.agents.environment import Environment
from tidemill.agents.episodes import EpisodeCalls, EpisodeError
from tidemill.agents.prompts import AgentPrompts
from tidemill.agents.turn_plan import TurnPlanner, task_of, task_seed
from tidemill.core.errors import UserError
from tidemill.core.records import Message, Prompt, Turn
from tidemill.extensions.calls import run_blocking


def agent_demonstrations(
    agent: AgentPrompts,
    prompts: Sequence[Prompt],
    *,
    chat_template: bool,
    report: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each prompt: its messages, or its text without a chat template, and the turns of
    `Environment.demonstrate`. An episode in which a call failed in all attempts is left out.

    Args:
        report: receives the first failure of each method.

    Raises:
        UserError: the environment has no teacher, the teacher calls a tool wrongly, or `env.max_environment_errors`
            episodes failed, or all.
    """
    if agent.environment.demonstrate is Environment.demonstrate:
        hint = "define demonstrate(self), which returns the next action"
        raise UserError(f"{agent.config.name} has no teacher", where="env.name", hint=hint)
    tools = {"tools": agent.schemas} if agent.schemas else {}
    rows = []
    for prompt, messages in zip(prompts, run_blocking(partial(Teacher(agent, report).played, prompts)), strict=True):
        if messages is None:
            continue
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        first = [msgspec.to_builtins(each) for each in prompt.messages]
        rows.append(
            {"messages": first + turns, **tools} if chat_template else {"prompt": prompt.text, "completion": turns}
        )
    return rows


class Teacher:
    """Plays episodes."""

    def __init__(self, agent: AgentPrompts, report: Callable[[str], None]) -> None:
        self._agent, self._report = agent, report
        self._planner = TurnPlanner(agent.environment, agent.config, agent.format, agent.sandbox)
        self._failed: list[EpisodeError] = []

    async def played(self, prompts: Sequence[Prompt]) -> list[list[Message] | None]:
        """The turns of each prompt's episode; None if it failed.

        Raises:
            UserError: as `agent_demonstrations`.
        """
        self._player, self._prompts = self._agent.player(), len(prompts)
        permits = asyncio.Semaphore(self._agent.config.concurrency)

        async def play(prompt: Prompt) -> list[Message] | None:
            async with permits:
                try:
                    return await self._player.play(partial(self._episode, prompt))
                except EpisodeError as error:
                    self._fail(error, prompt)
                    return None

        playing = [asyncio.create_task(play(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*playing)
        finally:
            for each in playing:
                each.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            await self._player.close()

    def _fail(self, error: EpisodeError, prompt: Prompt) -> None:
        """Raises UserError: too many episodes failed."""
        if error.method not in [earlier.method for earlier in self._failed]:
            self._report(f"warning: {error}; the episode is left out of the demonstrations")
        self._failed.append(error)
        if len(self._failed) >= min(self._agent.config.max_environment_errors, self._prompts):
            what = f"{len(self._failed)} episodes of {self._agent.config.name} failed; the first: {self._failed[0]}"
            hint = f"correct {self._failed[0].method}"
            raise UserError(what, where=f"task {prompt.text[:60]!r}", hint=hint)

    async def _episode(self, prompt: Prompt, calls: EpisodeCalls) -> list[Message]:
        """The messages of an episode up to the teacher's last action, with observations as the model sees them.

        Raises:
            EpisodeError: a call failed.
            UserError: the teacher calls a tool wrongly.
        """
        planner, task = self._planner, task_of(prompt)
        role: Literal["tool", "user"] = "tool" if planner.uses_tools else "user"
        await calls.make("reset", {"task": task, "seed": task_seed(task)})
        messages: list[Message] = []
        for number in range(1, self._agent.config.turns + 1):
            action = (await calls.make("demonstrate", {})).text
            messages.append(Message(role="assistant", content=action))
            turn = Turn(start=0, end=0, text=action)
            planned = planner.calls(turn)
            if planner.answer(planned, turn) is not None:
                break
            if mistake := next((call.mistake for call in planned if call.mistake), ""):
                what = f"the teacher of {self._agent.config.name} made a call that is wrong: {mistake}"
                raise UserError(what, where=f"task {prompt.text[:60]!r}", hint="correct demonstrate()")
            outcomes = []
            for call in planned:
                outcome = await calls.make(
                    call.name,
                    json.loads(call.arguments),
                    timeout_s=call.timeout_s,
                    idempotent=call.idempotent,
                    call_id=f"demonstrations-{prompt.prompt_id}-{number}-{call.index}",
                )
                outcomes.append(planner.settle(call, outcome))
            if any(outcome.done for outcome in outcomes):
                break
            messages += [Message(role=role, content=outcome.text) for outcome in outcomes]
        return messages if messages[-1].role == "assistant" else messages[: -len(outcomes)]
