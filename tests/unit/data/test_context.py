"""Prompts must fit the context."""

from __future__ import annotations

import pytest

from tests.char_codec import CharCodec
from tidemill.config.task import ArithmeticTask
from tidemill.core.errors import UserError
from tidemill.data.build_task import build_task
from tidemill.data.prompts import check_fits, longest_prompt, renderer, text_item

TASK = build_task(ArithmeticTask(shots=0), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)


def test_the_longest_is_found_with_its_origin() -> None:
    items = [text_item("ab", ""), text_item("abcd", "", where="f, line 2"), text_item("abc", "")]
    longest = longest_prompt(items, renderer(CharCodec(), chat_template=False))
    assert (longest.tokens, longest.text, longest.where) == (4, "abcd", "f, line 2")


def test_a_prompt_and_its_completion_may_fill_the_context() -> None:
    check_fits(TASK, 10, 6)  # "7+6=" is 4 tokens


def test_one_token_more_is_refused_with_the_prompt_and_the_room_there_is() -> None:
    with pytest.raises(UserError) as caught:
        check_fits(TASK, 10, 7)
    assert "starting '0+0='" in str(caught.value)
    assert "4 tokens" in str(caught.value)
    assert "at most 6" in caught.value.hint


def test_a_prompt_as_long_as_the_context_gets_another_hint() -> None:
    with pytest.raises(UserError) as caught:
        check_fits(TASK, 4, 1)
    assert "max_new_tokens to" not in caught.value.hint
