"""Requests of the three APIs as one record. A parameter is obeyed, or refused by its name.

What a parameter may be stands in its type below; rules between parameters follow in `chat_params` and its siblings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from tidemill.core.records import Message, Record
from tidemill.gateway.errors import ApiError, invalid, unsupported

T = TypeVar("T")

DEPTH, SCHEMA_BYTES, MESSAGES, MOST_N, STOPS = 64, 256 << 10, 2048, 128, 16
SHOWN = 64
"""Characters of a name in an error."""
UNIONS = ("anyOf", "oneOf", "allOf")
LARGEST_SEED, COLDEST = 2**63 - 1, 1e-5
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
ERROR = re.compile(r"(.+?)(?: - at `\$([^`]*)`)?", re.DOTALL)
UNKNOWN = "contains unknown"
FIELD = re.compile(f"Object ({UNKNOWN}|missing required) field `(.*)`", re.DOTALL)
"""Errors of msgspec: what is wrong and where; that an object has a field too many or too few."""
NAMES, CONTENT = re.compile(r"(\.\w+)+"), re.compile(r"\.(content|output)\b")
"""The part of a path that a client knows as a parameter, and in messages."""


class Call(Record):
    """A tool call in a message of the assistant."""

    name: str
    arguments: str  # JSON


class ChatMessage(Record):
    """A message of a request."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()


class CompletionParams(Record):
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


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
TokenIds: TypeAlias = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(min_length=1)]
Prompts: TypeAlias = Annotated[tuple[Text | TokenIds, ...], msgspec.Meta(max_length=MOST_N)]
Entries: TypeAlias = Annotated[list[Any], msgspec.Meta(max_length=MESSAGES)]
SomeEntries: TypeAlias = Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MESSAGES)]
# Patterns instead of literals, because their errors show what is accepted, and nothing of what a client sent.
FunctionType: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^function\Z")]
SchemaType: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(object|array|string|number|integer|boolean|null)\Z")]


class Body(msgspec.Struct, kw_only=True):
    """Parameters of all three APIs. Those that `CompletionParams` has, too, have the same names."""

    model: Text
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    stream: bool = False
    token_ids: bool = msgspec.field(name="return_token_ids", default=False)

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < COLDEST:
            self.temperature = 0.0  # dividing by it would overflow


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class RepeatedBody(Body, kw_only=True):
    """Parameters of the two APIs that give several completions."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_N)] = 1
    seed: Annotated[int, msgspec.Meta(ge=-LARGEST_SEED, le=LARGEST_SEED)] | None = None
    stop: Text | Annotated[tuple[Text, ...], msgspec.Meta(max_length=STOPS)] = ()
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stop = (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def usage(self) -> bool:
        return bool(self.stream_options.include_usage)


class ChatBody(RepeatedBody, kw_only=True):
    messages: SomeEntries
    tools: Entries = []
    tool_choice: str | dict[str, Any] = "auto"
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool = False


class CompletionBody(RepeatedBody, kw_only=True):
    prompt: Text | Annotated[list[Any], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None


class ResponseBody(Body, kw_only=True):
    input: Text | SomeEntries
    instructions: str = ""
    previous_response_id: str | None = None
    text: dict[str, Any] = {}
    tools: Entries = []
    tool_choice: str | dict[str, Any] = "auto"
    max_tokens: Count | None = msgspec.field(name="max_output_tokens", default=None)


class ToolCall(msgspec.Struct):
    function: Call


class TextPart(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(pattern=r"^(text|input_text|output_text)\Z")]
    text: str


Content: TypeAlias = str | list[TextPart] | None


class MessageBody(msgspec.Struct):
    """A message. Its name, refusal and annotations do not reach the model; answers of other servers have them."""

    role: Annotated[str, msgspec.Meta(pattern=r"^(system|developer|user|assistant|tool)\Z")]
    content: Content = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Any = None
    name: Any = None
    refusal: Any = None
    annotations: Any = None


class OutputBody(msgspec.Struct):
    """The result of a call in /v1/responses."""

    output: Content = None


class ToolBody(msgspec.Struct):
    type: FunctionType


class ChatToolBody(ToolBody):
    function: dict[str, Any]


class FunctionBody(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class SchemaBody(msgspec.Struct, rename="camel"):
    """What templates read of a JSON schema."""

    type: list[SchemaType] = []  # or one, but a union with a pattern breaks msgspec 0.22 when the type is freed
    properties: dict[str, Any] = {}
    required: list[str] = []
    enum: list[Any] = []
    any_of: list[Any] = []
    one_of: list[Any] = []
    all_of: list[Any] = []
    items: Any = msgspec.UNSET


def decode(given: Any, kind: Any, at: str = "", *, coarse: bool = False) -> Any:
    """A part of a body with its type.

    Args:
        at: place of the part in the body.
        coarse: of the names inside the part, errors give only that of a content as their `param`.

    Raises:
        ApiError: it has another type.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        matched = ERROR.fullmatch(str(error))
        assert matched is not None
        what, path = matched.groups("")
        if field := FIELD.fullmatch(what):
            path += f".{field[2]}"
            what = "it is missing"
        place = f"{at}{path}".lstrip(".")
        if field and field[1] == UNKNOWN:
            raise unsupported(place, "the gateway does not know it") from error
        names = (CONTENT if coarse else NAMES).match(path)
        param = f"{at}{names[0] if names else ''}".lstrip(".")
        raise invalid(f"`{place}`: {what[0].lower()}{what[1:]}", param) from error


def decode_body(body: Mapping[str, Any], kind: type[T]) -> T:
    """The parameters of a body. Nulls count as left out. Raises ApiError: a type is wrong, or one is unknown."""
    given = {name: value for name, value in body.items() if value is not None}
    found: T = decode(given, kind)
    known = {*kind.__struct_encode_fields__, *NO_EFFECT}  # type: ignore[attr-defined]
    for name in [name for name in given if name not in known]:
        if name not in NEUTRAL:
            raise unsupported(name, "the gateway does not know it")
        if given[name] not in NEUTRAL[name]:
            raise unsupported(name, f"only {json.dumps(NEUTRAL[name][0])} is accepted")
    return found


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


def chat_params(body: Mapping[str, Any]) -> CompletionParams:
    """A request to /v1/chat/completions. Raises ApiError."""
    parsed = decode_body(body, ChatBody)
    limits = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("`max_tokens` and `max_completion_tokens` differ", "max_tokens")
    _refuse_response_format(parsed.response_format, "response_format")
    return _params(
        parsed,
        messages=tuple(_chat_message(each, f"messages[{index}]") for index, each in enumerate(parsed.messages)),
        tools=_tools(parsed),
        max_tokens=next(iter(limits), None),
    )


def completion_params(body: Mapping[str, Any]) -> CompletionParams:
    """A request to /v1/completions. Raises ApiError."""
    parsed = decode_body(body, CompletionBody)
    if parsed.logprobs:
        raise unsupported("logprobs", "only 0 is accepted, which gives those of the tokens that were drawn")
    one = isinstance(parsed.prompt, str) or isinstance(parsed.prompt[0], int)
    prompts = decode([parsed.prompt] if one else parsed.prompt, Prompts, "prompt")
    if len(prompts) * parsed.n > MOST_N:
        raise invalid(f"{len(prompts)} prompts with n = {parsed.n}: at most {MOST_N} completions", "n")
    return _params(parsed, prompts=prompts, logprobs=parsed.logprobs is not None)


def response_params(body: Mapping[str, Any]) -> CompletionParams:
    """A request to /v1/responses. Raises ApiError."""
    parsed = decode_body(body, ResponseBody)
    if (earlier := parsed.previous_response_id) is not None:
        message = f"there is no response {earlier[:100]!r}: responses are not stored; send the whole conversation"
        raise invalid(message, "previous_response_id", code="previous_response_not_found")
    if parsed.token_ids:
        raise unsupported("return_token_ids", "responses have none; use /v1/chat/completions")
    _refuse_response_format(parsed.text.pop("format", None), "text.format")
    if parsed.text.pop("verbosity", None) not in (None, "medium") or parsed.text:
        raise unsupported("text", "only a format of type text is accepted")
    given = parsed.input
    messages = [ChatMessage(role="user", text=given)] if isinstance(given, str) else _items(given)
    if parsed.instructions:
        messages.insert(0, ChatMessage(role="system", text=parsed.instructions))
    return _params(parsed, messages=tuple(messages), tools=_tools(parsed))


def _params(parsed: Body, **read: Any) -> CompletionParams:
    """The parameters of a body, and those that were read from it."""
    same = {name: getattr(parsed, name) for name in CompletionParams.__struct_fields__ if hasattr(parsed, name)}
    return CompletionParams(**same | read)


def _chat_message(given: Any, at: str) -> ChatMessage:
    message: MessageBody = decode(given, MessageBody, at, coarse=True)
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise invalid(f"`{at}.tool_calls` must be in a message of the assistant", at)
    if not calls and message.content is None:
        raise invalid(f"`{at}.content` is missing", f"{at}.content")
    if unknown := {name for name, value in given.items() if value} - {*MessageBody.__struct_fields__}:
        raise unsupported(f"{at}.{min(unknown)}", "the gateway does not know it")
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        text=_text_of(message.content),
        calls=tuple(call.function for call in calls),
    )


def _text_of(content: Content) -> str:
    """A text, or the texts of a list of parts."""
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _check_schema(given: Any, at: str) -> None:
    """Raises ApiError: it is no JSON schema, as far as templates read it."""
    if isinstance(given, bool):
        return
    if isinstance(given, dict) and isinstance(given.get("type"), str):
        given = given | {"type": [given["type"]]}
    schema: SchemaBody = decode(given, SchemaBody, at)
    for name, inner in schema.properties.items():
        _check_schema(inner, f"{at}.properties.{name[:SHOWN]}")  # a long one would be copied into every place inside
    for union in UNIONS:
        for index, inner in enumerate(given.get(union, ())):
            _check_schema(inner, f"{at}.{union}[{index}]")
    if schema.items is not msgspec.UNSET:
        _check_schema(schema.items, f"{at}.items")


def _tools(parsed: ChatBody | ResponseBody) -> tuple[dict[str, Any], ...]:
    """The functions that may be called. In /v1/responses a tool is a function, in chat it has one."""
    tools: dict[str, dict[str, Any]] = {}
    for index, given in enumerate(parsed.tools):
        at = f"tools[{index}]"
        if isinstance(parsed, ChatBody):
            function = decode(given, ChatToolBody, at, coarse=True).function
        else:
            decode(given, ToolBody, at, coarse=True)
            function = {key: value for key, value in given.items() if key != "type"}
        name = decode(function, FunctionBody, at).name
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        if len(msgspec.json.encode(kept)) > SCHEMA_BYTES:
            raise invalid(f"`{at}` is larger than {SCHEMA_BYTES >> 10} KB", at)
        parameters = kept.get("parameters", {})
        if parameters.get("type", "object") != "object":
            raise invalid(f"`{at}.parameters` must be a JSON schema of type object", f"{at}.parameters")
        _check_schema(parameters, f"{at}.parameters")
        if name in tools:
            raise invalid(f"`{at}.name`: two tools are named {name}", f"{at}.name")
        tools[name] = {"type": "function", "function": kept}
    if parsed.tool_choice not in ("auto", "none"):
        raise unsupported("tool_choice", "no call can be forced; only auto and none are accepted")
    return () if parsed.tool_choice == "none" else tuple(tools.values())


def _refuse_response_format(given: Any, name: str) -> None:
    if given is not None and (not isinstance(given, dict) or given.get("type") != "text"):
        raise unsupported(name, "only the type text is accepted")


def _items(given: Sequence[Any]) -> list[ChatMessage]:
    """The items of a request to /v1/responses as messages; the calls of an answer and its texts are one message."""
    found = list[ChatMessage]()
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
            call: Call = decode(item, Call, at, coarse=True)
            if found and found[-1].role == "assistant":
                found[-1] = msgspec.structs.replace(found[-1], calls=(*found[-1].calls, call))
            else:
                found.append(ChatMessage(role="assistant", text="", calls=(call,)))
        elif kind == "function_call_output":
            result: OutputBody = decode(item, OutputBody, at, coarse=True)
            found.append(ChatMessage(role="tool", text=_text_of(result.output)))
        elif kind != "reasoning":  # a client repeats what it was given, and it was given none
            raise invalid(f"`{at}` is of type {str(kind)[:40]!r}, which is not supported", at)
    return found


def depth_of(value: Any) -> int:
    """Levels of nested objects and lists."""
    deepest, level = 0, [value]
    while level:
        deepest += 1
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
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


def refuse_overflow(prompt_tokens: int, params: CompletionParams, limit: int) -> None:
    """Raises ApiError: prompt and completion do not fit into the context."""
    wanted = params.max_tokens
    if prompt_tokens + (wanted or 1) > limit:
        requested = f"{prompt_tokens} tokens of the prompt" + (f" and {wanted} of the completion" if wanted else "")
        raise ApiError(
            400,
            f"the model's context is {limit} tokens, and the request has {requested}",
            param="prompt" if params.prompts else "messages",
            code="context_length_exceeded",
        )
