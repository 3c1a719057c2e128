"""Rows to token ids: the prompt as in generation, the completion apart, and its end token."""

from __future__ import annotations

import pytest

from tests.char_codec import END, END_OF_TURN, CharCodec
from tidemill.core.errors import UserError
from tidemill.core.records import Message, pack_tokens, unpack_tokens
from tidemill.data.examples import Encoder
from tidemill.data.prompts import Item, content_id, renderer
from tidemill.data.rows import DemonstrationText, PairText

USER = (Message(role="user", content="2+2="),)


def encoder(*, chat_template: bool = False, end_token: bool = True) -> Encoder:
    return Encoder(CharCodec(), chat_template=chat_template, end_token=end_token)


def codes(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_plain_completion_ends_with_the_end_token() -> None:
    row = DemonstrationText(messages=USER, completion="4\n")
    made = encoder().demonstration(row)
    assert unpack_tokens(made.prompt_ids) == codes("2+2=")
    assert unpack_tokens(made.completion_ids) == [ord("4"), ord("\n"), END]
    assert made.id == content_id(row)


def test_without_the_setting_it_ends_as_it_is_written() -> None:
    made = encoder(end_token=False).demonstration(DemonstrationText(messages=USER, completion="4\n"))
    assert unpack_tokens(made.completion_ids) == codes("4\n")


def test_a_completion_that_ends_with_a_stop_token_gets_no_second_one() -> None:
    for end in (END, END_OF_TURN):
        made = encoder().demonstration(DemonstrationText(messages=USER, completion=f"4{chr(end)}"))
        assert unpack_tokens(made.completion_ids) == [ord("4"), end]


@pytest.mark.parametrize(("plain", "chat_template"), [(False, False), (True, True)])
def test_a_chat_gets_the_template_and_the_end_of_its_turn(plain: bool, chat_template: bool) -> None:
    row = DemonstrationText(messages=USER, completion="4", plain=plain)
    made = encoder(chat_template=chat_template).demonstration(row)
    assert unpack_tokens(made.prompt_ids) == codes("<user>2+2=<assistant>")
    assert unpack_tokens(made.completion_ids) == [ord("4"), END_OF_TURN]


def test_prompts_have_the_ids_they_have_in_generation() -> None:
    for plain in (True, False):
        prompt = renderer(CharCodec(), chat_template=False)(Item(messages=USER, answer="4", plain=plain))
        made = encoder().demonstration(DemonstrationText(messages=USER, completion="4", plain=plain))
        assert made.prompt_ids == prompt.token_ids


def test_a_pair_has_both_sides_closed_and_its_margin() -> None:
    made = encoder().pair(PairText(messages=USER, chosen="4", rejected="22", margin=0.25))
    assert made.chosen_ids == pack_tokens([ord("4"), END])
    assert made.rejected_ids == pack_tokens([ord("2"), ord("2"), END])
    assert made.margin == 0.25


def test_sides_that_differ_as_texts_but_not_as_tokens_are_equal() -> None:
    row = PairText(messages=USER, chosen="4", rejected=f"4{chr(END)}", where="f, line 7")
    with pytest.raises(UserError, match="`chosen` and `rejected` are the same") as caught:
        encoder().pair(row)
    assert caught.value.where == "f, line 7"


def test_what_the_codec_refuses_is_placed() -> None:
    with pytest.raises(UserError, match="cannot express") as caught:
        encoder().demonstration(DemonstrationText(messages=USER, completion="\t", where="f, line 3"))
    assert caught.value.where == "f, line 3"
