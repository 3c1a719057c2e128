"""Token ids of texts in which special tokens are only what a chat template put there."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

from tidemill.core.errors import UserError
from tidemill.models.codec import TextCodec

# A noncharacter of Unicode, which no text should contain, marks special tokens and texts that look like them.
MARK, END = "\ufdd0", "\ufdd1"


class TextTokens:
    """Encodes rendered chats. Texts are disarmed before a template renders them, so that a marker in them, such as
    `<|im_end|>`, gives several ordinary tokens; the template's own markers are special tokens. A text without markers
    has the ids that the tokenizer gives it.

    Markers are the special tokens and the added tokens that the template contains. In a text, U+FDD0 becomes U+FFFD.

    Raises:
        UserError: the tokenizer gives a special token for its text even where it is not looked for.
    """

    def __init__(self, codec: TextCodec, template: str = "") -> None:
        self._codec = codec
        backend = codec.tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self._ids = {
            token.content: number for number, token in added.items() if token.special or token.content in template
        }
        self._texts = {number: text for text, number in self._ids.items()}
        self._marker = _any_of(self._ids)
        self._special = _any_of([token.content for token in added.values() if token.special])
        self._armed = re.compile(f"{MARK}=(\\d+){END}|({self._marker.pattern})")
        self._disarmed = re.compile(f"{MARK}=(\\d+){END}")
        # A copy of the tokenizer in which markers have other names.
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            if token["content"] in self._ids:
                token["content"] = _name(token["id"])
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._original = {self._backend.token_to_id(token["content"]): token["id"] for token in state["added_tokens"]}
        self._check()

    def disarm(self, text: str, *, generated: bool = False) -> str:
        """The text for a template.

        Args:
            generated: by the model, whose markers that are not special stay: thinking and calls.
        """
        marker = self._special if generated else self._marker
        return marker.sub(lambda match: f"{MARK}={self._ids[match.group()]}{END}", text.replace(MARK, "\ufffd"))

    def readable(self, rendered: str) -> str:
        """A rendered chat as text."""
        return self._disarmed.sub(lambda match: self._texts[int(match.group(1))], rendered)

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
        return [self._original.get(number, number) for number in ids]

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
                hint="use a model with a byte-level tokenizer for agents",
            )


def _name(number: int) -> str:
    """The name of a marker in the copy of the tokenizer."""
    return f"{MARK}{number}{END}"


def _any_of(texts: list[str] | dict[str, int]) -> re.Pattern[str]:
    """The longest of several texts; nothing without texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
