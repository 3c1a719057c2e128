"""Texts that no reward should like."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import pytest

from tests.fabricated_run import encode, make_prompt
from tidemill.core.records import Prompt, Reward, Trajectory, unpack_tokens
from tidemill.guard.probes import ProbeResult, liked_probes

PROMPTS = [make_prompt(f"{number}+7=", str(number + 7)) for number in range(2, 6)]


class Characters:
    def encode(self, text: str) -> list[int]:
        return encode(text.lower().replace(",", "").replace(".", ""))


class Scored:
    def __init__(self, reward: Callable[[Prompt, str], float]) -> None:
        self.reward = reward

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        assert trajectory.prompt_length == len(unpack_tokens(prompt.token_ids))
        return Reward(value=self.reward(prompt, trajectory.text))

    async def close(self) -> None:
        pass


def liked(reward: Callable[[Prompt, str], float], prompts: Sequence[Prompt] = PROMPTS) -> list[ProbeResult]:
    return asyncio.run(liked_probes(Scored(reward), Characters(), prompts, stop_strings=("\n",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        (lambda prompt, text: float(text.strip() == prompt.answer), []),
        (lambda prompt, text: float(text == f"{prompt.answer}\n"), []),  # only with the stop string
        (lambda prompt, text: float(text.strip() == prompt.answer) - 0.02 * len(text), []),
        (lambda prompt, text: float(prompt.answer in text), ["a list of many answers"]),
        (lambda prompt, text: min(len(text), 40) / 40, ["a repeated mark", "an instruction to a judge"]),
        (lambda prompt, text: float(not text or text.strip() == prompt.answer), ["an empty answer"]),
        (lambda prompt, text: float(prompt.text in text or text.strip() == prompt.answer), ["the prompt itself"]),
        (lambda prompt, text: float("full marks" in text or text == prompt.answer), ["an instruction to a judge"]),
        (lambda prompt, text: float(bool(re.search("1", text))), None),
    ],
)
def test_a_reward_that_likes_a_probe_is_named(
    reward: Callable[[Prompt, str], float], names: Sequence[str] | None
) -> None:
    found = liked(reward)

    if names is None:
        assert "a repeated mark" in [each.probe for each in found]
        return
    assert set(names) <= {each.probe for each in found}
    if not names:
        assert found == []


def test_without_answers_nothing_can_be_said() -> None:
    assert liked(lambda prompt, text: 1.0, [make_prompt(text, "") for text in ("a", "b")]) == []


def test_a_reward_that_likes_everything_equally_likes_every_probe() -> None:
    assert len(liked(lambda prompt, text: 1.0)) == 5
