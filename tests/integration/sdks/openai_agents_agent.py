"""An agent of `openai-agents`: `python openai_agents_agent.py URL chat|responses [tool]`."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from prices import PRICES, SYSTEM, reward

from tidemill.gateway.client import AgentSession, sessions


@function_tool
def price(item: str) -> str:
    """Price of an item."""
    return PRICES.get(item, "?")


def answer(session: AgentSession, api: str, tool: bool) -> str:
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.key)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind(model="agents", openai_client=client)
    agent = Agent(name="agent", instructions=SYSTEM if tool else None, model=model, tools=[price] if tool else [])
    return str(asyncio.run(Runner.run(agent, session.task["prompt"])).final_output)


def main(url: str, api: str, *more: str) -> None:
    set_tracing_disabled(disabled=True)
    for session in sessions(url):
        with session:
            reward(session, partial(answer, session, api, "tool" in more), "tool" in more)


if __name__ == "__main__":
    main(*sys.argv[1:])
