"""How long a batch of samples takes to generate, with its tail: while the longest are finished, few slots are busy."""

from __future__ import annotations

import math

from tidemill.core.records import Record
from tidemill.sim.profiles.engine import EngineProfile
from tidemill.sim.profiles.lengths import Lengths, quantiles

PARTS = 64
"""Quantiles that stand for the lengths of a batch."""


class Rollout(Record):
    """What is generated for a batch."""

    samples: int
    group_size: int  # samples that share a prompt
    prompt_tokens: float
    lengths: tuple[int, ...]  # of completions, equally likely, rising

    @property
    def tokens(self) -> float:
        """Completion tokens in all."""
        return self.samples * self.mean

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def running_context(self) -> float:
        """Tokens of a sample met at any moment: long ones are met more often, half-way through on average."""
        return self.prompt_tokens + sum(length**2 for length in self.lengths) / (2 * sum(self.lengths))


def rollout_of(lengths: Lengths, *, samples: int, group_size: int, prompt_tokens: float) -> Rollout:
    return Rollout(
        samples=samples, group_size=group_size, prompt_tokens=prompt_tokens, lengths=quantiles(lengths, PARTS)
    )


def generation_s(engine: EngineProfile, rollout: Rollout, samples: float) -> float:
    """Of one engine's `samples`: while others wait, slots stay full; then all that run are drained to the longest.

    Each prompt is computed once for its group, and decoding waits meanwhile; infinite where not even one sample fits.
    """
    if samples <= 0:
        return 0.0
    limit = engine.most_running(rollout.prompt_tokens + rollout.mean)
    if engine.most_running(rollout.prompt_tokens + rollout.lengths[-1]) < 1:
        return math.inf
    together = min(samples, limit)
    waiting_tokens = (samples - together) * rollout.mean
    steady_s = waiting_tokens / engine.tokens_per_s(limit, rollout.running_context)
    prompts_s = samples / rollout.group_size * engine.prefill_s(rollout.prompt_tokens)
    return prompts_s + steady_s + _drain_s(engine, rollout, together)


def _drain_s(engine: EngineProfile, rollout: Rollout, together: float) -> float:
    """Of samples begun at once: step by step through the lengths, with fewer and fewer of them."""
    seconds, reached = 0.0, 0
    for number, length in enumerate(rollout.lengths):
        alive = max(together * (1 - number / len(rollout.lengths)), 1.0)
        context = rollout.prompt_tokens + (reached + length) / 2
        seconds += (length - reached) * engine.decode_step_s(math.ceil(alive), alive * context)
        reached = length
    return seconds


def steady_tokens_per_s(engine: EngineProfile, rollout: Rollout, samples: float = math.inf) -> float:
    """Where there is always another sample to begin: no tail; prompts are part of the work.

    Args:
        samples: in flight at most.
    """
    running = max(1, min(engine.most_running(rollout.prompt_tokens + rollout.mean), samples))
    if engine.most_running(rollout.prompt_tokens + rollout.lengths[-1]) < 1:
        return 0.0
    decoding_s = 1 / engine.tokens_per_s(int(running), rollout.running_context)
    prompt_s = engine.prefill_s(rollout.prompt_tokens) / rollout.group_size / rollout.mean
    return 1 / (decoding_s + prompt_s)
