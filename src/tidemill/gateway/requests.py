"""Requests of the three APIs as one record. A parameter is obeyed, or refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.core.records import Message, Record
from tidemill.gateway.errors import ApiError, invalid, unsupported

T = TypeVar("T")

DEPTH, SCHEMA_BYTES, MESSAGES, MOST_N, STOPS = 64, 256 << 10, 2048, 128, 16
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHOWN = 64
"""Characters of a name in an error."""
SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
UNIONS = ("anyOf", "oneOf", "allOf")
LARGEST_SEED, COLDEST = 2**63 - 1, 1e-5
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "refusal", "annotations"}
"""Keys of messages. Names, refusals and annotations do not reach the model; answers of other servers have them."""
NO_EFFECT = {"user", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Clients send these, and sampling does not depend on them."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "verbosity": ("medium",),
}
"""Values that ask for nothing; any other is refused."""


class Call(Record):
    """A tool call in a message of the assistant."""

    name: str
    arguments: str  # JSON


class ChatMessage(Record):
    """A message of a request."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()


class Question(Record):
    """What a client asks for. Parameters that it left out are None."""

    model: str
    messages: tuple[ChatMessage, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()  # of /v1/completions
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: bool = False
    token_ids: bool = False
    retry_key: str = ""  # of the header Idempotency-Key

    @property
    def characters(self) -> int:
        """Of its prompts, or of its messages with their calls."""
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        texts += [message.text for message in self.messages]
        texts += [part for message in self.messages for call in message.calls for part in (call.name, call.arguments)]
        return sum(map(len, texts))


class Fields:
    """The parameters of a body. Nulls count as left out."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type | tuple[type, ...], *, expected: str) -> Any:
        """Raises ApiError: it has another type."""
        value = self._body.pop(name, None)
        if value is None:
            return None
        boolean = isinstance(value, bool)
        if not isinstance(value, kind) or (boolean and kind is not bool):
            raise invalid(f"`{name}` must be {expected}", name)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name, (int, float), expected="a number")
        if value is not None and not low <= value <= high:
            raise invalid(f"`{name}` must be between {low:g} and {high:g}", name)
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name, int, expected="an integer")
        if value is not None and not low <= value <= high:
            raise invalid(f"`{name}` must be between {low} and {high}", name)
        return None if value is None else int(value)

    def flag(self, name: str) -> bool:
        return bool(self.take(name, bool, expected="true or false"))

    def text(self, name: str) -> str | None:
        value = self.take(name, str, expected="a string")
        return None if value is None else str(value)

    def finish(self) -> None:
        """Raises ApiError: a parameter is left that nobody obeys."""
        for name, value in self._body.items():
            if name in NO_EFFECT:
                continue
            if name not in NEUTRAL:
                raise unsupported(name, "the gateway does not know it")
            if value not in NEUTRAL[name]:
                raise unsupported(name, f"only {json.dumps(NEUTRAL[name][0])} is accepted")


def read_body(raw: bytes) -> dict[str, Any]:
    """Raises ApiError: it is not a JSON object in UTF-8, or nested too deeply."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    if depth_of(body) > DEPTH:
        raise invalid(f"the body is nested more than {DEPTH} levels deep", code="invalid_json")
    return body


def chat_question(body: Mapping[str, Any]) -> Question:
    """A request to /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    messages = _listed(fields, "messages", _chat_message)
    tools = _listed(fields, "tools", _chat_tool)
    limits = [fields.integer(name, 1, 1 << 30) for name in ("max_completion_tokens", "max_tokens")]
    _refuse_response_format(fields.take("response_format", dict, expected="an object"), "response_format")
    if None not in limits and limits[0] != limits[1]:
        raise invalid("`max_tokens` and `max_completion_tokens` differ", "max_tokens")
    question = Question(
        model=_model(fields),
        messages=messages,
        tools=_chosen(fields, tools),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        logprobs=fields.flag("logprobs"),
        **_common(fields),
        **_repeated(fields),
    )
    fields.finish()
    if not messages:
        raise invalid("`messages` is missing or empty", "messages")
    return question


def completion_question(body: Mapping[str, Any]) -> Question:
    """A request to /v1/completions. Raises ApiError."""
    fields = Fields(body)
    prompt = fields.take("prompt", (str, list), expected="a string, or a list of strings or token ids")
    if fields.integer("logprobs", 0, 5) not in (None, 0):
        raise unsupported("logprobs", "only 0 is accepted, which gives those of the tokens that were drawn")
    question = Question(
        model=_model(fields),
        prompts=_prompts(prompt),
        max_tokens=fields.integer("max_tokens", 1, 1 << 30),
        logprobs=body.get("logprobs") is not None,
        **_common(fields),
        **_repeated(fields),
    )
    fields.finish()
    if len(question.prompts) * question.n > MOST_N:
        raise invalid(f"{len(question.prompts)} prompts with n = {question.n}: at most {MOST_N} completions", "n")
    return question


def response_question(body: Mapping[str, Any]) -> Question:
    """A request to /v1/responses. Raises ApiError."""
    fields = Fields(body)
    if (earlier := fields.text("previous_response_id")) is not None:
        message = f"there is no response {earlier[:100]!r}: responses are not stored; send the whole conversation"
        raise invalid(message, "previous_response_id", code="previous_response_not_found")
    instructions = fields.text("instructions")
    given = fields.take("input", (str, list), expected="a string or a list")
    messages = [ChatMessage(role="user", text=given)] if isinstance(given, str) else _items(given or [])
    if instructions:
        messages.insert(0, ChatMessage(role="system", text=instructions))
    text = fields.take("text", dict, expected="an object") or {}
    _refuse_response_format(text.pop("format", None), "text.format")
    if text.pop("verbosity", None) not in (None, "medium") or text:
        raise unsupported("text", "only a format of type text is accepted")
    tools = _listed(fields, "tools", _response_tool)
    question = Question(
        model=_model(fields),
        messages=tuple(messages),
        tools=_chosen(fields, tools),
        max_tokens=fields.integer("max_output_tokens", 1, 1 << 30),
        **_common(fields),
    )
    fields.finish()
    if question.token_ids:
        raise unsupported("return_token_ids", "responses have none; use /v1/chat/completions")
    if not given:
        raise invalid("`input` is missing or empty", "input")
    return question


def _model(fields: Fields) -> str:
    name = fields.text("model")
    if not name:
        raise invalid("`model` is missing", "model")
    return name


def _common(fields: Fields) -> dict[str, Any]:
    return {
        "temperature": _temperature(fields.number("temperature", 0.0, 2.0)),
        "top_p": fields.number("top_p", 1e-6, 1.0),
        "top_k": fields.integer("top_k", 0, 1 << 20),
        "stream": fields.flag("stream"),
        "token_ids": fields.flag("return_token_ids"),
    }


def _temperature(given: float | None) -> float | None:
    """Below `COLDEST` it is 0: dividing by it would overflow."""
    return 0.0 if given is not None and given < COLDEST else given


def _repeated(fields: Fields) -> dict[str, Any]:
    options = fields.take("stream_options", dict, expected="an object") or {}
    if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
        raise unsupported(f"stream_options.{min(unknown)}", "the gateway does not know it")
    return {
        "n": fields.integer("n", 1, MOST_N) or 1,
        "seed": fields.integer("seed", -LARGEST_SEED, LARGEST_SEED),
        "stop": _stop(fields.take("stop", (str, list), expected="a string or a list of strings")),
        "usage": bool(options.get("include_usage")),
    }


def _stop(given: str | list[Any] | None) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > STOPS or not all(isinstance(each, str) and each for each in stops):
        raise invalid(f"`stop` must be at most {STOPS} strings that are not empty", "stop")
    return tuple(stops)


def _listed(fields: Fields, name: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    given = fields.take(name, list, expected="a list") or []
    if len(given) > MESSAGES:
        raise invalid(f"`{name}` has {len(given)} entries; at most {MESSAGES} are accepted", name)
    return tuple(read(each, f"{name}[{index}]") for index, each in enumerate(given))


def _chat_message(given: Any, at: str) -> ChatMessage:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise invalid(f"`{at}` must be an object with a role", at)
    role = "system" if given["role"] == "developer" else given["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise invalid(f"`{at}.role` is {role[:40]!r}; known are system, developer, user, assistant and tool", at)
    calls = given.get("tool_calls") or []
    if calls and (role != "assistant" or not isinstance(calls, list)):
        raise invalid(f"`{at}.tool_calls` must be a list, in a message of the assistant", at)
    if not calls and given.get("content") is None:
        raise invalid(f"`{at}.content` is missing", f"{at}.content")
    if unknown := {key for key, value in given.items() if value} - MESSAGE_KEYS:
        raise unsupported(f"{at}.{min(unknown)}", "the gateway does not know it")
    found = tuple(_call(each.get("function") if isinstance(each, dict) else None, at) for each in calls)
    return ChatMessage(role=role, text=_text_of(given.get("content"), f"{at}.content"), calls=found)


def _call(given: Any, at: str) -> Call:
    if not isinstance(given, dict) or not all(isinstance(given.get(key), str) for key in ("name", "arguments")):
        raise invalid(f"`{at}`: a tool call needs a function with a name and arguments, both strings", at)
    return Call(name=given["name"], arguments=given["arguments"])


def _text_of(content: Any, at: str) -> str:
    """A text, or the texts of a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"`{at}` must be a string or a list of parts", at)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise invalid(f"`{at}` has a part of type {str(kind)[:40]!r}; only text is supported", at)
        texts.append(part["text"])
    return "".join(texts)


def _chat_tool(given: Any, at: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(given.get("function"), dict):
        raise invalid(f"`{at}` must be a tool of type function", at)
    return _tool(given["function"], at)


def _response_tool(given: Any, at: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise invalid(f"`{at}` must be a tool of type function", at)
    return _tool({name: value for name, value in given.items() if name != "type"}, at)


def _tool(function: dict[str, Any], at: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise invalid(f"`{at}.name` must be 1 to 64 letters, digits, _ or -", f"{at}.name")
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"`{at}.description` must be a string", f"{at}.description")
    kept = {name: value for name, value in function.items() if value is not None and name != "strict"}
    if len(msgspec.json.encode(kept)) > SCHEMA_BYTES:
        raise invalid(f"`{at}` is larger than {SCHEMA_BYTES >> 10} KB", at)
    parameters = kept.get("parameters", {})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid(f"`{at}.parameters` must be a JSON schema of type object", f"{at}.parameters")
    _check_schema(parameters, f"{at}.parameters")
    return {"type": "function", "function": kept}


def _check_schema(schema: Any, at: str) -> None:
    """Raises ApiError: it is no JSON schema, as far as templates read it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid(f"`{at}` must be a JSON schema", at)
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in SCHEMA_TYPES:
            raise invalid(f"`{at}.type` must be among {', '.join(SCHEMA_TYPES)}", f"{at}.type")
    for key, kind in (("properties", dict), ("required", list), ("enum", list), *((key, list) for key in UNIONS)):
        if not isinstance(schema.get(key, kind()), kind):
            raise invalid(f"`{at}.{key}` must be {'an object' if kind is dict else 'a list'}", f"{at}.{key}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise invalid(f"`{at}.required` must be a list of names", f"{at}.required")
    # A long name would be copied into the place of everything in it.
    inner = [(f"properties.{name[:SHOWN]}", each) for name, each in schema.get("properties", {}).items()]
    inner += [(f"{key}[{index}]", each) for key in UNIONS for index, each in enumerate(schema.get(key, ()))]
    for place, each in [*inner, *([("items", schema["items"])] if "items" in schema else [])]:
        _check_schema(each, f"{at}.{place}")


def _chosen(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"`tools[{index}].name`: two tools are named {name}", f"tools[{index}].name")
    choice = fields.take("tool_choice", (str, dict), expected="a string")
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "no call can be forced; only auto and none are accepted")
    return () if choice == "none" else tools


def _refuse_response_format(given: Any, name: str) -> None:
    if given is not None and (not isinstance(given, dict) or given.get("type") != "text"):
        raise unsupported(name, "only the type text is accepted")


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    def ids(value: Any) -> bool:
        return (
            isinstance(value, list) and value != [] and all(type(each) is int and 0 <= each < 2**31 for each in value)
        )

    if isinstance(given, str) and given:
        return (given,)
    if ids(given):
        return (tuple(given),)
    if isinstance(given, list) and 0 < len(given) <= MOST_N:
        if all(isinstance(each, str) and each for each in given):
            return tuple(given)
        if all(map(ids, given)):
            return tuple(map(tuple, given))
    raise invalid("`prompt` must be a text, token ids, or a list of either, and not empty", "prompt")


def _items(given: Sequence[Any]) -> list[ChatMessage]:
    """The items of a request to /v1/responses as messages; the calls of an answer and its texts are one message."""
    found = list[ChatMessage]()
    if len(given) > MESSAGES:
        raise invalid(f"`input` has {len(given)} entries; at most {MESSAGES} are accepted", "input")
    for index, item in enumerate(given):
        at = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            said = _chat_message({"role": item.get("role"), "content": item.get("content")}, at)
            if said.role == "assistant" and found and found[-1].calls:  # what was said after a call
                found[-1] = msgspec.structs.replace(found[-1], text=found[-1].text + said.text)
            else:
                found.append(said)
        elif kind == "function_call":
            call = _call(item, at)
            if found and found[-1].role == "assistant":
                found[-1] = msgspec.structs.replace(found[-1], calls=(*found[-1].calls, call))
            else:
                found.append(ChatMessage(role="assistant", text="", calls=(call,)))
        elif kind == "function_call_output":
            found.append(ChatMessage(role="tool", text=_text_of(item.get("output"), f"{at}.output")))
        elif kind != "reasoning":  # a client repeats what it was given, and it was given none
            raise invalid(f"`{at}` is of type {str(kind)[:40]!r}, which is not supported", at)
    return found


def depth_of(value: Any) -> int:
    """Levels of nested objects and lists."""
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(inner, (dict, list))
        ]
    return deepest


def as_messages(said: Sequence[ChatMessage], write_calls: Callable[[Sequence[Call]], str]) -> list[Message]:
    """Messages for a chat template.

    Args:
        write_calls: tool calls as the model writes them.
    """
    return [
        Message(
            role=each.role,
            content="\n".join(filter(None, [each.text, write_calls(each.calls)])) if each.calls else each.text,
        )
        for each in said
    ]


def refuse_overflow(prompt_tokens: int, question: Question, limit: int) -> None:
    """Raises ApiError: prompt and completion do not fit into the context."""
    wanted = question.max_tokens
    if prompt_tokens + (wanted or 1) > limit:
        asked = f"{prompt_tokens} tokens of the prompt" + (f" and {wanted} of the completion" if wanted else "")
        raise ApiError(
            400,
            f"the model's context is {limit} tokens, and the request has {asked}",
            param="prompt" if question.prompts else "messages",
            code="context_length_exceeded",
        )
