"""Demonstrations of agents: episodes that an environment's own teacher plays."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Message, Prompt
from tidemill.envs.agents.environment import Environment, Step, ToolEnvironment
from tidemill.envs.agents.prompts import AgentPrompts
from tidemill.envs.agents.turn_plan import task_of, task_seed


def agent_demonstrations(
    agent: AgentPrompts, prompts: Sequence[Prompt], *, chat_template: bool
) -> list[dict[str, Any]]:
    """One row for each prompt: its messages, or its text without a chat template, and the turns of
    `Environment.demonstrate`.

    Raises:
        UserError: the environment has no teacher, or the teacher or the environment raises.
    """
    if agent.environment.demonstrate is Environment.demonstrate:
        hint = "define demonstrate(self), which returns the next action"
        raise UserError(f"{agent.config.name} has no teacher", where="env.name", hint=hint)
    tools = {"tools": agent.schemas} if agent.schemas else {}
    rows = []
    for prompt in prompts:
        turns, first = asyncio.run(_played(agent, prompt)), [msgspec.to_builtins(each) for each in prompt.messages]
        rows.append(
            {"messages": first + turns, **tools} if chat_template else {"prompt": prompt.text, "completion": turns}
        )
    return rows


async def _played(agent: AgentPrompts, prompt: Prompt) -> list[dict[str, str]]:
    try:
        turns = await _episode(agent, prompt)
    except Exception as error:  # of the user's class
        what = f"the teacher of {agent.config.name} raised {exception_text(error)}"
        raise UserError(what, where=f"task {prompt.text[:60]!r}", hint="correct demonstrate()") from error
    return [{"role": turn.role, "content": turn.content} for turn in turns]


async def _episode(agent: AgentPrompts, prompt: Prompt) -> list[Message]:
    environment, task = agent.environment(**agent.config.params), task_of(prompt)
    await _result(environment.reset(task, task_seed(task)))
    messages: list[Message] = []
    for _ in range(agent.config.turns):
        action = str(await _result(environment.demonstrate()))
        messages.append(Message(role="assistant", content=action))
        if isinstance(environment, ToolEnvironment):
            calls = agent.format.parse(action).calls
            if not calls:
                break
            for call in calls:
                text = await _result(getattr(environment, call.name)(**json.loads(call.arguments)))
                messages.append(Message(role="tool", content=str(text)))
        else:
            step: Step = await _result(environment.step(action))
            if step.done:
                break
            messages.append(Message(role="user", content=step.text))
    return messages if messages[-1].role == "assistant" else messages[:-1]


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
