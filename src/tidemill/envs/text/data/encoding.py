"""From rows of text to records of token ids."""

from __future__ import annotations

from tidemill.core.buffers import TokenBuffer, pack_tokens
from tidemill.core.errors import UserError
from tidemill.core.protocols import CompletionCodec
from tidemill.core.records import Demonstration, PreferencePair
from tidemill.envs.text.content import Question, content_id, encode_question, in_chat, placed
from tidemill.envs.text.data.schemas import DemonstrationText, PairText, equal_sides


class Encoder:
    """Prompt and completions of a row as a model would see them while generating: the prompt's ids first, then the
    completion's, encoded apart.

    Args:
        chat_template: wrap plain prompts too in the model's chat template.
        end_token: close every completion with the token that ends the model's turn, unless it ends with one already.
    """

    def __init__(self, codec: CompletionCodec, *, chat_template: bool, end_token: bool) -> None:
        self._codec, self._chat_template, self._end_token = codec, chat_template, end_token

    def demonstration(self, row: DemonstrationText) -> Demonstration:
        """Raises UserError: the codec refuses the text."""
        return Demonstration(
            id=content_id(row), prompt_ids=self._prompt(row), completion_ids=self._completion(row, row.completion)
        )

    def pair(self, row: PairText) -> PreferencePair:
        """Raises UserError: the codec refuses the text, or both sides have the same tokens."""
        chosen, rejected = self._completion(row, row.chosen), self._completion(row, row.rejected)
        if chosen == rejected:
            raise equal_sides(row)
        return PreferencePair(
            id=content_id(row),
            prompt_ids=self._prompt(row),
            chosen_ids=chosen,
            rejected_ids=rejected,
            margin=row.margin,
        )

    def _prompt(self, row: Question) -> TokenBuffer:
        return pack_tokens(encode_question(row, self._codec, chat_template=self._chat_template)[1])

    def _completion(self, row: Question, text: str) -> TokenBuffer:
        try:
            token_ids = self._codec.encode_completion(text)
        except UserError as error:
            raise placed(error, row) from error
        if self._end_token and token_ids[-1:] and token_ids[-1] not in self._codec.stop_token_ids:
            chat = in_chat(row, chat_template=self._chat_template)
            token_ids = [*token_ids, self._codec.end_token_id(chat=chat)]
        return pack_tokens(token_ids)
