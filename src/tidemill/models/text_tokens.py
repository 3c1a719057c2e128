"""Token ids of texts in which special tokens are only what a chat template put there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tidemill.core.errors import UserError
from tidemill.core.records import Message

# A noncharacter of Unicode, which no text should contain, marks special tokens and texts that look like them.
MARK, END = "\ufdd0", "\ufdd1"
BRACKETED = re.compile(r"[<\[{◁｟].*[>\]}▷｠]", re.DOTALL)
"""An added token that is not special is a marker only in this form: tokenizers also add white space and words."""
GENERATED_MARKER = re.compile("think|thought|reason|tool_call", re.IGNORECASE)
"""In markers of thinking and calls, which a model writes inside its turn: `<think>`, `[/THINK]`, `<tool_call>`."""


class Markers:
    """The tokens that contents of messages must not become: the special tokens, and the added tokens of the template.

    A content is disarmed before the template renders it: markers in it become `U+FDD0 = id U+FDD1`, which templates
    leave as it is. U+FDD0 itself becomes U+FFFD.

    Args:
        template: the chat template.
        scaffold: what it renders around the contents of some messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "", scaffold: str = "") -> None:
        backend: Any = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        used = {token.content for token in added.values() if token.content in template + scaffold}
        markers = special | set(filter(BRACKETED.fullmatch, used))
        between = special | {text for text in markers if text in scaffold}
        self._ids = {token.content: number for number, token in added.items() if token.content in markers}
        self._texts = {number: text for text, number in self._ids.items()}
        self._marker = _any_of(markers)
        self._between = _any_of(text for text in between if not GENERATED_MARKER.search(text))
        self._disarmed = re.compile(f"{MARK}=(\\d+){END}")

    def disarm(self, text: str, *, generated: bool = False) -> str:
        """The text for a template.

        Args:
            generated: by the model, whose markers of thinking and calls stay tokens.
        """
        marker = self._between if generated else self._marker
        return marker.sub(lambda match: f"{MARK}={self._ids[match.group()]}{END}", text.replace(MARK, "\ufffd"))

    def disarm_message(self, message: Message) -> dict[str, str]:
        """Role and content for a template."""
        content = self.disarm(message.content, generated=message.role == "assistant")
        return {"role": self.disarm(message.role), "content": content}

    def disarm_schema(self, value: Any) -> Any:
        """A tool's schema with all its texts disarmed."""
        if isinstance(value, dict):
            return {self.disarm_schema(name): self.disarm_schema(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.disarm_schema(each) for each in value]
        return self.disarm(value) if isinstance(value, str) else value

    def readable(self, rendered: str) -> str:
        """A rendered chat as text."""
        return self._disarmed.sub(lambda match: self._texts[int(match.group(1))], rendered)


class Vocabulary(Protocol):
    """What `TextTokens` needs of a `TextCodec`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def check_embeddings(self, token_ids: list[int]) -> None: ...

    def unknown_character(self, text: str) -> UserError: ...


class TextTokens(Markers):
    """Encodes rendered chats and texts: a marker in a disarmed text, such as `<|im_end|>`, gives several ordinary
    tokens; the template's own markers are special tokens. A text without markers has the ids that the tokenizer gives
    it.

    Raises:
        UserError: the tokenizer gives a special token for its text even where it is not looked for.
    """

    def __init__(self, codec: Vocabulary, template: str = "", scaffold: str = "") -> None:
        super().__init__(codec.tokenizer, template, scaffold)
        self._codec = codec
        self._armed = re.compile(f"{MARK}=(\\d+){END}|({self._marker.pattern})")
        # A copy of the tokenizer in which markers have other names.
        backend: Any = codec.tokenizer.backend_tokenizer
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            if token["content"] in self._ids:
                token["content"] = _name(token["id"])
        if state["model"]["type"] == "Unigram":  # it finds every piece of its vocabulary in a text
            pieces = state["model"]["vocab"]
            state["model"]["vocab"] = [
                (_name(self._ids[piece]) if piece in self._ids else piece, score) for piece, score in pieces
            ]
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._original = {self._backend.token_to_id(token["content"]): token["id"] for token in state["added_tokens"]}
        self._check()

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat. Raises UserError: the vocabulary lacks a character."""
        return self._encode(
            self._armed.sub(
                lambda match: _name(self._ids[match.group(2)]) if match.group(2) else self._texts[int(match.group(1))],
                rendered,
            )
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as text. Raises UserError: the vocabulary lacks a character."""
        return self._encode(text.replace(MARK, "\ufffd"))

    def _encode(self, text: str) -> list[int]:
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise self._codec.unknown_character(re.sub(f"{MARK}\\d+{END}", "", text)) from error
        token_ids = [self._original.get(number, number) for number in ids]
        self._codec.check_embeddings(token_ids)
        return token_ids

    def _check(self) -> None:
        vocabulary = set(self._backend.get_vocab(with_added_tokens=False).values())
        moved = {new for new, number in self._original.items() if new != number}
        refused = [_name(number) for number in self._texts if moved & vocabulary]
        unknown = self._codec.tokenizer.unk_token_id
        for text in self._ids:
            try:
                found = set(self._encode(text)) & self._texts.keys() - {unknown}
            except UserError:  # it cannot be written with this vocabulary at all
                continue
            refused += [text] if found else []
        if refused:
            raise UserError(
                f"the tokenizer cannot encode {refused[0]!r} as text",
                where=self._codec.tokenizer.name_or_path or "model.source",
                hint="remove it from the texts, or use a model with a byte-level tokenizer, as agents need",
            )


def _name(number: int) -> str:
    """The name of a marker in the copy of the tokenizer."""
    return f"{MARK}{number}{END}"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of several texts; nothing without texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
