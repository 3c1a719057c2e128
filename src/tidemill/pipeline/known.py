"""What is known of a model before any stage runs: its configuration and its tokenizer, never its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.config.layers import PREFIX
from tidemill.config.model import ModelConfig
from tidemill.config.pipeline import StageSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Message
from tidemill.envs.text.content import hash_number
from tidemill.models.catalog import resolve_shell
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.hollow import stored_context_limit


@dataclass(frozen=True, slots=True)
class Known:
    """A model without its weights."""

    folder: Path
    codec: TextCodec
    context_limit: int  # tokens


class KnownModels:
    """Models that stages begin with, each looked at once."""

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self._by_name = {stage.name: stage for stage in stages}
        self._found: dict[str, Known | UserError | None] = {}

    def began_as(self, source: str, config: ModelConfig) -> ModelConfig:
        """What a source of a stage's configuration is read from: of what a stage makes, the model at the root of its
        chain."""
        while source.startswith(PREFIX):
            config = self._by_name[source.removeprefix(PREFIX)].spec.model
            source = config.source
        return config if source == config.source else config.model_copy(update={"source": source, "revision": None})

    def look(self, config: ModelConfig) -> Known | None:
        """None for a model that is still to be built or merged.

        Raises:
            UserError: there is no such model.
        """
        name = repr((config.source, config.revision, config.char))
        if name not in self._found:
            try:
                self._found[name] = _look(config)
            except UserError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, UserError):
            raise found
        return found

    def known(self, config: ModelConfig) -> Known | None:
        """As `look`, and None for a model at fault, which is told where it is named."""
        try:
            return self.look(config)
        except UserError:
            return None


class AnyCodec:
    """Implements core.protocols.CompletionCodec where no tokenizer is known yet: every text is one token of its own, so
    that rows and tasks are read as ever, and none is too long."""

    stop_token_ids = ()

    def encode(self, text: str) -> list[int]:
        return [hash_number(text) % 2**31]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        text = "\n\n".join(message.content for message in messages)
        return text, self.encode(text)

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def end_token_id(self, *, chat: bool) -> int:
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError("nothing is generated before a stage runs")


def _look(config: ModelConfig) -> Known | None:
    folder = resolve_shell(config, progress=lambda _: None)
    return None if folder is None else Known(folder, load_codec(folder), stored_context_limit(folder))
