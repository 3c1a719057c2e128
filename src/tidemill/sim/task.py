"""Prompts without text, judged without a look: what a run needs besides time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidemill.core.buffers import pack_tokens
from tidemill.core.records import Message, Prompt, Reward, Trajectory


class SimulatedPrompts:
    """Implements `core.protocols.PromptSource`: the same `different` prompts in every epoch.

    Args:
        per_step: groups of a batch.
        prompt_tokens: length of each.
    """

    def __init__(self, per_step: int, *, different: int, prompt_tokens: int, held_out: int = 0) -> None:
        self._per_step, self._different = per_step, different
        self._token_ids = pack_tokens([1] * prompt_tokens)
        self._held_out = [self._prompt(f"h{at}") for at in range(held_out)]

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        first = (step - 1) * self._per_step
        return [
            (position // self._different, self._prompt(f"p{position % self._different}"))
            for position in range(first, first + self._per_step)
        ]

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def _prompt(self, name: str) -> Prompt:
        return Prompt(prompt_id=name, token_ids=self._token_ids, text="", answer="")


class SimulatedScorer:
    """Implements `core.protocols.Scorer`.

    Args:
        seconds: what judging a sample takes.
        reward: of a sample.
    """

    def __init__(self, seconds: Callable[[Trajectory], float], reward: Callable[[Trajectory], Reward]) -> None:
        self._seconds, self._reward = seconds, reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        await asyncio.sleep(self._seconds(trajectory))
        return self._reward(trajectory)

    async def close(self) -> None:
        pass


class NoText:
    """Implements `core.protocols.Codec`."""

    stop_token_ids: tuple[int, ...] = (0,)

    def encode(self, text: str) -> list[int]:
        return []

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        return "", []

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
