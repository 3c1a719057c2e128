"""One sample's session."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.core.records import Prompt, Record, SampleId, TokenBuffer
from tidemill.gateway.captured import Captured
from tidemill.gateway.live_answer import LiveAnswer
from tidemill.gateway.requests import CompletionParams
from tidemill.gateway.session_log import SessionEvent


class PendingRequest(Record):
    """A request that waits for its session's environment, or whose answers are generated."""

    prompt_ids: TokenBuffer  # int32 [P]
    params: CompletionParams
    state_key: str


class Session:
    """One sample's session."""

    def __init__(self, name: str, key: str, sample_id: SampleId, prompt: Prompt) -> None:
        self.name, self.key, self.sample_id, self.prompt = name, key, sample_id, prompt
        self.attached = self.ending = self.failed = self.ended = False
        self.expires_s = 0.0  # unix seconds
        self.reward: float | None = None
        self.turn_rewards: dict[int, float] = {}
        self.group = self.opened_by = ""
        self.metadata: dict[str, Any] = {}
        self.live: LiveAnswer | None = None
        self.choice = 0  # answer of `live` that is generated
        self.request: PendingRequest | None = None
        self.captured: Captured | None = None  # at the end of the last turn
        self.woken = asyncio.Event()

    def recall(self, noted: SessionEvent) -> None:
        """Apply an event of the log."""
        self.attached = True
        if noted.event == "attached":
            self.metadata, self.group, self.opened_by = noted.metadata, noted.group, noted.opened_by
        elif noted.event in ("ended", "failed"):
            self.ending, self.failed = True, noted.event == "failed"
        elif noted.turn is None:
            self.reward = noted.value
        else:
            self.turn_rewards[noted.turn] = noted.value
