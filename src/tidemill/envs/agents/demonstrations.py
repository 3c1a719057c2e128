"""Demonstrations of agents: episodes that an environment's own teacher plays."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Message, Prompt, Turn
from tidemill.envs.agents.environment import Environment
from tidemill.envs.agents.instances import Work
from tidemill.envs.agents.prompts import AgentPrompts
from tidemill.envs.agents.turn_plan import TurnPlanner, task_of, task_seed


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
    planner = TurnPlanner(agent.environment, agent.config, agent.format, agent.sandbox)
    rows = []
    for prompt in prompts:
        turns, first = _played(agent, planner, prompt), [msgspec.to_builtins(each) for each in prompt.messages]
        rows.append(
            {"messages": first + turns, **tools} if chat_template else {"prompt": prompt.text, "completion": turns}
        )
    return rows


def _played(agent: AgentPrompts, planner: TurnPlanner, prompt: Prompt) -> list[dict[str, str]]:
    try:
        turns = asyncio.run(_episode(agent, planner, prompt))
    except Exception as error:  # of the user's class
        what = f"the teacher of {agent.config.name} raised {exception_text(error)}"
        raise UserError(what, where=f"task {prompt.text[:60]!r}", hint="correct demonstrate()") from error
    return [{"role": turn.role, "content": turn.content} for turn in turns]


async def _episode(agent: AgentPrompts, planner: TurnPlanner, prompt: Prompt) -> list[Message]:
    """The messages of an episode up to the teacher's last action, with observations as the model sees them."""
    instances, task = agent.instances(), task_of(prompt)
    role: Literal["tool", "user"] = "tool" if planner.uses_tools else "user"

    async def made(method: str, arguments: str = "{}") -> tuple[Work, Any]:
        work = Work(index=0, episode=0, method=method, arguments=arguments)
        value = instances.invoke(work)
        return work, await value if inspect.isawaitable(value) else value

    await made("reset", json.dumps({"task": task, "seed": task_seed(task)}))
    messages: list[Message] = []
    for _ in range(agent.config.turns):
        _, action = await made("demonstrate")
        messages.append(Message(role="assistant", content=str(action)))
        turn = Turn(start=0, end=0, text=str(action))
        planned = planner.calls(turn)
        if planner.answer(planned, turn) is not None:
            break
        if mistake := next((call.mistake for call in planned if call.mistake), ""):
            raise ValueError(mistake)
        outcomes = [planner.settle(call, instances.outcome(*await made(call.name, call.arguments))) for call in planned]
        if any(outcome.done for outcome in outcomes):
            break
        messages += [Message(role=role, content=outcome.text) for outcome in outcomes]
    await made("close")
    return messages if messages[-1].role == "assistant" else messages[: -len(outcomes)]
