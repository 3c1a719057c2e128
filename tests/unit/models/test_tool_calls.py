"""Calls in generated texts, and tools described to models whose template has none."""

from __future__ import annotations

import json

import pytest

from tidemill.core.errors import UserError
from tidemill.core.records import Message, ParsedTurn, ToolRequest
from tidemill.models.tool_calls import (
    PARSERS,
    describe_tools,
    find_parser,
    parse_hermes,
    parse_llama,
    results_as_user,
)


def requests(parsed: ParsedTurn) -> list[tuple[str, object]]:
    assert not any(call.error for call in parsed.calls)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def one_error(parsed: ParsedTurn) -> ToolRequest:
    (call,) = parsed.calls
    assert call.error and call.arguments == "{}"
    return call


def test_hermes_calls_in_order_with_the_text_around_them() -> None:
    parsed = parse_hermes(
        'First\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call> then'
    )
    assert requests(parsed) == [("add", {"a": 1}), ("now", {})]
    assert parsed.text.split() == ["First", "then"]
    assert parse_hermes("no call").calls == ()


def test_a_hermes_call_may_end_with_the_turn() -> None:
    assert requests(parse_hermes('<tool_call>{"name": "a", "arguments": {"x": "é"}}')) == [("a", {"x": "é"})]
    assert "cannot be read" in one_error(parse_hermes('<tool_call>{"name": "a", "argum')).error


def test_calls_in_thoughts_are_not_made() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert requests(parse_hermes(f"<think>{call}</think>{call}")) == [("a", {})]
    assert parse_hermes(f"<think>{call}").calls == ()
    assert parse_hermes("reason</think>\n\n4").text == "4"
    assert parse_llama('<think>{"name": "a"}</think>4') == ParsedTurn(text="4")


def test_llama_calls_separated_by_semicolons() -> None:
    one, two = '{"name": "add", "parameters": {"a": ";"}}', '{"type": "function", "name": "now", "parameters": {}}'
    for text in (one, f"<|python_tag|>{one}", f" {one}; "):
        assert requests(parse_llama(text)) == [("add", {"a": ";"})]
    assert requests(parse_llama(f"{one}; {two}")) == [("add", {"a": ";"}), ("now", {})]
    assert parse_llama(f"{one} done").text == "done"
    assert parse_llama('It is {"name": 1}').calls == ()


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{'name': 1}", "double quotes"),
        ('{"name": "a", "KEY": {}', "delimiter"),
        ('{"KEY": {}}', "`name` must be"),
        ('{"name": 7, "KEY": {}}', "`name` must be"),
        ('{"name": "a", "KEY": [1]}', "`KEY` must be an object, found list"),
        ('{"name": "a", "KEY": "{}"}', "`KEY` must be an object, found str"),
        ('{"name": "a", "KEY": {}, "id": 3}', "unknown key `id`"),
        ('{"name": "a", "KEY": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "a", "KEY": {"x": 1e999}}', "Out of range float values are not JSON compliant"),
        ('{"name": "a", "KEY": {"x": "\\ud800"}}', "surrogates"),
        ('{"name": "a", "KEY": {"x": ' + "[" * 100_000, "recursion"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(name: str, body: str, why: str) -> None:
    key = {"hermes": "arguments", "llama": "parameters"}[name]
    text = body.replace("KEY", key)
    parsed = PARSERS[name](f"<tool_call>{text}</tool_call>" if name == "hermes" else text)
    assert why.replace("KEY", key) in one_error(parsed).error


def test_other_json_and_code_are_mistakes() -> None:
    assert "must be an object, found list" in one_error(parse_hermes("<tool_call>[1]</tool_call>")).error
    assert "cannot be read" in one_error(parse_llama("<|python_tag|>print(1)")).error
    good, bad = parse_llama('{"name": "a", "parameters": {}}; {"name": ').calls
    assert not good.error and bad.error


def test_the_parser_is_found_by_template_and_vocabulary() -> None:
    assert find_parser("… <tool_call> …", (), own_tools=True) is parse_hermes
    assert find_parser("any", (), own_tools=False) is parse_hermes
    assert find_parser("ipython", ["<|python_tag|>"], own_tools=True) is parse_llama
    assert find_parser('{"name": …, "parameters": …}', (), own_tools=True) is parse_llama
    for template, name in (
        ("<tool_call><function=x>", "Qwen3-Coder"),
        ("[TOOL_CALLS]", "Mistral"),
        ("?", "this model"),
    ):
        with pytest.raises(UserError, match=f"in the format of {name} are not supported"):
            find_parser(template, (), own_tools=True)
    with pytest.raises(UserError, match="DeepSeek"):
        find_parser("<｜tool▁calls▁begin｜>", (), own_tools=False)


def test_schemas_follow_the_system_message() -> None:
    user, system = Message(role="user", content="u"), Message(role="system", content="Be brief.")
    tools = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    for messages, start in (([system, user], "Be brief.\n\nYou can call"), ([user], "You can call")):
        described = describe_tools(messages, tools)
        assert [message.role for message in described] == ["system", "user"] and described[1] is user
        text = described[0].content
        assert text.startswith(start)
        block = text.split("<tools>\n")[1].split("\n</tools>")[0]
        assert [json.loads(line) for line in block.splitlines()] == tools
        assert [call.name for call in parse_hermes(text).calls] == ["search"]  # the example is a valid call


def test_results_of_one_turn_are_one_message() -> None:
    messages = [Message(role=role, content=text) for role, text in (("user", "u"), ("tool", "1"), ("tool", "2"))]
    assert results_as_user([*messages, messages[0]]) == [
        messages[0],
        Message(
            role="user",
            content="<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        ),
        messages[0],
    ]
