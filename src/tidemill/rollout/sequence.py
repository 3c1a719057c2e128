"""A sample inside an engine: its tokens, when it ends, and what was not reported yet. Shared by all engines."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from tidemill.core.errors import UserError
from tidemill.core.records import (
    ITEM_BYTES,
    Finish,
    GenerateRequest,
    PolicyVersion,
    TokenDelta,
    count,
    pack_logprobs,
    pack_tokens,
)

SHOWN_CHARS = 60


class Sequence:
    """A sample in the engine: known tokens (prompt, prefix, generated), and the logprobs since the last delta.

    `spans` are the ranges of known tokens that were not generated: the prompt, then observations. `computed` counts the
    tokens with keys and values in the engine's cache, where the engine needs that; `has_old_keys` is whether some are
    of an older version (`schedule.keep_cache`).

    Args:
        context: maximum number of known tokens.

    Raises:
        UserError: the prompt is empty, or fills the context.
    """

    def __init__(self, request: GenerateRequest, context: int) -> None:
        prompt = np.frombuffer(request.prompt_ids, np.int32)
        prefix = np.frombuffer(request.prefix_ids, np.int32)
        name = request.sample_id.prompt_id  # of a prompt from the command line, its text
        where = f"prompt {name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + '...'}"
        if not len(prompt):
            raise UserError("the prompt is empty", where=where, hint="give at least one character")
        if len(prompt) + len(prefix) >= context:
            length = len(prompt) + len(prefix)
            raise UserError(
                f"the prompt has {length} tokens, which leaves no room in a context of {context} tokens",
                where=where,
                hint="shorten the prompt, or raise engine.context_tokens up to the model's limit",
            )
        self.request, self._context = request, context
        self._buffer = np.empty(context + 1, np.int32)
        self.prompt_length = len(prompt)
        self.known = len(prompt) + len(prefix)
        self._buffer[: self.known] = np.concatenate([prompt, prefix])
        self.spans = [
            (0, len(prompt)),
            *((len(prompt) + start, len(prompt) + end) for start, end in request.observations),
        ]
        self.computed = 0
        self.has_old_keys = False
        self.seed = request.sample_id.seed(request.branch)
        self._limit = request.limit or request.sampling.max_new_tokens
        self._flushed = len(prefix)
        self._logprobs: list[float] = []
        self.finish: Finish | None = None
        self.error = ""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Known tokens, int32 [known]."""
        return self._buffer[: self.known]

    @property
    def completion_length(self) -> int:
        return self.known - self.prompt_length

    @property
    def completion(self) -> npt.NDArray[np.int32]:
        return self._buffer[self.prompt_length : self.known]

    @property
    def has_drawn(self) -> bool:
        """Whether a token was generated for this request."""
        return self.known > self.prompt_length + count(self.request.prefix_ids)

    @property
    def span_end(self) -> int:
        """End of the span that contains the next token to compute; 0 if that token was generated."""
        if self.computed >= self.spans[-1][1]:
            return 0
        return next((end for start, end in self.spans if start <= self.computed < end), 0)

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return min(self._limit - self.completion_length, self._context - self.known)

    def append(self, token_id: int, logprob: float, decode: Callable[[Seq[int]], str]) -> None:
        """Add a token, and end the sample at a stop token, a stop string or a limit.

        Args:
            decode: converts token ids to text, for stop strings.
        """
        self._buffer[self.known] = token_id
        self.known += 1
        self._logprobs.append(logprob)
        if token_id in self.request.sampling.stop_token_ids or self._at_stop_string(decode):
            self.finish = "stop"
        elif self.room <= 0:
            self.finish = "length"

    def _at_stop_string(self, decode: Callable[[Seq[int]], str]) -> bool:
        strings = self.request.sampling.stop_strings
        if not strings:
            return False
        longest = max(len(string.encode()) for string in strings)
        turn = self.completion[self.request.turn_start :]
        tail = decode(turn[-longest - 1 :].tolist())
        return any(string in tail for string in strings)

    def abort_if_other_version(self, version: PolicyVersion) -> bool:
        """Abort a sample that requires another version; returns whether it was aborted."""
        wanted = self.request.exact_version
        if wanted is None or wanted == version.number:
            return False
        self.finish = "aborted"
        self.error = f"asked for version {wanted}, the engine has {version.number}"
        return True

    def flush(self, version: PolicyVersion) -> TokenDelta | None:
        """The delta since the last flush, or None if there is nothing new."""
        if not self._logprobs and self.finish is None:
            return None
        start = self._flushed
        token_ids = pack_tokens(self.completion[start:].tolist())
        self._flushed += count(token_ids)
        logprobs, self._logprobs = pack_logprobs(self._logprobs), []
        assert len(token_ids) == len(logprobs) == ITEM_BYTES * (self.completion_length - start)
        return TokenDelta(
            sample_id=self.request.sample_id,
            lease_id=self.request.lease_id,
            attempt=self.request.attempt,
            start=self.request.offset + start,
            token_ids=token_ids,
            logprobs=logprobs,
            version=version,
            finish=self.finish,
            error=self.error,
        )
