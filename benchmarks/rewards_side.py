"""One side of `benchmarks.rewards`: scores a case once for each line on its standard input, and prints what it took.

    python -m benchmarks.rewards_side CASE FUNCTIONS

Runs with any version of Tidemill since 26 November 2026: it uses `build_scorer` alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from tidemill.config.task import RewardConfig, ScoringConfig
from tidemill.core.records import Prompt, SampleId, Segment, Trajectory, pack_logprobs, pack_tokens
from tidemill.data.build_task import served_task
from tidemill.scoring.scorer import build_scorer

LONG = "The answer follows from the steps below. " * 50
"""2,050 characters: a completion of some 400 tokens."""
CASES: dict[str, tuple[int, str, bool]] = {
    "trivial": (1000, "right", False),
    "long": (1000, "right", True),
    "async": (1000, "right_later", False),
    "lists": (1000, "right_all", False),
    "slow": (64, "slow", False),
    "math_verify": (100, "", False),
}
"""Samples, function, and whether completions and rows are long."""


def main() -> None:
    case, functions = sys.argv[1:]
    asyncio.run(_serve(case, functions))


async def _serve(case: str, functions: str) -> None:
    count, function, long = CASES[case]
    reward: dict[str, Any] = {"kind": "python", "function": f"{functions}:{function}"}
    if not function:
        reward = {"kind": "math_verify"}
    scorer = build_scorer(ScoringConfig(rewards=(RewardConfig(**reward),)), task=served_task(), seed=0)
    samples = list(_samples(count, long))
    expected = [float(index % 2 == 0) for index in range(count)]
    await scorer.score(*samples[0])
    print("started", flush=True)
    for _ in sys.stdin:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        rewards = await asyncio.gather(*(scorer.score(prompt, trajectory) for prompt, trajectory in samples))
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        right = [each.value for each in rewards] == expected and all(each.valid for each in rewards)
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "right": right}), flush=True)
    await scorer.close()


def _samples(count: int, long: bool) -> Iterator[tuple[Prompt, Trajectory]]:
    """Every second one is right."""
    for index in range(count):
        answer = str(index + 2)
        metadata = {"explanation": LONG} if long else {}
        text = f"1+{index + 1}="
        prompt = Prompt(
            prompt_id=str(index), token_ids=pack_tokens(map(ord, text)), text=text, answer=answer, metadata=metadata
        )
        completion = (LONG if long else "") + (answer if index % 2 == 0 else f"{answer}0")
        length = len(completion)
        yield (
            prompt,
            Trajectory(
                sample_id=SampleId(run_seed=0, purpose="train", prompt_id=str(index), epoch=0, index=0),
                token_ids=prompt.token_ids + pack_tokens(map(ord, completion)),
                segments=(
                    Segment(role="prompt", start=0, end=len(text), trained=False),
                    Segment(role="action", start=len(text), end=len(text) + length, trained=True),
                ),
                rollout_logprobs=pack_logprobs([-1.0] * length),
                versions=(),
                finish="stop",
                text=completion,
            ),
        )


if __name__ == "__main__":
    main()
