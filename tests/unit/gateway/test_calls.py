"""Which tool calls of a text clients get; everything else that the model wrote stays text."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.records import ToolRequest
from tidemill.gateway.calls import CallReader, Parse, opens_thought
from tidemill.models.tool_calls import parse_hermes, parse_llama

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 1}}'
CALL = ("add", '{"a": 1}')


def parts_of(
    text: str, parse: Parse = parse_hermes, *, finish: str = "stop", thinking: bool = False, cuts: tuple[int, ...] = ()
) -> list[str | tuple[str, str]]:
    """What a client gets of a text that arrives in pieces, texts that follow each other as one."""
    reader = CallReader(parse, {"add", "now"}, thinking=thinking)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    found = list[str | tuple[str, str]]()
    for start, end in pairwise(places):
        for part in reader.read(text[start:end], finish if end == len(text) else None):  # type: ignore[arg-type]
            if isinstance(part, ToolRequest):
                found.append((part.name, part.arguments))
            elif found and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
    return found


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "KEY": "[1]"}',
        '{"name": "add", "KEY": [1]}',
        '{"name": "add", "KEY": 1}',
        '{"name": "add", "KEY": null}',
        '{"name": "rm", "KEY": {}}',  # not a tool of the request
        '{"name": "", "KEY": {}}',
        '{"name": ["add"], "KEY": {}}',
        '{"KEY": {"a": 1}}',
        '{"name": "add", "KEY": {"a": 1}',
        '{"name": "add", "KEY": {"a": 1, "a": 2}}',
        '{"name": "now", "name": "add", "KEY": {}}',
        '{"name": "add", "KEY": {"a": 1e999}}',
        '{"name": "add", "KEY": {"a": NaN}}',
        '{"name": "add", "KEY": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}",
        '{"name": "add", "KEY": {"a": ' + "[" * 64 + "]" * 64 + "}}",
        "{'name': 'add', 'KEY': {}}",
        "{}",
    ],
)
def test_what_is_no_valid_call_stays_text_beside_those_that_are(body: str) -> None:
    wrong, bare = f"<tool_call>{body}</tool_call>".replace("KEY", "arguments"), body.replace("KEY", "parameters")
    assert parts_of(f"So {wrong} then") == [f"So {wrong} then"]
    assert parts_of(f"{ADD}\n{wrong}\n{ADD} end") == [CALL, wrong, CALL, " end"]
    assert parts_of(bare, parse_llama) == [bare]
    assert parts_of(f"{BARE}; {bare}", parse_llama) == [CALL, bare]
    assert parts_of(f'{{"answer": 3}}; {BARE}', parse_llama) == ['{"answer": 3};', CALL]


@pytest.mark.parametrize(
    ("text", "finish", "parts"),
    [
        ("Write <tool_call> to call.", "stop", ["Write <tool_call> to call."]),
        (f"Write <tool_call> so: {ADD}", "stop", ["Write <tool_call> so:", CALL]),
        (f"<tool_call>{{</think>{ADD}", "stop", ["<tool_call>{</think>", CALL]),
        (f'<tool_call>{{"name": {ADD}', "stop", ['<tool_call>{"name":', CALL]),
        (f"</tool_call> {ADD} </tool_call>", "stop", ["</tool_call>", CALL, " </tool_call>"]),
        (ADD.removesuffix("</tool_call>"), "stop", [CALL]),  # the end of a turn ends its call
        (ADD.removesuffix("</tool_call>"), "length", [ADD.removesuffix("</tool_call>")]),
        (f"{ADD}\n{ADD[:30]}", "length", [CALL, ADD[:30]]),
        (f"a {ADD} b {ADD} c", "stop", ["a", CALL, " b", CALL, " c"]),
        (f"<think>{ADD}</think>{ADD}", "stop", [f"<think>{ADD}</think>", CALL]),
        (f"<think>{ADD}", "stop", [f"<think>{ADD}"]),
    ],
)
def test_calls_and_text_come_in_the_order_in_which_they_were_written(
    text: str, finish: str, parts: list[str | tuple[str, str]]
) -> None:
    assert parts_of(text, finish=finish) == parts


def test_calls_in_a_thought_that_the_prompt_opened_are_not_made() -> None:
    assert parts_of(f"{ADD}</think>{ADD}", thinking=True) == [f"{ADD}</think>", CALL]
    assert parts_of(f"{ADD}", thinking=True) == [CALL]  # the model did not think
    assert parts_of(f"So {ADD} or", thinking=True, finish="length") == [f"So {ADD} or"]
    assert parts_of(BARE, parse_llama, thinking=True, finish="length") == [BARE]
    assert parts_of(f"{BARE}</think>\n{BARE}", parse_llama, thinking=True) == [f"{BARE}</think>", CALL]
    assert opens_thought("".join, [*"assistant", "<think>", "\n"])  # type: ignore[arg-type, list-item]
    assert not opens_thought("".join, ["<think>", "</think>"])  # type: ignore[arg-type, list-item]


WORDS = ["a ", "\n", "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "<", ADD, BARE, "; ", "<|python_tag|>"]


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=20).map(tuple),
    st.sampled_from([parse_hermes, parse_llama]),
    st.fixed_dictionaries({"finish": st.sampled_from(["stop", "length"]), "thinking": st.booleans()}),
)
def test_pieces_make_no_difference_and_nothing_is_lost(
    text: str, cuts: tuple[int, ...], parse: Parse, options: dict[str, Any]
) -> None:
    whole = parts_of(text, parse, **options)
    assert parts_of(text, parse, **options, cuts=cuts) == whole
    said = "".join(part for part in whole if isinstance(part, str))
    called = sum(not isinstance(part, str) for part in whole)
    assert called or said == text
    if parse is parse_hermes:
        assert characters(said) + called * characters(ADD) == characters(text)


def characters(text: str) -> int:
    return len("".join(text.split()))


def test_marks_and_white_space_without_end_are_read_in_linear_time() -> None:
    began_s = time.monotonic()
    for text in (
        "<tool_call>a" + " " * 50_000 + "b",
        "<tool_call>{" * 20_000 + "</tool_call>",
        "<tool_call> a" * 20_000,
    ):
        assert parts_of(text) == [text]
        parse_hermes(text)
    assert time.monotonic() - began_s < 3
