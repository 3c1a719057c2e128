"""Requests of the three APIs: what is obeyed, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.scripted import (
    CHAT,
    RESPONSES,
    TOOL,
    Scripted,
    chat,
    gateway,
    named,
)
from tidemill.core.records import unpack_tokens


async def test_calls_and_results_of_earlier_turns_reach_the_template() -> None:
    served = Scripted()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2 <|im_end|>"},
    ]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2 <|im_end|>"},
    ]
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    async with gateway(served) as client:
        await client.post(CHAT, json=chat(tools=[TOOL]) | {"messages": messages})
        await client.post(RESPONSES, json={"model": "scripted", "input": items, "tools": [tool]})

    chat_ids, response_ids = (unpack_tokens(asked.prompt_ids) for asked in served.requested)
    assert chat_ids == response_ids
    text = served.codec.decode_whole(chat_ids)
    assert 'assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert chat_ids.count(served.codec.encode_completion("<|im_end|>")[0]) == 4  # that of the result stays text


REFUSED = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"messages": []}, 400, "messages", None),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0]", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "context_length_exceeded"),
    ({"max_tokens": 499}, 400, "messages", "context_length_exceeded"),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_tokens": True}, 400, "max_tokens", None),
    ({"temperature": 3}, 400, "temperature", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"n": 1000}, 400, "n", None),
    ({"stop": [1]}, 400, "stop", None),
    ({"stop": ["a", ""]}, 400, "stop", None),
    ({"n": 1.0}, 400, "n", None),
    ({"seed": 2**63}, 400, "seed", None),
    ({"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", None),
    *[
        ({"stream_options": {name: 1}}, 400, f"stream_options.{name}", "unsupported_parameter")
        for name in ("x", "x` - at `$.y")
    ],
    ({"messages": [5]}, 400, "messages[0]", None),
    ({"messages": [{"role": "x" * 100_000, "content": ""}]}, 400, "messages[0]", None),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "messages[0]", None),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    ({"tool_choice": "required"}, 400, "tool_choice", "unsupported_parameter"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "unsupported_parameter"),
    ({"store": True}, 400, "store", "unsupported_parameter"),
    ({"min_p": 0.1}, 400, "min_p", "unsupported_parameter"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": "y" * 300_000}}]}, 400, "tools[0]", None),
    *[({"tools": [named(name)]}, 400, "tools[0].name", None) for name in ("", "a b", "a\n", "ä", "a.b", "a" * 65, 7)],
    ({"tools": [named("a"), TOOL, named("a")]}, 400, "tools[2].name", None),
    *[
        ({"tools": [named("a", parameters)]}, 400, f"tools[0].parameters{place}", None)
        for parameters, place in (
            ([], ""),
            ("{}", ""),
            ({"type": "string"}, ""),
            ({"properties": [1]}, ".properties"),
            ({"required": "x"}, ".required"),
            ({"required": [1]}, ".required"),
            ({"properties": {"x": "string"}}, ".properties.x"),
            ({"properties": {"x": {"type": "text"}}}, ".properties.x.type"),
            ({"properties": {"x": {"items": {"type": {}}}}}, ".properties.x.items.type"),
            ({"properties": {"x": {"anyOf": [{"enum": 3}]}}}, ".properties.x.anyOf[0].enum"),
        )
    ],
]


@pytest.mark.parametrize(("changed", "status", "param", "code"), REFUSED)
async def test_what_cannot_be_obeyed_is_refused_by_its_name(
    changed: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    served = Scripted()
    async with gateway(served) as client:
        answer = await client.post(CHAT, json=chat() | changed)

    error = answer.json()["error"]
    assert answer.status_code == status
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert not served.requested
    assert "/" not in error["message"].replace("/v1/", "")
    assert len(error["message"]) < 300


async def test_parameters_without_an_effect_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "seed": None,
    }
    more: dict[str, Any] = {
        "service_tier": "auto",
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    async with gateway(Scripted()) as client:
        assert (await client.post(CHAT, json=chat(**neutral, **more, tool_choice="auto"))).status_code == 200


async def test_an_unknown_earlier_response_is_an_error() -> None:
    async with gateway(Scripted()) as client:
        body = {"model": "scripted", "input": "Hi", "previous_response_id": "resp-1"}
        answer = await client.post(RESPONSES, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_schemas_of_clients_are_accepted() -> None:
    union = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {}}], "enum": ["a"], "default": None}
    schemas = [{}, None, {"type": "object", "properties": {"x": union, "y": True}, "required": ["x"], "title": "T"}]
    async with gateway(Scripted()) as client:
        answer = await client.post(CHAT, json=chat(tools=[named(f"a-{n}_B", each) for n, each in enumerate(schemas)]))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[1]", {}, 400, "invalid_json"),
        (b'{"model": "\xff"}', {}, 400, "invalid_json"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", {}, 400, "invalid_json"),
        (b"[" * 1_000_000, {}, 400, "invalid_json"),
        (b'{"a": "' + b"x" * 2_000_000 + b'"}', {}, 413, "request_too_large"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
    ],
)
async def test_bodies_that_cannot_be_read(content: bytes, headers: dict[str, str], status: int, code: str) -> None:
    async with gateway(Scripted(), body_mb=1.5) as client:
        answer = await client.post(CHAT, content=content, headers=headers)
        again = await client.post(CHAT, json=chat())

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert again.status_code == 200
