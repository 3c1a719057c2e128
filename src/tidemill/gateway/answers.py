"""Answers of /v1/chat/completions and /v1/completions: whole, or as chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.records import ToolRequest, unpack_logprobs, unpack_tokens
from tidemill.gateway.backend import Piece
from tidemill.gateway.requests import Question
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


def token_entries(piece: Piece, token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """Tokens with their logprobs, as chat answers have them."""
    found = []
    for token_id, logprob in zip(unpack_tokens(piece.token_ids), unpack_logprobs(piece.logprobs), strict=True):
        encoded = token_bytes(token_id)
        token = encoded.decode(errors="replace")
        found.append({"token": token, "logprob": logprob, "bytes": list(encoded), "top_logprobs": []})
    return found


class Choice:
    """One whole choice, put together from news."""

    def __init__(self, index: int) -> None:
        self.index, self.text, self.calls = index, "", list[dict[str, Any]]()
        self.finish: FinishReason | None = None
        self.entries: list[dict[str, Any]] = []
        self.token_ids: list[int] = []

    def add(self, piece: Piece, said: ChoiceDelta, question: Question, token_bytes: TokenBytes) -> None:
        self.text += said.text
        self.calls += call_objects(said.calls)
        self.finish = said.finish or self.finish
        self.token_ids += unpack_tokens(piece.token_ids)
        if question.logprobs:
            self.entries += token_entries(piece, token_bytes)

    def chat(self, question: Question) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return self._with_tokens(
            question,
            {
                "index": self.index,
                "message": message,
                "logprobs": {"content": self.entries, "refusal": None} if question.logprobs else None,
                "finish_reason": self.finish,
            },
        )

    def completion(self, question: Question) -> dict[str, Any]:
        logprobs = CompletionLogprobs().take(self.entries, final=True) if question.logprobs else None
        return self._with_tokens(
            question, {"index": self.index, "text": self.text, "logprobs": logprobs, "finish_reason": self.finish}
        )

    def _with_tokens(self, question: Question, choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, "token_ids": self.token_ids} if question.token_ids else choice


class CompletionLogprobs:
    """The logprobs of one choice in the older form of /v1/completions, which has no bytes: a character of several
    tokens is the text of the last of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0  # of the tokens so far

    def take(self, entries: Sequence[dict[str, Any]], *, final: bool) -> dict[str, Any]:
        """The next tokens; if they are the last ones, a broken character is written as U+FFFD."""
        tokens, offsets = list[str](), list[int]()
        for place, entry in enumerate(entries, start=1):
            tokens.append(self._decoder.decode(bytes(entry["bytes"]), final and place == len(entries)))
            offsets.append(self._characters)
            self._characters += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class Answer:
    """The frame of the answers to one request.

    Args:
        chat: of /v1/chat/completions; otherwise of /v1/completions.
    """

    def __init__(self, question: Question, model: str, token_bytes: TokenBytes, *, chat: bool) -> None:
        self._question, self._token_bytes, self._chat = question, token_bytes, chat
        self._frame = {
            "id": new_id("chatcmpl" if chat else "cmpl"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}
        self._logprobs = defaultdict[int, CompletionLogprobs](CompletionLogprobs)  # by choice

    def whole(self, choices: Sequence[Choice], used: dict[str, int], prompt_ids: Sequence[int]) -> dict[str, Any]:
        question, kind = self._question, "chat.completion" if self._chat else "text_completion"
        found = [choice.chat(question) if self._chat else choice.completion(question) for choice in choices]
        answer = {**self._frame, "object": kind, "choices": found, "usage": used}
        return {**answer, "prompt_token_ids": list(prompt_ids)} if question.token_ids else answer

    def chunk(self, piece: Piece, said: ChoiceDelta) -> dict[str, Any]:
        """News of one choice."""
        question = self._question
        choice: dict[str, Any] = {"index": piece.index, "logprobs": None, "finish_reason": said.finish}
        entries = token_entries(piece, self._token_bytes) if question.logprobs else []
        if self._chat:
            delta: dict[str, Any] = {} if piece.index in self._begun else {"role": "assistant", "content": ""}
            self._begun.add(piece.index)
            if said.text:
                delta["content"] = said.text
            if said.calls:
                delta["tool_calls"] = [
                    {"index": self._next_call(piece.index), **call} for call in call_objects(said.calls)
                ]
            choice |= {"delta": delta, "logprobs": {"content": entries, "refusal": None} if entries else None}
        else:
            final = said.finish is not None
            logprobs = self._logprobs[piece.index].take(entries, final=final) if entries else None
            choice |= {"text": said.text, "logprobs": logprobs}
        if question.token_ids:
            choice["token_ids"] = unpack_tokens(piece.token_ids)
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
