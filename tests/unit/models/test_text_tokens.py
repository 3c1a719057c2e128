"""Texts never become special tokens, and otherwise keep the ids that the tokenizer gives them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.chat_models import CHATML, LLAMA3, QWEN3, chat_codec, token_id
from tests.model_folders import small_tokenizer
from tidemill.core.errors import UserError
from tidemill.models.codec import TextCodec
from tidemill.models.text_tokens import TextTokens

CODECS = [
    chat_codec(template, in_vocabulary=inside) for template in (CHATML, QWEN3, LLAMA3) for inside in (False, True)
]


def tokens_of(codec: TextCodec) -> TextTokens:
    return TextTokens(codec, str(codec.tokenizer.chat_template))


@pytest.mark.parametrize("codec", CODECS)
def test_no_special_token_is_ever_made_from_text(codec: TextCodec) -> None:
    tokens, special = tokens_of(codec), set(codec.tokenizer.all_special_ids)
    assert len(special) >= 3
    for marker in codec.tokenizer.all_special_tokens:
        for text in (marker, f"a{marker}{marker} b", marker[:-1] + marker, f"\n{marker}"):
            disarmed = tokens.disarm(text)
            for ids in (tokens.encode(text), tokens.encode_rendered(disarmed)):
                assert not special & set(ids)
                assert codec.decode_whole(ids) == text
            assert tokens.readable(disarmed) == text


@pytest.mark.parametrize("codec", CODECS)
def test_markers_of_the_template_are_single_tokens_beside_texts_with_the_same_markers(codec: TextCodec) -> None:
    tokens = tokens_of(codec)
    for marker in codec.tokenizer.all_special_tokens:
        ids = tokens.encode_rendered(marker + "\n" + tokens.disarm(f"x {marker}") + marker)
        number = token_id(codec, marker)
        assert (ids[0], ids[-1], ids.count(number)) == (number, number, 2)
        assert codec.decode_whole(ids) == f"{marker}\nx {marker}{marker}"


@pytest.mark.parametrize("codec", CODECS)
def test_texts_without_markers_have_the_ids_of_the_tokenizer(codec: TextCodec) -> None:
    tokens = tokens_of(codec)
    for text in ("", "What  is 12 times 34?\n\n", " é日本\t\x00", "<|im", "a < b|>"):
        assert tokens.encode(text) == tokens.encode_rendered(tokens.disarm(text)) == codec.encode_completion(text)
    assert token_id(codec, "  ") in tokens.encode("a  b")  # an added token, but no marker


def test_markers_of_thinking_are_tokens_only_in_generated_text() -> None:
    codec = chat_codec(QWEN3)
    tokens, number = tokens_of(codec), token_id(codec, "</think>")
    assert number in tokens.encode_rendered(tokens.disarm("a</think>", generated=True))
    assert number not in tokens.encode_rendered(tokens.disarm("a</think>"))
    end = tokens.encode_rendered(tokens.disarm("a<|im_end|>", generated=True))
    assert not set(codec.tokenizer.all_special_ids) & set(end)


def test_white_space_and_words_that_the_template_uses_are_no_markers() -> None:
    """Gemma's tokenizer has added tokens for several line ends, and templates contain line ends."""
    codec = chat_codec(CHATML + "{#\n\n  user#}")
    codec.tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "user", "[INST]")])
    tokens, text = tokens_of(codec), "a user\n\nsays  [INST]"
    assert tokens.encode_rendered(tokens.disarm(text)) == codec.encode_completion(text)
    assert token_id(codec, "[INST]") not in TextTokens(codec, "[INST]").encode(text)


def test_markers_between_turns_are_never_generated() -> None:
    """Also those that are not special, such as DeepSeek's `<｜User｜>`."""
    codec = chat_codec("{% for m in messages %}<tool_response>{{ m.role }}</think>{{ m.content }}{% endfor %}")
    rendered = codec.markers.disarm("<tool_response></think><tool_call>", generated=True)
    assert codec.markers.readable(rendered) == "<tool_response></think><tool_call>"
    assert rendered.endswith("</think><tool_call>") and "<tool_response>" not in rendered


def test_a_unigram_model_does_not_find_special_tokens_in_text() -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁", *"<>/sab"]
    backend = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"), [2])
    tokens = TextTokens(codec)
    assert tokens.encode("a</s>b") == [pieces.index(piece) for piece in "▁a</s>b"]
    assert tokens.encode_rendered("<s>" + tokens.disarm("a<s>"))[0] == 1
    assert 1 not in tokens.encode_rendered(tokens.disarm("a<s>"))


def test_a_text_cannot_name_a_token_of_the_copy() -> None:
    codec = chat_codec(CHATML)
    tokens, end = tokens_of(codec), token_id(codec, "<|im_end|>")
    for text in (f"\ufdd0{end}\ufdd1", f"\ufdd0={end}\ufdd1"):
        for ids in (tokens.encode(text), tokens.encode_rendered(tokens.disarm(text))):
            assert end not in ids
            assert codec.decode_whole(ids) == text.replace("\ufdd0", "\ufffd")


def test_a_character_outside_the_vocabulary_is_named() -> None:
    tokens = TextTokens(TextCodec(small_tokenizer(), [1]))
    assert tokens.encode("<eos>") == [ord(char) for char in "<eos>"]
    with pytest.raises(UserError, match="vocabulary lacks 'é'"):
        tokens.encode("caf\u00e9 <eos>")


def test_a_tokenizer_that_finds_special_tokens_in_text_is_refused() -> None:
    backend = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"), [0])
    with pytest.raises(UserError, match="cannot encode '<eos>' as text"):
        TextTokens(codec)
