"""Encodes prompts and decodes completions with the model's tokenizer. Completions are never encoded again."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.hardware.model_config import CONFIG, decoder_part, read_config
from tidemill.models.auto import first_line, load_tokenizer
from tidemill.models.folder import damaged
from tidemill.models.text_tokens import MARK, Markers, TextTokens

_TOKENIZER = "the tokenizer"
_BYTE_LEVEL: dict[str, int] = {char: byte for byte, char in bytes_to_unicode().items()}
"""Bytes by the characters that stand for them in byte-level vocabularies."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of characters, for those that it lacks."""
CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "a"},
]


class TextCodec:
    """Implements `core.protocols.ReplyCodec`; thread-safe.

    A raw prompt is read as written: special tokens in its text are special tokens. It starts with those that the
    tokenizer puts first (Gemma's and Llama 3's <bos>; SmolLM2 and Qwen have none), also where the text repeats them,
    and has none at the end, because the completion follows. A chat prompt is exactly the output of the chat template;
    special tokens in contents of messages are text.

    Args:
        embeddings: rows of the model's embedding; None if unknown.

    Attributes:
        tokenizer: not to be changed.
        stop_token_ids: ids that end a completion, ascending.
        prefix_ids: special tokens before a raw prompt.
        token_count: ids below it are tokens.
        longest_token: characters that one token can stand for, at most.

    Raises:
        UserError: a token that text can contain has no embedding. Others may: tokenizers of text models can have tokens
            for images.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int], *, embeddings: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        # Used directly: the wrapper changes its truncation settings on every call, which is not thread-safe.
        self._backend: Any = tokenizer.backend_tokenizer
        self.stop_token_ids = tuple(sorted(set(stop_token_ids)))
        self._end_token_ids: dict[bool, int] = {}
        self.prefix_ids = self._leading_special_tokens()
        self._embeddings = sys.maxsize if embeddings is None else embeddings
        self._without_embedding = self._find_without_embedding()
        self.token_count = min(self._embeddings, max(self._vocabulary().values()) + 1)
        self.longest_token = max(map(len, self._vocabulary()))

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt.

        Raises:
            UserError: the vocabulary lacks a character (only models without an unknown token).
        """
        token_ids = self._encode(text)
        # The longest end of the prefix with which the text begins.
        lengths = range(len(self.prefix_ids), 0, -1)
        written = next((n for n in lengths if token_ids[:n] == self.prefix_ids[-n:]), 0)
        return [*self.prefix_ids, *token_ids[written:]]

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Text and token ids of the chat template up to the start of the assistant's turn.

        Raises:
            UserError: the model has no chat template, its template refuses these messages, or a content has a special
                token that this tokenizer cannot encode as text.
        """
        turns = [self.markers.disarm_message(message) for message in messages]
        rendered = self.render_chat(turns, [self.markers.disarm_schema(tool) for tool in tools])
        return self.markers.readable(rendered), self._encode_disarmed(rendered)

    def render_chat(self, messages: Sequence[dict[str, str]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Text of the chat template, with messages of role and content, up to the start of the assistant's turn."""
        if not self.tokenizer.chat_template:
            raise UserError(
                "the model has no chat template",
                where="model.chat_template",
                hint="choose an instruction-tuned model, or give texts, with model.chat_template = false",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template can raise anything
            raise UserError(
                f"the model's chat template refuses the messages: {first_line(error)}",
                where="model.chat_template",
                hint=f"the messages have the roles {', '.join(message['role'] for message in messages)}",
            ) from error
        assert isinstance(text, str)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without special tokens. An incomplete last character becomes U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Text of a completion including special tokens, which `encode_completion` encodes back."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token, special ones included; a token may have only a part of a character's bytes."""
        text = self.decode_whole([token_id])
        if "\ufffd" not in text:
            # After another token: some decoders remove the space that a text begins with.
            return self.decode_whole([token_id, token_id])[len(text) :].encode()
        token: str = self._backend.id_to_token(token_id)
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return bytes(_BYTE_LEVEL[char] for char in token) if _BYTE_LEVEL.keys() >= set(token) else text.encode()

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion alone, without added special tokens; it does not merge with the prompt's tokens."""
        return self._encode(text)

    def encode_reply(self, text: str) -> list[int]:
        """Token ids of the assistant's content in a chat: text, except for markers of thinking and calls, and a stop
        token at its end."""
        tokens = filter(None, map(self._backend.id_to_token, self.stop_token_ids))
        end = max((token for token in tokens if text.endswith(token)), key=len, default="")
        return self._encode_disarmed(self.markers.disarm(text.removesuffix(end), generated=True) + end)

    def end_token_id(self, *, chat: bool) -> int:
        """The token that ends a completion: in a chat the stop token that the template puts after the assistant's turn,
        otherwise the tokenizer's end token.

        Raises:
            UserError: the model has no token that ends a completion.
        """
        if chat not in self._end_token_ids:
            self._end_token_ids[chat] = self._find_end_token(chat=chat)
        return self._end_token_ids[chat]

    @cached_property
    def markers(self) -> Markers:
        """What contents of messages must not become."""
        return Markers(self.tokenizer, *self._template)

    @cached_property
    def text_tokens(self) -> TextTokens:
        """Encodes what was disarmed. Raises UserError: the tokenizer cannot encode its special tokens as text."""
        return TextTokens(self, *self._template)

    @property
    def vocabulary_digest(self) -> str:
        """Digest of the mapping from ids to tokens; models with equal digests can exchange token ids."""
        digest = hashlib.blake2b(digest_size=16)
        for token, number in sorted(self._vocabulary().items(), key=lambda item: item[1]):
            digest.update(f"{number}\0{token}\0".encode())
        return digest.hexdigest()

    def _find_end_token(self, *, chat: bool) -> int:
        if chat and self.tokenizer.chat_template:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                token_ids = self._encode(str(self.tokenizer.apply_chat_template(turns, tokenize=False)))
            except Exception:  # noqa: BLE001 - see encode_chat
                token_ids = []
            # Search after the assistant's content: earlier turns can end with another token.
            content = self._encode("b")
            starts = range(len(token_ids) - len(content), -1, -1)
            start = next((at for at in starts if token_ids[at : at + len(content)] == content), len(token_ids))
            ends = [token for token in token_ids[start + len(content) :] if token in self.stop_token_ids]
            if ends:
                return ends[0]
        end_token = self.tokenizer.eos_token_id
        if end_token is None and not self.stop_token_ids:
            raise UserError(
                "the model has no token that ends a completion",
                where="model.source",
                hint="set data.end_token = false, or give its tokenizer an eos_token",
            )
        return self.stop_token_ids[0] if end_token is None else int(end_token)

    @property
    def _template(self) -> tuple[str, str]:
        """The chat template, and a conversation that it renders."""
        template = str(self.tokenizer.chat_template or "")
        for conversation in (CONVERSATION, CONVERSATION[1:]) if template else ():
            with suppress(UserError):  # Gemma's has no system message
                return template, self.render_chat(conversation)
        return template, ""

    def _encode_disarmed(self, rendered: str) -> list[int]:
        return self.text_tokens.encode_rendered(rendered) if MARK in rendered else self._encode(rendered)

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise self.unknown_character(text) from error
        self.check_embeddings(ids)
        return ids

    def check_embeddings(self, token_ids: Iterable[int]) -> None:
        """Raises UserError: the model has no embedding for a token."""
        if self._without_embedding and (missing := self._without_embedding.keys() & set(token_ids)):
            raise self._no_embedding(min(missing), where="the prompt")

    def _find_without_embedding(self) -> dict[int, str]:
        """Added tokens without an embedding, by id. Raises UserError: prompts need a token that has none."""
        found = {number: token for token, number in self._vocabulary().items() if number >= self._embeddings}
        if not found:
            return found
        largest = max(self._vocabulary(added=False).values())
        if largest >= self._embeddings:
            raise self._no_embedding(largest, where=_TOKENIZER)
        needed = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, *self.prefix_ids}
        template = str(self.tokenizer.chat_template)
        for number, token in found.items():
            if number in needed or token in template:
                raise self._no_embedding(number, where=_TOKENIZER)
        return found

    def _no_embedding(self, number: int, *, where: str) -> UserError:
        token = self._backend.id_to_token(number)
        return UserError(
            f"the token {token!r} has id {number}, but the model has only {self._embeddings} embeddings",
            where=where,
            hint="give the model its own tokenizer files, or resize its embeddings to this tokenizer",
        )

    def _vocabulary(self, *, added: bool = True) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=added)
        return vocabulary

    def unknown_character(self, text: str) -> UserError:
        """The error for a text that has a character outside the vocabulary."""
        return UserError(
            f"the model's vocabulary lacks {self._first_unknown(text)!r}",
            where="the prompt",
            hint="for model.source = char, add it to model.char.alphabet",
        )

    def _first_unknown(self, text: str) -> str:
        for char in text:
            try:
                self._backend.encode(char, add_special_tokens=False)
            except Exception:  # noqa: BLE001 - see _encode
                return char
        return text

    def _leading_special_tokens(self) -> list[int]:
        """The tokens that the tokenizer puts before a text, found by encoding one with and without them."""
        if not self._backend.encode("", add_special_tokens=True).ids:
            return []
        plain: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        full: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        return full[: next(starts, 0)]


def load_codec(folder: Path) -> TextCodec:
    """The codec of a model folder; needs no weights and downloads nothing.

    Raises:
        UserError: the tokenizer is missing or damaged, or the model lacks embeddings for its tokens.
    """
    tokenizer = load_tokenizer(folder)
    stop_token_ids = _stop_token_ids(folder, tokenizer)
    # The folder of an adapter has no config.json.
    config = decoder_part(read_config(folder / CONFIG)) if (folder / CONFIG).is_file() else {}
    try:
        return TextCodec(tokenizer, stop_token_ids, embeddings=config.get("vocab_size"))
    except UserError as error:
        raise UserError(error.what, where=str(folder), hint=error.hint) from error


def _stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end-of-text ids of the tokenizer, the generation settings and the model configuration."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise damaged("not valid JSON", folder / name) from error
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool):
                raise damaged(f"must be a token id, is {item!r:.60}", f"{folder / name}: eos_token_id")
        found |= set(ids)
    return found
