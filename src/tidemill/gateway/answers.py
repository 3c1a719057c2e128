"""Answers of /v1/chat/completions and /v1/completions: whole, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.core.records import TokenBuffer, ToolRequest, count, unpack_logprobs, unpack_tokens
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
    r"""Tokens with their logprobs, as chat answers have them; parts of characters as OpenAI writes them, `\xf0\x9f`."""
    found = []
    for token_id, logprob in zip(unpack_tokens(chunk.token_ids), unpack_logprobs(chunk.logprobs), strict=True):
        encoded = token_bytes(token_id)
        try:
            text = encoded.decode()
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in encoded)
        found.append({"token": text, "logprob": logprob, "bytes": list(encoded), "top_logprobs": []})
    return found


@dataclass(slots=True)
class Choice:
    """One whole choice, put together from news."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: FinishReason | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)  # of tokens, with logprobs
    token_ids: list[int] = field(default_factory=list)


def completion_logprobs(entries: Sequence[dict[str, Any]], start: int = 0) -> dict[str, Any]:
    r"""In the older form of /v1/completions, where a part of a character is written as `bytes:\xf0\x9f`.

    Args:
        start: offset of the first token in the completion.
    """
    offsets, tokens = [start], []
    for entry in entries:
        offsets.append(offsets[-1] + begun_characters([entry]))
        token: str = entry["token"]
        tokens.append(token if token.encode() == bytes(entry["bytes"]) else f"bytes:{token}")
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


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
        self._choices = defaultdict[int, Choice](Choice)
        self._begun: set[int] = set()
        self._calls = Counter[int]()  # so far, by choice
        self._characters = Counter[int]()  # of the tokens so far, by choice

    def add(self, index: int, chunk: TokenChunk, said: ChoiceDelta) -> None:
        """News of one choice of a whole answer."""
        choice = self._choices[index]
        choice.text += said.text
        choice.calls += call_objects(said.calls)
        choice.finish = said.finish or choice.finish
        choice.token_ids += unpack_tokens(chunk.token_ids)
        if self._params.logprobs:
            choice.entries += token_entries(chunk, self._token_bytes)

    def whole(self, prompts: Sequence[TokenBuffer]) -> dict[str, Any]:
        """The answer to prompts, int32 [P] each."""
        completion_tokens = sum(len(choice.token_ids) for choice in self._choices.values())
        answer = {
            **self._frame,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [self._whole_choice(*each) for each in sorted(self._choices.items())],
            "usage": usage(sum(map(count, prompts)), completion_tokens),
        }
        return {**answer, "prompt_token_ids": unpack_tokens(prompts[0])} if self._params.token_ids else answer

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": choice.finish}
        if self._chat:
            calls = {"tool_calls": choice.calls} if choice.calls else {}
            text = None if calls and not choice.text else choice.text
            found["message"] = {"role": "assistant", "content": text, "refusal": None, **calls}
        else:
            found["text"] = choice.text
        if self._params.logprobs:
            entries = choice.entries
            found["logprobs"] = {"content": entries, "refusal": None} if self._chat else completion_logprobs(entries)
        if self._params.token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def chunk(self, chunk: TokenChunk, said: ChoiceDelta) -> dict[str, Any]:
        """News of one choice of a stream."""
        index = chunk.index
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": said.finish}
        entries = token_entries(chunk, self._token_bytes) if self._params.logprobs else []
        if self._chat:
            delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant", "content": ""}
            self._begun.add(index)
            if said.text:
                delta["content"] = said.text
            if calls := call_objects(said.calls):
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls, self._calls[index])]
                self._calls[index] += len(calls)
            choice |= {"delta": delta, "logprobs": {"content": entries, "refusal": None} if entries else None}
        else:
            logprobs = completion_logprobs(entries, self._characters[index]) if entries else None
            self._characters[index] += begun_characters(entries)
            choice |= {"text": said.text, "logprobs": logprobs}
        if self._params.token_ids:
            choice["token_ids"] = unpack_tokens(chunk.token_ids)
        return self._chunk([choice])

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage(prompt_tokens, completion_tokens)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._frame, "object": kind, "choices": choices}
