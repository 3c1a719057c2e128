"""What a client sees of tokens, however they are cut into pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.gateway.texts import ChoiceDelta, ChoiceText
from tidemill.models.tool_calls import parse_hermes, parse_llama

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def decode(ids: Sequence[int]) -> str:
    """A token is a byte, as in byte-level tokenizers."""
    return bytes(ids).decode(errors="replace")


def say(
    text: str, cuts: Sequence[int], *, finish: str = "stop", stops: Sequence[str] = (), tools: bool = False
) -> list[ChoiceDelta]:
    ids = list(text.encode())
    choice = ChoiceText(decode, stops=stops, parse=parse_hermes if tools else None)
    places = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    parts = [ids[start:end] for start, end in pairwise(places)] or [[]]
    return [choice.feed(part, finish if part is parts[-1] else None) for part in parts]  # type: ignore[arg-type]


def joined(news: Sequence[ChoiceDelta]) -> str:
    return "".join(said.text for said in news)


CUTS = st.lists(st.integers(0, 400), max_size=40)


@given(st.text(min_size=1, max_size=60), CUTS)
def test_the_pieces_of_a_text_are_the_text(text: str, cuts: list[int]) -> None:
    text = text.encode(errors="ignore").decode() or "a"
    news = say(text, cuts)

    assert joined(news) == text
    assert "\ufffd" not in joined(news) or "\ufffd" in text
    assert [said.finish for said in news] == [*[None] * (len(news) - 1), "stop"]


@given(st.text("abEND\n", min_size=0, max_size=30), CUTS)
def test_no_part_of_a_stop_string_is_shown(before: str, cuts: list[int]) -> None:
    text = before.replace("END", "") + "END"
    news = say(text, cuts, stops=["END", "\n\n"])

    stop = min(at for mark in ("END", "\n\n") if (at := text.find(mark)) >= 0)
    assert text[:stop].startswith(joined(news)) or joined(news) == text[:stop]
    assert joined(news)[: len(text[:stop])] == text[: len(joined(news))]


def test_a_stop_string_that_never_comes_is_text() -> None:
    assert joined(say("the EN of it EN", [5, 6, 7], finish="length", stops=["END"])) == "the EN of it EN"
    assert say("x", [], finish="length")[-1].finish == "length"


@given(st.sampled_from(["", "Let me add. ", "I think\n\n"]), st.integers(1, 3), CUTS)
def test_calls_are_given_once_and_not_as_text(before: str, count: int, cuts: list[int]) -> None:
    news = say(before + "\n".join([CALL] * count), cuts, tools=True)

    calls = [call for said in news for call in said.calls]
    assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}')] * count
    assert joined(news) == before.rstrip()
    assert "<" not in joined(news)
    assert news[-1].finish == "tool_calls"


def test_a_whole_call_is_given_before_the_end() -> None:
    news = say(f"{CALL} and more", [len(CALL)], tools=True)

    assert [len(said.calls) for said in news] == [1, 0]
    assert joined(news) == "and more"


def test_a_call_without_a_mark() -> None:
    choice = ChoiceText(decode, stops=(), parse=parse_llama)
    first = choice.feed(list(b'{"name": "add", '), None)
    last = choice.feed(list(b'"parameters": {"a": 1}}'), "stop")

    assert first == ChoiceDelta()
    assert [call.name for call in last.calls] == ["add"]
    assert last.text == ""


def test_a_mark_that_starts_no_call_is_text() -> None:
    assert joined(say("1 < 2 and <tool", [3, 4, 11], tools=True)) == "1 < 2 and <tool"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_text_that_was_cut_in_a_character_ends_with_its_replacement(finish: str) -> None:
    choice = ChoiceText(decode, stops=(), parse=None)
    shown = choice.feed([*b"ab", 0xE2, 0x82], None).text
    assert shown in ("ab", "")
    assert shown + choice.feed([], finish).text == "ab\ufffd"  # type: ignore[arg-type]


def decode_run(ids: Sequence[int]) -> str:
    """Bytes that are no UTF-8 together are all replaced, as in tokenizers that write rare characters as bytes."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@pytest.mark.parametrize("decoder", [decode, decode_run])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 100])
def test_long_texts_of_split_characters_are_whole(decoder: Callable[[Sequence[int]], str], step: int) -> None:
    text, choice = "你好é😀" * 20, ChoiceText(decoder, stops=(), parse=None)
    ids = list(text.encode())
    parts = [ids[at : at + step] for at in range(0, len(ids), step)]
    shown = [choice.feed(part, "stop" if part is parts[-1] else None).text for part in parts]
    assert "".join(shown) == text
    assert step > len(ids) or max(map(len, shown)) <= step + 3


@pytest.mark.parametrize("part", ["\ufffd".encode(), b"\xff", "😀".encode()[:3]])
def test_what_never_becomes_a_character_is_not_waited_for(part: bytes) -> None:
    choice = ChoiceText(decode, stops=(), parse=None)
    began_s = time.monotonic()
    news = [choice.feed([*part], None) for _ in range(10_000)]
    assert time.monotonic() - began_s < 5
    assert len(joined(news)) > 9_990
