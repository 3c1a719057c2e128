"""An agent written with the `openai` package: `python openai_agent.py URL chat|responses [tool]`."""

from __future__ import annotations

import json
import sys
from functools import partial

import openai
from openai.types.chat import ChatCompletionMessageParam
from prices import PRICES, SYSTEM, reward

from tidemill.gateway.client import AgentSession, sessions

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}


def chat(session: AgentSession, tool: bool) -> str:
    client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
    function = {"name": "price", "description": "Price of an item.", "parameters": SCHEMA}
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": session.task["prompt"]}]
    if tool:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    while True:
        more = {"tools": [{"type": "function", "function": function}]} if tool else {}
        said = client.chat.completions.create(model="agents", messages=messages, **more).choices[0].message  # type: ignore[call-overload]
        if not said.tool_calls:
            return str(said.content)
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = PRICES.get(json.loads(call.function.arguments).get("item"), "?")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(session: AgentSession, tool: bool) -> str:
    client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
    function = {"type": "function", "name": "price", "description": "Price of an item.", "parameters": SCHEMA}
    items: list[object] = [{"role": "user", "content": session.task["prompt"]}]
    while True:
        more = {"tools": [function], "instructions": SYSTEM} if tool else {}
        answer = client.responses.create(model="agents", input=items, **more)  # type: ignore[call-overload]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        items += answer.output
        for call in calls:
            result = PRICES.get(json.loads(call.arguments).get("item"), "?")
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def main(url: str, api: str, *more: str) -> None:
    for session in sessions(url):
        with session:
            reward(session, partial(chat if api == "chat" else responses, session, "tool" in more), "tool" in more)


if __name__ == "__main__":
    main(*sys.argv[1:])
