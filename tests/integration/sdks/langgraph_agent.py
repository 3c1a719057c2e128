"""An agent of LangGraph with `langchain-openai`: `python langgraph_agent.py URL chat|responses [tool]`."""

from __future__ import annotations

import sys
from functools import partial

from langchain.agents import create_agent
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI
from prices import PRICES, SYSTEM, reward
from pydantic import SecretStr

from tidemill.gateway.client import AgentSession, sessions


@as_tool
def price(item: str) -> str:
    """Price of an item."""
    return PRICES.get(item, "?")


def answer(session: AgentSession, api: str, tool: bool) -> str:
    model = ChatOpenAI(
        model="agents", base_url=session.base_url, api_key=SecretStr(session.key), use_responses_api=api == "responses"
    )
    agent = create_agent(model, [price] if tool else [], system_prompt=SYSTEM if tool else None)
    said = agent.invoke({"messages": [("user", session.task["prompt"])]})["messages"][-1]
    return str(said.text)


def main(url: str, api: str, *more: str) -> None:
    for session in sessions(url):
        with session:
            reward(session, partial(answer, session, api, "tool" in more), "tool" in more)


if __name__ == "__main__":
    main(*sys.argv[1:])
