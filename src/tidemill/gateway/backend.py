"""What the gateway asks for tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from tidemill.core.protocols import TurnFormat
from tidemill.core.records import Finish, LogprobBuffer, Record, SamplingParams, TokenBuffer
from tidemill.gateway.requests import CompletionParams


class CompletionRequest(Record):
    """Completions of one prompt."""

    prompt_ids: TokenBuffer  # int32 [P]
    sampling: SamplingParams
    params: CompletionParams  # with a seed, equal requests get the same completions of the same weights
    key: str  # of the session or client


class TokenChunk(Record):
    """New tokens of one completion."""

    index: int
    token_ids: TokenBuffer  # int32 [N]
    logprobs: LogprobBuffer  # float32 [N], of the distribution sampled from
    finish: Finish | None = None


class Served(Protocol):
    """A model that generates. It never loses a completion to a worker that vanishes."""

    @property
    def name(self) -> str: ...
    @property
    def context_tokens(self) -> int:
        """Limit of prompt and completion."""

    @property
    def format(self) -> TurnFormat: ...
    @property
    def defaults(self) -> SamplingParams:
        """What a request that says nothing means; its limit of tokens is 0 if it is only that of the context."""

    @property
    def ready(self) -> bool:
        """Whether a worker serves."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Counters and gauges for metrics, by name."""

    def refuse(self, params: CompletionParams, key: str) -> None:
        """Check a request before it is answered. Raises ApiError."""

    def generate(self, requested: CompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """The completions, chunk by chunk, in any order of their indices. Closing the generator ends them.

        Raises:
            ApiError: the prompt cannot be generated from.
        """

    @property
    def vocabulary(self) -> int:
        """Token ids below it exist."""

    @property
    def longest_token(self) -> int:
        """Characters that one token can stand for, at most."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt. Raises UserError: the vocabulary lacks a character."""
