"""Between text and token ids, with the model's own tokenizer. Completions are decoded, never encoded again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.hardware.model_config import CONFIG, MOST, decoder_part, read_config
from tidemill.models.auto import first_line, load_tokenizer

_TOKENIZER = "the tokenizer"
_OWN_TOKENIZER = "give the model its own tokenizer files, or resize its embeddings to this tokenizer"


class TextCodec:
    """Implements `tidemill.core.protocols.CompletionCodec`. Safe to use from several threads at once.

    A raw prompt starts with the special tokens the tokenizer puts first (Gemma's and Llama 3's <bos>; SmolLM2 and Qwen
    have none); tokens it would put last (an <eos>) are left out, for the completion follows. A chat prompt gets exactly
    what its template writes.

    Args:
        embeddings: rows of the model's embedding; None where they are not known.

    Raises:
        UserError: a token that texts are made of has no embedding. One that no text needs may lack it: tokenizers of
            text models have tokens for images.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int], *, embeddings: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        # Used directly: the wrapper changes its truncation settings on every call, which is not thread-safe.
        self._backend: Any = tokenizer.backend_tokenizer
        self._stop_token_ids = tuple(sorted(set(stop_token_ids)))
        self._end_token_ids: dict[bool, int] = {}
        self._prefix = self._leading_special_tokens()
        self._embeddings = sys.maxsize if embeddings is None else embeddings
        self._without_embedding = self._find_without_embedding()

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt.

        Raises:
            UserError: a character that the vocabulary cannot express (only models without an unknown token).
        """
        return [*self._prefix, *self._encode(text)]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The chat template's text, ending where the assistant's turn begins, and its token ids.

        Raises:
            UserError: the model has no chat template, or its template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model has no chat template",
                where="model.chat_template",
                hint="set model.chat_template = false, or choose an instruction-tuned model",
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises whatever its expressions raise
            raise UserError(
                f"the model's chat template refuses the messages: {first_line(error)}",
                where="model.chat_template",
                hint=f"it was given the roles {', '.join(message.role for message in messages)}",
            ) from error
        assert isinstance(text, str)
        return text, self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, special tokens left out. Half a character at the end shows as U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Text of a completion with its special tokens written out, so that `encode_completion` finds them again."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion alone: nothing is put before or after, and nothing merges with the prompt's last
        token, for the prompt's ids are fixed when a model answers it.

        Raises:
            UserError: as `encode`.
        """
        return self._encode(text)

    def end_token_id(self, *, chat: bool) -> int:
        """The tokenizer's end token; in a chat what the template closes an assistant's turn with, where that is one of
        the stop tokens.

        Raises:
            UserError: the model has no token that ends a completion.
        """
        if chat not in self._end_token_ids:
            self._end_token_ids[chat] = self._find_end_token(chat=chat)
        return self._end_token_ids[chat]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, ascending."""
        return self._stop_token_ids

    @property
    def vocabulary_digest(self) -> str:
        """Names what every id stands for: two models with the same one can read each other's token ids."""
        digest = hashlib.blake2b(digest_size=16)
        for token, number in sorted(self._vocabulary().items(), key=lambda item: item[1]):
            digest.update(f"{number}\0{token}\0".encode())
        return digest.hexdigest()

    def _find_end_token(self, *, chat: bool) -> int:
        if chat and self._tokenizer.chat_template:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                closed = self._encode(str(self._tokenizer.apply_chat_template(turns, tokenize=False)))
            except Exception:  # noqa: BLE001 - as in encode_chat
                closed = []
            # A template that does not close the turn leaves the end token of some earlier one, or none.
            after = closed[_last_place(closed, self._encode("b")) :]
            if ends := [token for token in after if token in self._stop_token_ids]:
                return ends[0]
        own = self._tokenizer.eos_token_id
        if own is None and not self._stop_token_ids:
            raise UserError(
                "the model has no token that ends a completion",
                where="model.source",
                hint="set data.end_token = false, or give its tokenizer an eos_token",
            )
        return self._stop_token_ids[0] if own is None else int(own)

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise UserError(
                f"the model's vocabulary cannot express {self._first_unknown(text)!r}",
                where="the prompt",
                hint="for model.source = char, add it to model.char.alphabet",
            ) from error
        if self._without_embedding and (missing := self._without_embedding.keys() & set(ids)):
            raise self._no_embedding(min(missing), where="the prompt")
        return ids

    def _find_without_embedding(self) -> dict[int, str]:
        """Tokens by their ids, of added ones that no text needs."""
        found = {number: token for token, number in self._vocabulary().items() if number >= self._embeddings}
        if not found:
            return found
        largest = max(self._vocabulary(added=False).values())
        if largest >= self._embeddings:
            raise UserError(
                f"the tokenizer has ids up to {largest}, and the model {self._embeddings} embeddings",
                where=_TOKENIZER,
                hint=_OWN_TOKENIZER,
            )
        needed = {self._tokenizer.eos_token_id, self._tokenizer.bos_token_id, *self._prefix}
        template = str(self._tokenizer.chat_template)
        for number, token in found.items():
            if number in needed or token in template:
                raise self._no_embedding(number, where=_TOKENIZER)
        return found

    def _no_embedding(self, number: int, *, where: str) -> UserError:
        token = self._backend.id_to_token(number)
        what = f"the token {token!r} has id {number}, and the model {self._embeddings} embeddings"
        return UserError(what, where=where, hint=_OWN_TOKENIZER)

    def _vocabulary(self, *, added: bool = True) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=added)
        return vocabulary

    def _first_unknown(self, text: str) -> str:
        for char in text:
            try:
                self._backend.encode(char, add_special_tokens=False)
            except Exception:  # noqa: BLE001 - as above
                return char
        return text

    def _leading_special_tokens(self) -> list[int]:
        """What the tokenizer puts before a text, found by encoding one with and without."""
        if not self._backend.encode("", add_special_tokens=True).ids:
            return []
        plain: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        full: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        return full[: next(starts, 0)]


def _last_place(token_ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Where the last occurrence of a sequence in another ends; at the end where there is none."""
    size = len(wanted)
    starts = (at for at in range(len(token_ids) - size, -1, -1) if list(token_ids[at : at + size]) == list(wanted))
    return next(starts, len(token_ids) - size) + size


def load_codec(folder: Path) -> TextCodec:
    """The codec of a model folder; needs no weights and fetches nothing.

    Raises:
        UserError: the tokenizer is missing or damaged, or has tokens for which the model has no embedding.
    """
    tokenizer = load_tokenizer(folder)
    stops = _stop_token_ids(folder, tokenizer)
    config = decoder_part(read_config(folder / CONFIG)) if (folder / CONFIG).is_file() else {}  # an adapter has none
    try:
        return TextCodec(tokenizer, stops, embeddings=config.get("vocab_size"))
    except UserError as error:
        raise UserError(error.what, where=str(folder), hint=error.hint) from error


def _stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """End-of-text ids from the tokenizer, the generation settings and the model configuration together."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                "not valid JSON", where=str(folder / name), hint="copy or download the file again"
            ) from error
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or abs(item) > MOST:
                raise UserError(
                    f"needs token ids, has {item!r:.60}",
                    where=f"{folder / name}: eos_token_id",
                    hint="copy or download the file again",
                )
        found |= set(ids)
    return found
