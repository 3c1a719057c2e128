"""Tool calls in generated text, and tools for templates that have none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence
from itertools import groupby
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Message, ParsedTurn, ToolRequest

THINKING_END = "</think>"
PYTHON_TAG = "<|python_tag|>"
THOUGHT = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL)
"""Thinking before an answer, and thinking that was cut off. Calls in it are not made."""
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str) -> ParsedTurn:
    """Calls of Hermes and Qwen models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number."""
    said = THOUGHT.sub("", text)
    calls = tuple(_request(match[1].strip(), "arguments", match[0]) for match in HERMES_CALL.finditer(said))
    return ParsedTurn(text=HERMES_CALL.sub("", said).strip(), calls=calls)


def parse_llama(text: str) -> ParsedTurn:
    """Calls of Llama 3 models: `{"name": …, "parameters": {…}}`, several separated by `;`, after `<|python_tag|>` or
    alone. Text after them is no call."""
    said = THOUGHT.sub("", text).strip()
    tagged = said.startswith(PYTHON_TAG)
    rest = said.removeprefix(PYTHON_TAG).strip()
    if not tagged and not rest.startswith("{"):
        return ParsedTurn(text=said)
    calls, source, more = list[ToolRequest](), said, True
    while more and rest:
        try:
            end = json.JSONDecoder().raw_decode(rest)[1]
        except (ValueError, RecursionError):
            end = len(rest)
        body, rest = rest[:end], rest[end:].strip()
        more = rest.startswith(";")
        rest = rest[more:].strip()
        calls.append(_request(body, "parameters", source.removesuffix(rest)))
        source = rest
    return ParsedTurn(text=rest, calls=tuple(calls))


def _request(body: str, key: str, source: str) -> ToolRequest:
    """The call in a JSON text.

    Args:
        key: of the arguments.
        source: see `ToolRequest`.
    """
    name = ""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()  # fails for lone surrogates and 1e999
        if not isinstance(call, dict):
            raise ValueError(f"it must be an object, found {type(call).__name__}")
        if not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError("`name` must be the name of a tool")
        name, arguments = call["name"], call.get(key, {})
        # Llama 3.1 often adds the type.
        if unknown := call.keys() - ({"name", key} | ({"type"} if call.get("type") == "function" else set())):
            raise ValueError(f"unknown key `{min(unknown)}`; the keys are `name` and `{key}`")
        if not isinstance(arguments, dict):
            raise ValueError(f"`{key}` must be an object, found {type(arguments).__name__}")
    except (ValueError, RecursionError) as error:
        return ToolRequest(name=name, arguments="{}", error=f"the call cannot be read: {error}", source=source)
    return ToolRequest(name=name, arguments=json.dumps(arguments, ensure_ascii=False), source=source)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


PARSERS: dict[str, Callable[[str], ParsedTurn]] = {"hermes": parse_hermes, "llama": parse_llama}
UNSUPPORTED = {
    "<function=": "Qwen3-Coder",
    "<arg_key>": "GLM",
    "[TOOL_CALLS]": "Mistral",
    "tool▁call": "DeepSeek",
    "<|channel|>": "gpt-oss",
    "<|START_ACTION|>": "Command A",
    "<|tool_call|>": "Phi-4",
    "<|tool_call>": "Gemma 4",
    "<|tool_call_start|>": "LFM2",
    "<TOOLCALL>": "Nemotron",
}
"""Marks in templates of formats without a parser."""


def find_parser(template: str, vocabulary: Container[str], *, own_tools: bool) -> Callable[[str], ParsedTurn]:
    """The parser for a chat template.

    Args:
        own_tools: the template renders tools. Otherwise `describe_tools` does, in the Hermes format.

    Raises:
        UserError: the format of calls is not supported.
    """
    known = next((name for mark, name in UNSUPPORTED.items() if mark in template), "")
    if not known and (not own_tools or "<tool_call>" in template):
        return PARSERS["hermes"]
    if not known and (PYTHON_TAG in vocabulary or '"parameters"' in template):
        return PARSERS["llama"]
    raise UserError(
        f"tool calls in the format of {known or 'this model'} are not supported",
        where="the model's chat template",
        hint=f"use a model that calls tools in the format {' or '.join(PARSERS)}, or an environment without tools",
    )


def describe_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages whose system message describes the tools as Hermes models expect it."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions:\n<tools>\n{schemas}\n</tools>\n"
        "A call is a JSON object with name and arguments between tags, for example:\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "tides"}}\n</tool_call>'
    )
    system, rest = (messages[:1], messages[1:]) if messages[0].role == "system" else ((), messages)
    return [Message(role="system", content="\n\n".join([*(each.content for each in system), text])), *rest]


def results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Messages with each run of tool messages as one user message, as in Qwen's template."""
    converted = list[Message]()
    for is_tool, run in groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            results = "\n".join(f"<tool_response>\n{message.content}\n</tool_response>" for message in run)
            converted.append(Message(role="user", content=results))
        else:
            converted.extend(run)
    return converted
