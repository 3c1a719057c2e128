"""One sample while the engine works on it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.core.buffers import ITEM_BYTES, count, pack_logprobs, pack_tokens
from tidemill.core.records import Finish, GenerateRequest, PolicyVersion, TokenDelta


class Sequence:
    """Tokens known (prompt, prefix, generated), how many of them have keys and values in the cache, and what was made
    since the last delta."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.request = request
        prompt = np.frombuffer(request.prompt_ids, np.int32)
        prefix = np.frombuffer(request.prefix_ids, np.int32)
        self._buffer = np.empty(context + 1, np.int32)
        self.prompt_length = len(prompt)
        self.known = len(prompt) + len(prefix)
        self._buffer[: self.known] = np.concatenate([prompt, prefix])
        self.computed = 0
        self.sample_key = request.sample_id.key
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

    def append(self, token_id: int, logprob: float) -> None:
        self._buffer[self.known] = token_id
        self.known += 1
        self._logprobs.append(logprob)

    def flush(self, version: PolicyVersion) -> TokenDelta | None:
        """What is new since the last flush, or None when nothing is."""
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
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            version=version,
            finish=self.finish,
            error=self.error,
        )
