"""What a recipe's samples will be like, as far as an earlier run says."""

from __future__ import annotations

import math
from itertools import accumulate

from tidemill.core.records import Record, SampleId
from tidemill.planner.calibration.profile import RunProfile
from tidemill.sim.workload import Workload


class ContinuedLengths(Record):
    """As often as they were seen; what a limit cut goes on, and ends with the mean rate of all. Implements
    `sim.profiles.lengths.Lengths`."""

    ended: tuple[tuple[int, float], ...]  # (tokens, share of all completions that long or shorter), both rising
    limit: int  # where the others were cut
    rate: float  # of a token, to be the last

    def quantile(self, share: float) -> int:
        for tokens, reached in self.ended:
            if share <= reached:
                return tokens
        reached = self.ended[-1][1] if self.ended else 0.0
        left = (1 - share) / (1 - reached)  # of the cut ones, those that are longer still
        if not 0 < self.rate < 1:
            return self.limit + (0 if self.rate else round(1e6))
        return self.limit + max(1, math.ceil(math.log(left) / math.log1p(-self.rate)))


def continued(lengths: dict[int, int], cut: dict[int, int]) -> ContinuedLengths:
    """
    Args:
        lengths: how many of each; at least one.
        cut: of these, how many a limit ended.
    """
    count, tokens = sum(lengths.values()), sum(length * number for length, number in lengths.items())
    ended = [(length, number - cut.get(length, 0)) for length, number in sorted(lengths.items())]
    reached = accumulate(number / count for _, number in ended)
    stopped = sum(number for _, number in ended)
    return ContinuedLengths(
        ended=tuple((length, share) for (length, number), share in zip(ended, reached, strict=True) if number),
        limit=max(lengths),
        rate=stopped / tokens if tokens else 1.0,
    )


def workloads(profile: RunProfile) -> tuple[Workload, Workload]:
    """(training, held-out prompts); without evaluations in the run, they are taken to be alike."""
    prompt = max(1, round(profile["prompt_tokens"]))
    training = Workload(lengths=continued(profile.lengths, profile.cut), prompt_tokens=prompt)
    if not profile.held_out_lengths:
        return training, training
    return training, Workload(lengths=continued(profile.held_out_lengths, {}), prompt_tokens=prompt)


def length_of(training: Workload, held_out: Workload, sample_id: SampleId) -> int:
    work = training if sample_id.purpose == "train" else held_out
    return max(1, work.length(sample_id))
