from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidemill.telemetry.sample_files import TokenTexts

PIECES = ["a", "b", " ", "ab", "\n", " the", "é", ""]


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
def test_the_pieces_of_a_text_concatenate_to_it(ids: list[int]) -> None:
    texts = TokenTexts(lambda one: PIECES[one[0]])
    text = "".join(PIECES[token_id] for token_id in ids)
    assert texts.split(ids, text) == [PIECES[token_id] for token_id in ids]


@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 80), max_size=20))
def test_tokens_that_split_characters_concatenate_to_the_text(text: str, cuts: list[int]) -> None:
    data = text.encode()
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    tokens = [data[start:end] for start, end in pairwise(borders)]
    texts = TokenTexts(lambda one: tokens[one[0]].decode(errors="replace"))
    pieces = texts.split(range(len(tokens)), text)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text or pieces == [token.decode(errors="replace") for token in tokens]


@given(text=st.text(alphabet="ab é🙂\n", max_size=20))
def test_byte_tokens_concatenate_to_the_text(text: str) -> None:
    data = text.encode()
    texts = TokenTexts(lambda one: data[one[0] : one[0] + 1].decode(errors="replace"))
    assert "".join(texts.split(range(len(data)), text)) == text
