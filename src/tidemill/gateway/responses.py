"""Answers of /v1/responses, as far as agents' SDKs use them. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tidemill.core.records import ToolRequest, count
from tidemill.gateway.answers import new_id
from tidemill.gateway.backend import CompletionRequest
from tidemill.gateway.texts import ChoiceDelta


class ResponseAnswer:
    """One response while it is generated: a message with its text, and function calls, in the order they appear."""

    def __init__(self, requested: CompletionRequest, model: str) -> None:
        params, sampling = requested.params, requested.sampling
        self._prompt_tokens = count(requested.prompt_ids)
        self._items: list[dict[str, Any]] = []
        self._sequence = 0
        self._frame: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_tokens,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in params.tools],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""
        frame = {**self._frame, "status": "in_progress", "output": []}
        yield self._event("response.created", response=frame)
        yield self._event("response.in_progress", response=frame)

    def news(self, said: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The events of new text and calls."""
        for part in said.parts:
            if isinstance(part, ToolRequest):
                yield from self._close_message()
                yield from self._call(part)
                continue
            if not self._items or self._items[-1]["type"] != "message":
                yield from self._open_message()
            message = self._items[-1]
            message["content"][0]["text"] += part
            yield self._text_event("response.output_text.delta", delta=part, logprobs=[])

    def end(self, said: ChoiceDelta, completion_tokens: int) -> Iterator[dict[str, Any]]:
        """The last events; `said` has the finish, and the last event the whole response."""
        if not self._items:
            yield from self._open_message()
        yield from self._close_message()
        status = "incomplete" if said.finish == "length" else "completed"
        response = {
            **self._frame,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._prompt_tokens + completion_tokens,
            },
        }
        yield self._event(f"response.{status}", response=response)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        message = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
        self._items.append({**message, "content": [part]})
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item={**message, "content": []})
        yield self._text_event("response.content_part.added", part=dict(part))

    def _close_message(self) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1].get("status") != "in_progress":
            return
        message = self._items[-1]
        message["status"] = "completed"
        part = message["content"][0]
        yield self._text_event("response.output_text.done", text=part["text"], logprobs=[])
        yield self._text_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=message)

    def _call(self, call: ToolRequest) -> Iterator[dict[str, Any]]:
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": new_id("call"),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._items.append(item)
        place = {"output_index": len(self._items) - 1, "item_id": item["id"]}
        added = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place["output_index"], item=added)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _text_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}
