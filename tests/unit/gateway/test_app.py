"""The gateway over a scripted model: answers and streams of the three APIs, bad input, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.unit.gateway.scripted import DEADLINE_S, Scripted, chat, gateway
from tidemill.core.errors import UserError
from tidemill.core.records import unpack_tokens
from tidemill.gateway import app as app_module
from tidemill.gateway.access import Keys
from tidemill.gateway.errors import ApiError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALL = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def named(name: object, parameters: object = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until(condition: Callable[[], bool], *, seconds: float = DEADLINE_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_a_chat_is_answered() -> None:
    served = Scripted()
    async with gateway(served) as client:
        answer = (await client.post(CHAT, json=chat(return_token_ids=True, logprobs=True, n=2))).json()

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello you."] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    ids = served.codec.encode_completion("Hello you.")
    assert answer["choices"][1]["token_ids"] == ids
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [*"Hello you."]
    assert answer["prompt_token_ids"] == unpack_tokens(served.requested[0].prompt_ids)
    assert served.codec.decode_whole(answer["prompt_token_ids"]).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    prompt = len(answer["prompt_token_ids"])
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * len(ids),
        "total_tokens": prompt + 2 * len(ids),
    }


async def test_a_stream_says_the_same_and_ends_with_its_usage() -> None:
    async with gateway(Scripted()) as client:
        body = chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        *chunks, used, end = events((await client.post(CHAT, json=body)).text)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello you."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    assert len({chunk["id"] for chunk in [*chunks, used]}) == 1
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == used["usage"]["completion_tokens"] == 10
    assert (used["choices"], end) == ([], "[DONE]")


async def test_tool_calls_whole_and_in_a_stream() -> None:
    async with gateway(Scripted(CALL)) as client:
        whole = (await client.post(CHAT, json=chat(tools=[TOOL]))).json()["choices"][0]
        chunks = events((await client.post(CHAT, json=chat(tools=[TOOL], stream=True))).text)[:-1]
        plain = (await client.post(CHAT, json=chat())).json()["choices"][0]

    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see."
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "add")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert plain["message"]["content"] == CALL  # nobody asked for tools


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


async def test_completions_of_texts_and_token_ids() -> None:
    served = Scripted()
    body = {"model": "scripted", "prompt": ["One", "Two"], "max_tokens": 5, "logprobs": 0}
    async with gateway(served) as client:
        both = (await client.post(COMPLETIONS, json=body)).json()
        ids = (await client.post(COMPLETIONS, json={"model": "scripted", "prompt": [5, 6, 7], "seed": 3})).json()
        stream = await client.post(COMPLETIONS, json=body | {"prompt": "One", "stream": True})

    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in both["choices"]] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    assert both["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert unpack_tokens(served.requested[2].prompt_ids) == [5, 6, 7]
    assert (served.requested[2].params.seed, ids["choices"][0]["finish_reason"]) == (3, "stop")
    assert "".join(chunk["choices"][0]["text"] for chunk in events(stream.text)[:-1]) == "Hello"


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
    ("header", "code"),
    [
        ("Host: localhost", "invalid_http"),
        ("Content-Length: 3", "invalid_http"),
        ("Authorization: Bearer b", "repeated_header"),
        ("Origin: http://localhost", "repeated_header"),
        ("Content-Encoding: identity", "repeated_header"),
        ("Idempotency-Key: b", "repeated_header"),
    ],
)
async def test_a_header_with_one_value_is_refused_if_it_has_two(header: str, code: str) -> None:
    name = header.partition(":")[0]
    first = {"Host": "localhost", "Content-Length": "2"} | ({} if name in ("Host", "Content-Length") else {name: "a"})
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{key}: {value}" for key, value in first.items()), header, "", "{}"]
    async with gateway(Scripted()) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(DEADLINE_S):
            head, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            error = json.loads(await reader.readuntil(b"}}"))["error"]
        writer.close()
    assert b"400" in head
    assert error["code"] == code


async def test_a_retry_key_outside_sessions_is_refused_by_its_name() -> None:
    served = Scripted()
    body = {"model": "scripted", "prompt": "Hi", "input": "Hi"}
    async with gateway(served) as client:
        for path, fields in ((CHAT, chat()), (COMPLETIONS, body), (RESPONSES, body)):
            answer = await client.post(path, json=fields, headers={"idempotency-key": "k"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (
                400,
                "Idempotency-Key",
                "unsupported_parameter",
            )
    assert not served.requested


async def test_characters_of_several_tokens_have_their_own_bytes() -> None:
    text, served = "é 😀ok", Scripted("é 😀ok")
    body = {"model": "scripted", "prompt": "Hi", "logprobs": 0}
    async with gateway(served) as client:
        whole = (await client.post(CHAT, json=chat(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
        chunks = events((await client.post(CHAT, json=chat(logprobs=True, stream=True))).text)[:-1]
        old = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
        old_chunks = events((await client.post(COMPLETIONS, json=body | {"stream": True})).text)[:-1]

    assert len(whole) == len(served.codec.encode_completion(text)) > len(text)
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == text.encode()
    assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["content"]] == whole
    offsets = [each for chunk in old_chunks for each in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == old["text_offset"]
    assert offsets[-2:] == [text.index("o"), text.index("k")]
    # A token with a part of a character shows its bytes, with a mark where no other field has them.
    shown = [bytes(entry["bytes"]).decode(errors="backslashreplace") for entry in whole]
    assert [entry["token"] for entry in whole] == shown
    assert old["tokens"][:2] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert old["tokens"][-2:] == ["o", "k"]
    assert [token.removeprefix("bytes:") for token in old["tokens"]] == shown
    assert [each for chunk in old_chunks for each in chunk["choices"][0]["logprobs"]["tokens"]] == old["tokens"]


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


async def test_keys_are_checked_before_the_body_and_read_again_when_they_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    file.chmod(0o600)
    async with gateway(Scripted(), token_file=file) as client:

        async def status(key: str) -> int:
            return (await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})).status_code

        assert [await status(key) for key in ("first", "second", "third", "-")] == [200, 200, 401, 401]
        file.write_text("third\n")
        os.utime(file, (1, 1))
        assert [await status(key) for key in ("first", "third")] == [401, 200]
        wrong = await client.post(CHAT, content=b"{")
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert wrong.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(("mode", "text", "what"), [(0o644, "key", "others can read"), (0o600, " \n", "has no key")])
def test_key_files_that_are_refused(tmp_path: Path, mode: int, text: str, what: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UserError, match=what):
        Keys(file)
    with pytest.raises(UserError, match="No such file"):
        Keys(tmp_path / "missing")


async def test_without_keys_pages_of_other_sites_are_not_served() -> None:
    async with gateway(Scripted()) as client:
        foreign = await client.post(CHAT, json=chat(), headers={"origin": "https://evil.example"})
        rebound = await client.post(CHAT, json=chat(), headers={"host": "evil.example"})
        own = await client.post(CHAT, json=chat(), headers={"origin": "http://localhost:3000"})

    assert [answer.status_code for answer in (foreign, rebound, own)] == [403, 403, 200]
    assert "access-control-allow-origin" not in own.headers


async def test_too_many_requests_of_a_key_are_told_when_to_come_again() -> None:
    served = Scripted()
    served.go_on.clear()
    async with gateway(served, concurrency=2) as client:
        streams = [asyncio.create_task(client.post(CHAT, json=chat(stream=True))) for _ in range(2)]
        await until(lambda: len(served.requested) == 2)
        refused = await client.post(CHAT, json=chat())
        served.go_on.set()
        assert [(await stream).status_code for stream in streams] == [200, 200]
        after = await client.post(CHAT, json=chat())

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert after.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_completion(stream: bool) -> None:
    served = Scripted()
    served.go_on.clear()
    async with gateway(served) as client:
        task = asyncio.create_task(client.post(CHAT, json=chat(stream=stream, n=2)))
        await until(lambda: bool(served.requested))
        await asyncio.sleep(0.05)
        task.cancel()
        await until(lambda: bool(served.closed), seconds=2)
        served.go_on.set()
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_stream_whose_worker_is_replaced_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module.with_comments, "__defaults__", (0.05,))
    served = Scripted()
    served.go_on.clear()
    asyncio.get_running_loop().call_later(0.3, served.go_on.set)
    async with gateway(served) as client:
        text = (await client.post(CHAT, json=chat(stream=True))).text

    assert text.count(": the completion goes on\n\n") >= 3
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(text)[:-1]) == "Hello you."


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_failure_in_a_stream_is_an_event_and_the_end(path: str) -> None:
    served = Scripted()
    served.error = RuntimeError("/secret/path")
    body = chat(stream=True) if path == CHAT else {"model": "scripted", "input": "Hi", "stream": True}
    async with gateway(served) as client:
        text = (await client.post(path, json=body)).text
        whole = await client.post(CHAT, json=chat())

    last = events(text)[-1]
    assert (last.get("error") or last)["code"] == "internal_error"
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert "/secret/path" not in text + whole.text


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "later"])
async def test_a_connection_without_whole_headers_is_closed(before: bytes) -> None:
    async with gateway(Scripted(), header_s=0.3) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        async with asyncio.timeout(DEADLINE_S):
            if before:
                writer.write(before)
                assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.5)  # an idle connection has more time
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
            began_s = time.monotonic()
            assert await reader.read() == b""
        writer.close()
        assert time.monotonic() - began_s < 3


async def test_a_connection_too_many_is_told_so() -> None:
    async with gateway(Scripted(), connections=1) as client:
        assert (await client.get("/health")).status_code == 200  # its connection stays open
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        async with asyncio.timeout(DEADLINE_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert (await client.get("/health")).status_code == 200

    assert head.startswith(b"HTTP/1.1 503")
    assert json.loads(body)["error"]["code"] == "too_many_connections"


async def test_a_client_that_does_not_read_loses_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    served = Scripted("x" * 200_000, step=200)
    served.context_tokens = 300_000
    async with gateway(served, idle_s=1.0) as client:
        body = json.dumps(chat(stream=True, logprobs=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=1024)
        writer.write(head + body)
        await until(lambda: served.closed == 1)
        assert (await client.post(CHAT, json=chat("Hi", max_tokens=3))).status_code == 200
        writer.close()

    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_that_does_not_arrive_is_an_error() -> None:
    async with gateway(Scripted(), body_s=0.2) as client:
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(DEADLINE_S):
            status = await reader.readline()
        writer.close()

    assert b"408" in status


@pytest.mark.parametrize("headers", [{"host": "[bad"}, {"origin": "http://["}], ids=["host", "origin"])
async def test_addresses_that_are_none_are_foreign(headers: dict[str, str]) -> None:
    async with gateway(Scripted()) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 403


async def test_a_connection_whose_body_was_not_read_is_closed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    async with gateway(Scripted(), token_file=keys) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 401")  # and the end
        writer.close()


def test_keys_are_read_again_once_nobody_else_can_read_them(tmp_path: Path) -> None:
    def allowed(key: str) -> bool:
        try:
            request = Request({"type": "http", "headers": [(b"authorization", f"bearer {key}".encode())]})
            return keys.check(request) == key
        except ApiError:
            return False

    file = tmp_path / "keys"
    file.write_text("old\n")
    file.chmod(0o600)
    keys = Keys(file)
    new = tmp_path / "new"
    new.write_text("new\n")
    new.chmod(0o644)
    new.replace(file)
    assert (allowed("old"), allowed("new")) == (True, False)
    file.chmod(0o600)
    assert (allowed("old"), allowed("new")) == (False, True)
    file.unlink()
    assert allowed("new")


async def test_a_text_that_no_context_could_hold_is_refused_before_it_is_encoded() -> None:
    async with gateway(Scripted()) as client:
        began_s = time.monotonic()
        refused = await client.post(CHAT, json=chat("x" * 7_000_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        large = {"type": "object", "properties": {"k" * 100_000: {"properties": {f"a{n}": {} for n in range(10_000)}}}}
        refused = await client.post(CHAT, json=chat(tools=[named(f"t{n}", large) for n in range(30)]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert time.monotonic() - began_s < 8


async def test_a_token_id_that_the_model_lacks_is_refused() -> None:
    served = Scripted()
    async with gateway(served) as client:
        body = {"model": "scripted", "prompt": [1, served.vocabulary]}
        refused = await client.post(COMPLETIONS, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        body["prompt"] = [1, served.vocabulary - 1]
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("DELETE", "/v1/models", "GET, HEAD"), ("POST", "/health", "GET, HEAD")],
)
async def test_a_method_that_a_route_lacks(method: str, path: str, allowed: str) -> None:
    async with gateway(Scripted()) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert sorted(answer.headers["allow"].split(", ")) == allowed.split(", ")
    assert answer.headers["connection"] == "close"  # a body was not read


async def test_models_health_metrics_and_request_ids() -> None:
    served = Scripted()
    async with gateway(served) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert (listed[0]["id"], listed[0]["max_model_len"]) == ("scripted", 500)
        assert (await client.get("/v1/models/scripted")).status_code == 200
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await client.get("/ready")).status_code == 200
        served.ready = False
        assert (await client.get("/ready")).status_code == 503
        await client.post(CHAT, json=chat())
        given = await client.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"})
        other = await client.post(CHAT, json=chat(), headers={"x-request-id": "bad id"})
        metrics = (await client.get("/metrics")).text

    assert given.headers["x-request-id"] == "mine-1"
    assert other.headers["x-request-id"] not in ("", "bad id")
    assert 'tidemill_tokens_total{kind="completion"} 30' in metrics
    assert "tidemill_workers 2" in metrics
    assert metrics.endswith("# EOF\n")


async def test_a_large_body_does_not_delay_others() -> None:
    body = json.dumps(chat("x") | {"messages": [{"role": "user", "content": "y"}] * 2049, "pad": "z" * 6_000_000})
    async with gateway(Scripted()) as client:
        large = asyncio.create_task(client.post(CHAT, content=body.encode()))
        small = await client.post(CHAT, json=chat())
        assert small.status_code == 200
        assert (await large).json()["error"]["param"] == "messages"
