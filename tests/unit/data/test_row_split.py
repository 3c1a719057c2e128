"""Ids, splits and rendering from content alone."""

from __future__ import annotations

import pytest

from tests.char_codec import CharCodec
from tidemill.core.records import Message, unpack_tokens
from tidemill.data.prompts import (
    Item,
    content_digest,
    content_id,
    hash_number,
    hash_share,
    in_content_order,
    renderer,
    text_item,
)
from tidemill.data.row_files import DataRow
from tidemill.data.row_split import split_rows
from tidemill.data.row_table import RowUse, table_in_memory


def test_prompt_ids_never_change() -> None:
    # Sample ids, and with them every random number, hang on these. Recorded once: a resumed run must find them again.
    assert content_id(text_item("1+1=", "2")) == "72c89c22af2e6afe93dec22f6368a63c"
    assert hash_number("a", 1) == 12444202034427101082


def test_the_id_is_of_messages_and_answer_and_of_nothing_else() -> None:
    item = text_item("q", "a")
    assert content_id(item) == content_id(text_item("q", "a", metadata={"x": 1}, where="f, line 3"))
    assert content_id(item) != content_id(text_item("q", "b"))
    assert content_id(item) != content_id(Item(messages=(Message(role="system", content="q"),), answer="a"))


def split(items: list[Item], fraction: float) -> tuple[list[Item], list[Item]]:
    """(training, held-out) of rows that are these items."""
    use = RowUse(
        section="task", shape="", parse=lambda row: items[row.number], encode=lambda item: item, tokens=lambda _: 0
    )
    rows = (DataRow(fields={}, where="", number=number) for number in range(len(items)))
    found = split_rows(table_in_memory(rows, use, where=str), None, fraction, where="here", section="task")
    return list(found.train.examples()), list(found.held_out.examples())


def test_of_rows_with_equal_content_the_first_is_kept() -> None:
    items = [text_item("b", "1", where="1"), text_item("a", "1", where="2"), text_item("b", "1", where="3")]
    assert sorted(item.where for side in split(items, 0.5) for item in side) == ["1", "2"]


def test_answers_and_white_space_do_not_move_a_question_to_the_other_side() -> None:
    items = [text_item(f"question {number}", answer) for number in range(50) for answer in "ab"]
    items += [text_item(f"  question\n{number} ", "c") for number in range(50)]
    train, held_out = split(items, 0.3)
    sides = [{item.messages[0].content.split()[1] for item in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(train) + len(held_out) == 150
    assert 5 <= len(sides[1]) <= 25  # 15 expected, standard deviation 3.2


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_side_is_empty_with_two_questions(fraction: float) -> None:
    train, held_out = split([text_item("a", "1"), text_item("b", "1")], fraction)
    assert len(train) == len(held_out) == 1


def test_shares_are_below_one_and_spread() -> None:
    shares = [hash_share("x", number) for number in range(2000)]
    assert all(0 <= share < 1 for share in shares)
    assert abs(sum(shares) / 2000 - 0.5) < 0.03  # standard error 0.0065


def test_content_order_does_not_depend_on_the_order_given() -> None:
    items = [text_item(str(number), "") for number in range(20)]
    assert in_content_order(items) == in_content_order(items[::-1]) != items


def test_the_digest_tells_sides_apart_but_not_orders() -> None:
    one, two = text_item("a", "1"), text_item("b", "1")
    assert content_digest([one, two], []) == content_digest([two, one], [])
    assert content_digest([one, two], []) != content_digest([one], [two])


def test_plain_messages_are_joined_and_chat_ones_go_through_the_template() -> None:
    codec = CharCodec()
    item = Item(messages=(Message(role="system", content="be brief"), Message(role="user", content="hi")), answer="x")
    plain = renderer(codec, chat_template=False)(item)
    assert plain.text == "be brief\n\nhi"
    assert unpack_tokens(plain.token_ids) == codec.encode("be brief\n\nhi")
    chat = renderer(codec, chat_template=True)(item)
    assert chat.text == "<system>be brief<user>hi<assistant>"
    assert unpack_tokens(chat.token_ids) == codec.encode(chat.text)
    assert chat.prompt_id == plain.prompt_id


def test_items_that_are_conversations_use_the_template_in_any_case() -> None:
    item = Item(messages=(Message(role="user", content="hi"),), answer="", plain=False)
    assert renderer(CharCodec(), chat_template=False)(item).text == "<user>hi<assistant>"
