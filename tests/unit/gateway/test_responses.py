"""Answers of /v1/responses, whole and as events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.scripted import (
    CALL,
    CHAT,
    RESPONSES,
    TOOL,
    Scripted,
    chat,
    events,
    gateway,
)

RM = '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'

ADD = {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "parts", "finish"),
    [
        (RM, [RM], "stop"),
        (CALL.replace('"add"', '"rm"'), [CALL.replace('"add"', '"rm"')], "stop"),
        ("Write <tool_call> to call.", ["Write <tool_call> to call."], "stop"),
        (CALL[:50], [CALL[:50]], "length"),
        (CALL[:-4], [CALL[:-4]], "length"),
        (f"{RM}\n{CALL} {RM} end", [f"{RM}\nLet me see.", ADD, f" {RM} end"], "tool_calls"),
    ],
)
async def test_what_is_no_valid_call_stays_content(said: str, parts: list[Any], finish: str, stream: bool) -> None:
    served, tool = Scripted(said), {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    most = len(served.codec.encode_completion(said)) if finish == "length" else None
    asked = {"model": "scripted", "input": "Hi", "tools": [tool], "max_output_tokens": most, "stream": stream}
    async with gateway(served) as client:
        chatted = await client.post(CHAT, json=chat(tools=[TOOL], max_tokens=most, stream=stream))
        responded = await client.post(RESPONSES, json=asked)

    deltas, reason = choice_of(chatted, stream=stream)
    assert reason == finish
    assert "".join(delta.get("content") or "" for delta in deltas) == "".join(p for p in parts if isinstance(p, str))
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [part for part in parts if isinstance(part, dict)]
    response = events(responded.text)[-1]["response"] if stream else responded.json()
    assert response["status"] == ("incomplete" if finish == "length" else "completed")
    assert [
        item["content"][0]["text"] if item["type"] == "message" else {key: item[key] for key in ADD}
        for item in response["output"]
    ] == parts
    if stream:
        news = [event for event in events(responded.text) if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in news) == "".join(part for part in parts if isinstance(part, str))


def choice_of(answer: Any, *, stream: bool) -> tuple[list[dict[str, Any]], str]:
    """Messages of the only choice, or their parts, and its finish."""
    if not stream:
        choice = answer.json()["choices"][0]
        return [choice["message"]], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


async def test_responses_whole_and_as_events() -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body = {"model": "scripted", "input": "Hi", "instructions": "Be brief.", "tools": [tool]}
    async with gateway(Scripted(CALL)) as client:
        whole = (await client.post(RESPONSES, json=body)).json()
        seen = events((await client.post(RESPONSES, json=body | {"stream": True})).text)
        cut = (await client.post(RESPONSES, json=body | {"max_output_tokens": 4, "tools": None})).json()

    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "Let me see."
    assert (whole["output"][1]["name"], whole["output"][1]["arguments"]) == ("add", '{"a": 1}')
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    kinds = [event["type"] for event in seen]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert "".join(e["delta"] for e in seen if e["type"] == "response.output_text.delta") == "Let me see."
    assert [item["type"] for item in seen[-1]["response"]["output"]] == ["message", "function_call"]
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
