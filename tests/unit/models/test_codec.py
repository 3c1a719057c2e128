"""Text to ids and back, on tokenizers made here."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.chat_models import CHATML, LLAMA3, QWEN2_5, QWEN3, chat_codec, token_id
from tests.model_folders import save_folder, small_tokenizer
from tests.model_shapes import VOCABULARY, llama
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.models.codec import TextCodec, load_codec

USER = Message(role="user", content="a")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def codec(tokenizer: PreTrainedTokenizerFast) -> TextCodec:
    return TextCodec(tokenizer, [1])


def saved(folder: Path, tokenizer: PreTrainedTokenizerFast, **files: dict[str, object]) -> Path:
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_plain_text_round_trip() -> None:
    plain = codec(small_tokenizer())
    ids = plain.encode("1 + 2 =\n")
    assert ids == [ord(char) for char in "1 + 2 =\n"]
    assert plain.decode(ids) == "1 + 2 =\n"
    assert plain.encode("") == [] and plain.decode([]) == ""


def test_special_tokens_are_left_out_of_completions() -> None:
    assert codec(small_tokenizer()).decode([ord("4"), 1, 0, 0]) == "4"


def test_leading_special_tokens_are_kept_and_trailing_ones_left_out() -> None:
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    assert tokenizer("7").input_ids == [0, ord("7"), 1]
    assert codec(tokenizer).encode("7") == [0, ord("7")]
    assert codec(tokenizer).encode("") == [0]


def test_a_beginning_that_is_also_the_end_token_is_kept() -> None:
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    assert codec(tokenizer).encode("7") == [1, ord("7")]


@pytest.mark.parametrize(
    ("prefix", "text", "ids"),
    [
        ("<pad>", "<pad>7", [0, ord("7")]),
        ("<pad>", "<pad>", [0]),
        ("<pad>", "<pad><pad>7", [0, 0, ord("7")]),
        ("<pad>", " <pad>7", [0, ord(" "), 0, ord("7")]),
        ("<pad>", "7<pad>", [0, ord("7"), 0]),
        ("<pad>", "<eos>7", [0, 1, ord("7")]),
        ("<pad> <eos>", "7", [0, 1, ord("7")]),
        ("<pad> <eos>", "<pad><eos>7", [0, 1, ord("7")]),
        ("<pad> <eos>", "<eos>7", [0, 1, ord("7")]),
        ("<pad> <eos>", "<pad>7", [0, 1, 0, ord("7")]),
    ],
)
def test_what_a_raw_prompt_begins_with_is_not_doubled(prefix: str, text: str, ids: list[int]) -> None:
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{prefix} $A", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    assert codec(tokenizer).encode(text) == ids


def test_a_character_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(UserError, match="vocabulary lacks 'é'"):
        codec(small_tokenizer()).encode("caf\u00e9")


def test_chat_ends_where_the_answer_begins_and_adds_no_other_tokens() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    text, ids = codec(tokenizer).encode_chat([Message(role="user", content="2+2?")])
    assert text == "[user]2+2?\n[assistant]"
    assert ids == [ord(char) for char in text]


def test_a_template_that_refuses_is_explained() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(UserError, match="no system role") as caught:
        codec(tokenizer).encode_chat([Message(role="system", content="x"), Message(role="user", content="y")])
    assert "system, user" in caught.value.hint


def test_a_model_without_template_names_the_key() -> None:
    with pytest.raises(UserError, match="no chat template") as caught:
        codec(small_tokenizer()).encode_chat([Message(role="user", content="x")])
    assert caught.value.where == "model.chat_template"


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    for text in ("é 😀ok\ufffd<|im_end|>", "plain"):
        byte_level = chat_codec(CHATML)
        assert b"".join(map(byte_level.token_bytes, byte_level.encode_completion(text))) == text.encode()
    pieces = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "\ufffd": 258, "▁b": 259}
    tokenizer = Tokenizer(BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    for start in ([], [Strip(" ", 1, 0)]):  # as Gemma's and Llama 2's
        tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), *start])
        fallback = codec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
        ids = [257, *fallback.encode_completion("😀"), 258, 259]
        assert b"".join(map(fallback.token_bytes, ids)) == "a😀\ufffd b".encode()


CHATS = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}


@pytest.mark.parametrize("name", CHATS)
def test_special_tokens_in_messages_are_text(name: str) -> None:
    chat = chat_codec(CHATS[name])
    special = set(chat.tokenizer.all_special_ids)

    def ids_of(text: str) -> list[int]:
        schema = {"type": "function", "function": {"name": "f", "description": f"d{text}", "parameters": {}}}
        roles = ("system", "user", "assistant", "user")
        rendered, ids = chat.encode_chat([Message(role=each, content=f"a{text}b") for each in roles], tools=[schema])
        assert rendered.count(f"a{text}b") == 4
        assert chat.decode_whole(ids) == rendered
        return [number for number in ids if number in special]

    scaffold = ids_of("")
    assert len(scaffold) >= 8
    for token in chat.tokenizer.all_special_tokens:
        assert ids_of(token) == scaffold, token
        role = chat.encode_chat([Message(role=f"user{token}", content="a")])[1]
        assert role.count(token_id(chat, token)) <= chat.encode_chat([USER])[1].count(token_id(chat, token))


RELEASED = ("gemma3", "deepseek_r1_distill", "qwen2_5", "qwen3", "qwen3_6", "qwen3_5_nothink", "llama3_2", "phi3")
TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(TRL is None, reason="needs trl, which contains the templates of many models")
@pytest.mark.parametrize("name", RELEASED)
def test_chats_without_special_tokens_have_the_ids_of_transformers(name: str) -> None:
    assert TRL is not None and TRL.origin is not None
    chat = chat_codec((Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text())
    thought = "<think>\nwhy\n</think>\n\nfirst"
    texts = [("user", " What  is\n\n12 times 34?\n"), ("assistant", thought), ("user", "é日本\t")]
    for messages in (texts[:1], texts):
        turns = [{"role": role, "content": text} for role, text in messages]
        expected = chat.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert chat.encode_chat([Message(**turn) for turn in turns])[1] == expected


def test_a_reply_is_text_with_thinking_and_an_end() -> None:
    chat = chat_codec(QWEN3)
    end, other = token_id(chat, "<|im_end|>"), token_id(chat, "<|endoftext|>")
    think, start = token_id(chat, "<think>"), token_id(chat, "<|im_start|>")
    for text, specials in (
        ("a", []),
        ("a<|im_end|>", [end]),
        ("a<|im_end|>b", []),
        ("a<|im_end|>b<|endoftext|>", [other]),
        ("<|im_end|><|im_end|>", [end]),
        ("<think>\nx<|im_start|>user\n", [think]),
    ):
        ids = chat.encode_reply(text)
        assert [number for number in ids if number in {end, other, think, start}] == specials, text
        assert chat.decode_whole(ids) == text
    assert chat.encode_reply("<think>\nx</think>  a") == chat.encode_completion("<think>\nx</think>  a")


def test_a_tokenizer_that_finds_special_tokens_in_text_refuses_only_messages_with_them() -> None:
    backend = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} <eos>{% endfor %}"
    words = TextCodec(tokenizer, [0])
    assert words.encode_chat([Message(role="user", content="a")])[1] == [1, 0]
    assert words.encode_reply("a <eos>") == [1, 0]
    with pytest.raises(UserError, match="cannot encode '<eos>' as text"):
        words.encode_chat([Message(role="user", content="a <eos> a")])


def test_completions_are_encoded_alone() -> None:
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    assert codec(tokenizer).encode_completion("7") == [ord("7")]  # neither the beginning's token nor the end's
    assert codec(tokenizer).encode_completion("7<eos>") == [ord("7"), 1]  # but what the text says
    assert codec(tokenizer).decode_whole([ord("7"), 1]) == "7<eos>"


def test_the_end_token_is_the_tokenizers_own() -> None:
    plain = TextCodec(small_tokenizer(), [1, 9])
    assert plain.end_token_id(chat=False) == 1
    assert plain.end_token_id(chat=True) == 1  # no template says otherwise


def test_a_chat_turn_ends_as_the_template_closes_it() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}#{{ m.role }}:{{ m.content }}~\n{% endfor %}"
    turned = TextCodec(tokenizer, [1, ord("~")])
    assert (turned.end_token_id(chat=True), turned.end_token_id(chat=False)) == (ord("~"), 1)
    # Here "~" ends nothing, and a template that closes turns with what is no stop token has no say.
    assert TextCodec(tokenizer, [1]).end_token_id(chat=True) == 1


def test_a_template_that_closes_only_the_users_turn_has_no_say() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}~{% endif %}{% endfor %}"
    assert TextCodec(tokenizer, [1, ord("~")]).end_token_id(chat=True) == 1


def test_a_template_that_refuses_an_assistant_has_no_say() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert TextCodec(tokenizer, [1]).end_token_id(chat=True) == 1


def test_a_model_without_end_token_names_the_key() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer)
    with pytest.raises(UserError, match="no token that ends a completion") as caught:
        TextCodec(tokenizer, []).end_token_id(chat=False)
    assert "data.end_token = false" in caught.value.hint
    assert TextCodec(tokenizer, [7, 5]).end_token_id(chat=False) == 5


def test_stop_ids_come_from_every_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, small_tokenizer(), generation_config={"eos_token_id": [9, 1]}, config={"eos_token_id": 5})
    assert load_codec(folder).stop_token_ids == (1, 5, 9)


def test_stop_ids_of_a_folder_that_names_none(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer)
    assert load_codec(saved(tmp_path, tokenizer, config={"eos_token_id": None})).stop_token_ids == ()


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, small_tokenizer())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON") as caught:
        load_codec(folder)
    assert caught.value.where.endswith("generation_config.json")


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_a_user_error(content: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, small_tokenizer())
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_codec(folder)
    assert caught.value.where == str(folder)
    assert len(str(caught.value).splitlines()) == 2


def test_threads_may_share_a_codec() -> None:
    shared = codec(small_tokenizer())
    texts = [f"{i} + {i} = {2 * i}\n" * 20 for i in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: shared.decode(shared.encode(text)), texts)) == texts


def grown(**tokens: object) -> PreTrainedTokenizerFast:
    """The small tokenizer with ids from VOCABULARY on, for which the models of these tests have no embedding."""
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<more>"])
    assert tokenizer.convert_tokens_to_ids("<more>") == VOCABULARY
    for name, value in tokens.items():
        setattr(tokenizer, name, value)
    return tokenizer


def in_model_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    save_folder(llama(), folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_vocabulary_with_more_ids_than_embeddings_is_refused(tmp_path: Path) -> None:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code for code in range(2, VOCABULARY + 4)}
    larger = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="<pad>", eos_token="<eos>"
    )
    folder = in_model_folder(tmp_path, larger)
    with pytest.raises(
        UserError, match=f"has id {VOCABULARY + 3}, but the model has only {VOCABULARY} embeddings"
    ) as caught:
        load_codec(folder)
    assert caught.value.where == str(folder)


@pytest.mark.parametrize(
    "used",
    [{"eos_token": "<more>"}, {"bos_token": "<more>"}, {"chat_template": "<more>{{ messages[0].content }}"}],
    ids=lambda used: next(iter(used)),
)
def test_an_added_token_that_is_in_use_needs_an_embedding(tmp_path: Path, used: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=f"'<more>' has id {VOCABULARY}, but the model has only {VOCABULARY} embeddings"
    ):
        load_codec(in_model_folder(tmp_path, grown(**used)))


def test_an_added_token_without_an_embedding_is_refused_only_where_a_text_has_it(tmp_path: Path) -> None:
    """Tokenizers of text models have tokens for images, for which the model has no embedding (Gemma 3 1B)."""
    codec = load_codec(in_model_folder(tmp_path, grown()))
    assert codec.encode("7") == [ord("7")]
    with pytest.raises(UserError, match=f"'<more>' has id {VOCABULARY}"):
        codec.encode("7<more>")


def test_embeddings_without_tokens_are_padding(tmp_path: Path) -> None:
    save_folder(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY + 64}))
    assert load_codec(tmp_path).encode("7") == [ord("7")]


@pytest.mark.parametrize(
    "template", ["{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{% include 'x' %}", "{{ undefined() }}", "{% if"]
)
def test_a_template_that_fails_is_refused(template: str) -> None:
    """Whatever its expressions raise."""
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template refuses") as caught:
        codec(tokenizer).encode_chat([Message(role="user", content="a")])
    assert caught.value.where == "model.chat_template"
    assert codec(tokenizer).end_token_id(chat=True) == 1


@pytest.mark.parametrize("ids", ["x", [["a"]], {"a": 1}, 2.5, [None], True])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_invalid_end_tokens_are_refused(ids: object, file: str, tmp_path: Path) -> None:
    saved(tmp_path, small_tokenizer(), **{file: {"eos_token_id": ids}})
    with pytest.raises(UserError, match="must be a token id") as caught:
        load_codec(tmp_path)
    assert caught.value.where == f"{tmp_path / file}.json: eos_token_id"
