"""Answers of /v1/chat/completions and /v1/completions: whole, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.records import ToolRequest, unpack_logprobs, unpack_tokens
from tidemill.gateway.backend import TokenChunk
from tidemill.gateway.requests import CompletionParams
from tidemill.gateway.texts import ChoiceDelta, FinishReason

TokenBytes = Callable[[int], bytes]


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def call_objects(calls: Sequence[ToolRequest]) -> list[dict[str, Any]]:
    return [
        {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def token_entries(chunk: TokenChunk, token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """Tokens with their logprobs, as chat answers have them."""
    found = []
    for token_id, logprob in zip(unpack_tokens(chunk.token_ids), unpack_logprobs(chunk.logprobs), strict=True):
        encoded = token_bytes(token_id)
        found.append({"token": token_text(encoded), "logprob": logprob, "bytes": list(encoded), "top_logprobs": []})
    return found


def token_text(encoded: bytes) -> str:
    r"""The text of a token; of one with a part of a character its bytes, as OpenAI writes them: `\xf0\x9f`."""
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in encoded)


class Choice:
    """One whole choice, put together from news."""

    def __init__(self, index: int) -> None:
        self.index, self.text, self.calls = index, "", list[dict[str, Any]]()
        self.finish: FinishReason | None = None
        self.entries: list[dict[str, Any]] = []
        self.token_ids: list[int] = []

    def add(self, chunk: TokenChunk, said: ChoiceDelta, params: CompletionParams, token_bytes: TokenBytes) -> None:
        self.text += said.text
        self.calls += call_objects(said.calls)
        self.finish = said.finish or self.finish
        self.token_ids += unpack_tokens(chunk.token_ids)
        if params.logprobs:
            self.entries += token_entries(chunk, token_bytes)

    def chat(self, params: CompletionParams) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return self._with_tokens(
            params,
            {
                "index": self.index,
                "message": message,
                "logprobs": {"content": self.entries, "refusal": None} if params.logprobs else None,
                "finish_reason": self.finish,
            },
        )

    def completion(self, params: CompletionParams) -> dict[str, Any]:
        logprobs = completion_logprobs(self.entries) if params.logprobs else None
        return self._with_tokens(
            params, {"index": self.index, "text": self.text, "logprobs": logprobs, "finish_reason": self.finish}
        )

    def _with_tokens(self, params: CompletionParams, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "token_ids": self.token_ids} if params.token_ids else choice


def completion_logprobs(entries: Sequence[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    """In the older form of /v1/completions.

    Args:
        start: offset of the first token in the completion.
    """
    offsets = [start]
    for entry in entries:
        offsets.append(offsets[-1] + begun_characters([entry]))
    return {
        "tokens": [marked_token(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


def marked_token(entry: dict[str, Any]) -> str:
    r"""The text of a token, where no other field has its bytes: `bytes:\xf0\x9f` for a part of a character."""
    token: str = entry["token"]
    return token if token.encode() == bytes(entry["bytes"]) else f"bytes:{token}"


def begun_characters(entries: Sequence[dict[str, Any]]) -> int:
    """Characters that begin in tokens: bytes of UTF-8 that continue none."""
    return sum(byte & 0xC0 != 0x80 for entry in entries for byte in entry["bytes"])


class Answer:
    """The frame of the answers to one request.

    Args:
        chat: of /v1/chat/completions; otherwise of /v1/completions.
    """

    def __init__(self, params: CompletionParams, model: str, token_bytes: TokenBytes, *, chat: bool) -> None:
        self._params, self._token_bytes, self._chat = params, token_bytes, chat
        self._frame = {
            "id": new_id("chatcmpl" if chat else "cmpl"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}
        self._characters = Counter[int]()  # of the tokens so far, by choice

    def whole(self, choices: Sequence[Choice], used: dict[str, int], prompt_ids: Sequence[int]) -> dict[str, Any]:
        params, kind = self._params, "chat.completion" if self._chat else "text_completion"
        found = [choice.chat(params) if self._chat else choice.completion(params) for choice in choices]
        answer = {**self._frame, "object": kind, "choices": found, "usage": used}
        return {**answer, "prompt_token_ids": list(prompt_ids)} if params.token_ids else answer

    def chunk(self, chunk: TokenChunk, said: ChoiceDelta) -> dict[str, Any]:
        """News of one choice."""
        params = self._params
        choice: dict[str, Any] = {"index": chunk.index, "logprobs": None, "finish_reason": said.finish}
        entries = token_entries(chunk, self._token_bytes) if params.logprobs else []
        if self._chat:
            delta: dict[str, Any] = {} if chunk.index in self._begun else {"role": "assistant", "content": ""}
            self._begun.add(chunk.index)
            if said.text:
                delta["content"] = said.text
            if said.calls:
                delta["tool_calls"] = [
                    {"index": self._next_call(chunk.index), **call} for call in call_objects(said.calls)
                ]
            choice |= {"delta": delta, "logprobs": {"content": entries, "refusal": None} if entries else None}
        else:
            logprobs = completion_logprobs(entries, self._characters[chunk.index]) if entries else None
            self._characters[chunk.index] += begun_characters(entries)
            choice |= {"text": said.text, "logprobs": logprobs}
        if params.token_ids:
            choice["token_ids"] = unpack_tokens(chunk.token_ids)
        return self._chunk([choice])

    def usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": used}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._frame, "object": kind, "choices": choices}

    def _next_call(self, index: int) -> int:
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        return number
