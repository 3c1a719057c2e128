"""The comparison of memory fails if adapters or critics were not there."""

from __future__ import annotations

import pytest

from benchmarks.memory_forecast import CASES, check_sizes

MEASURED = {case: 1.4 if "LoRA" in case else 5.7 if "critic" in case else 3.5 for case in CASES}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"GRPO, LoRA": 3.5}, "GRPO, LoRA took as much memory as GRPO"),
        ({"PPO, critic of its own, KL reference": 3.5}, "PPO, value head, KL reference took as much memory as PPO, cr"),
    ],
)
def test_an_adapter_or_a_critic_without_effect_fails(broken: dict[str, float], why: str) -> None:
    check_sizes(MEASURED)
    with pytest.raises(RuntimeError, match=why):
        check_sizes(MEASURED | broken)
