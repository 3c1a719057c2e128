"""Rows made of prompts and of judged samples."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.char_codec import CharCodec, make_prompt
from tests.unit.data.data_files import read_demonstrations
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.data.examples import Encoder
from tidemill.data.prompts import Item, renderer
from tidemill.data.rows import ScoredCompletion, demonstration_row, pair_rows

PROMPT = make_prompt("1+1=", "2")


def test_a_demonstration_is_the_answer_with_its_ending() -> None:
    assert demonstration_row(PROMPT, ending="\n") == {"prompt": "1+1=", "completion": "2\n"}
    for missing in (" ", None):
        with pytest.raises(UserError, match="has no answer"):
            demonstration_row(msgspec.structs.replace(PROMPT, answer=missing), ending="\n")


@pytest.mark.parametrize("chat_template", [False, True])
def test_a_row_read_back_is_the_same_prompt_to_the_model(tmp_path: Path, chat_template: bool) -> None:
    item = Item(messages=(Message(role="user", content="1+1="),), answer="2")
    prompt = renderer(CharCodec(), chat_template=chat_template)(item)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(demonstration_row(prompt, ending="\n")) + "\n")
    (read,) = read_demonstrations(path)
    made = Encoder(CharCodec(), chat_template=chat_template, end_token=False).demonstration(read)
    assert made.prompt_ids == prompt.token_ids


def samples(*texts: str) -> list[ScoredCompletion]:
    """Right where the text begins with 2; cut where it does not end with a line."""
    return [ScoredCompletion(text, text.startswith("2"), text.endswith("\n")) for text in texts]


def test_every_wrong_text_meets_a_right_one_once() -> None:
    rows = pair_rows(PROMPT, samples("3\n", "2\n", "3\n", "2 \n", "40", "5\n"), most=9)
    assert [(row["chosen_sample"], row["rejected_sample"]) for row in rows] == [(1, 0), (3, 4), (1, 5)]
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("2\n", "3\n"), ("2 \n", "40"), ("2\n", "5\n")]
    assert all(row["prompt"] == "1+1=" and row["prompt_id"] == "p" for row in rows)


def test_at_most_so_many_pairs() -> None:
    rows = pair_rows(PROMPT, samples("2\n", "3\n", "4\n", "5\n"), most=2)
    assert [row["rejected"] for row in rows] == ["3\n", "4\n"]


@pytest.mark.parametrize(
    "texts",
    [
        ("3\n", "4\n"),  # never right
        ("2\n", "2\n"),  # never wrong
        ("2", "3\n"),  # right, but cut before its end
        ("2\n", "", " \n"),  # wrong, but empty
    ],
)
def test_prompts_without_pairs(texts: tuple[str, ...]) -> None:
    assert pair_rows(PROMPT, samples(*texts), most=9) == []
