"""What is generated and judged in a simulated run: functions of the sample, so that equal seeds make equal work."""

from __future__ import annotations

import hashlib
import math

from tidemill.core.records import Record, Reward, SampleId
from tidemill.sim.profiles.lengths import NORMAL, Lengths

SHARE_BITS = 52
"""Of a key: as many as make a float below 1 exactly."""


class Workload(Record):
    """The law of samples. Lengths and rewards do not depend on who generates them, or when."""

    lengths: Lengths
    prompt_tokens: int = 256
    different_prompts: int = 100_000  # then they come again, in another epoch
    prompt_correlation: float = 0.0  # between the lengths of a prompt's samples, as normal scores
    solved: float = 0.5  # share of samples with reward 1; the others have 0
    score_s: float = 0.0  # to judge a sample
    held_out: int = 0  # prompts of an evaluation; 0: the run has none

    @property
    def longest(self) -> int:
        """Completion tokens of the longest sample there can be."""
        return self.lengths.quantile(_share(2**64 - 1))

    def length(self, sample_id: SampleId) -> int:
        share = _share(sample_id.key)
        if self.prompt_correlation:
            prompt = _share(_key(sample_id.run_seed, "prompt", sample_id.prompt_id))
            score = math.sqrt(self.prompt_correlation) * NORMAL.inv_cdf(prompt)
            score += math.sqrt(1 - self.prompt_correlation) * NORMAL.inv_cdf(share)
            share = min(max(NORMAL.cdf(score), _share(0)), _share(2**64 - 1))
        return self.lengths.quantile(share)

    def reward(self, sample_id: SampleId) -> Reward:
        return Reward(value=float(_share(_key("reward", sample_id.key)) < self.solved))


def _share(key: int) -> float:
    """A 64-bit number as a share, 0 < share < 1."""
    return ((key >> (64 - SHARE_BITS)) + 0.5) / float(2**SHARE_BITS)


def _key(*fields: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little")
