"""The tail of a batch: its last samples on few workers, so that the others are free. Pure.

RLHFuse (arXiv 2409.13221) gathers what is left of a batch when about a fifth of it remains, because a few long samples
leave every worker nearly empty. What is freed first here is the trainer's own engine: the device then computes scores
and gradients undisturbed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.controller.router import Load


def tail_begins(*, unfinished: int, samples: int, fraction: float) -> bool:
    """Whether no more than this share of the samples in flight is unfinished."""
    return 0 < unfinished <= fraction * samples


def keepers(loads: Sequence[Load], *, unfinished: int, plateau: int, last: Collection[str]) -> frozenset[str]:
    """The fewest workers that can decode so many samples at once; all of them when that takes all.

    Those with the most samples, so that the fewest move; each takes as many as it has or as still pay.

    Args:
        loads: workers that take samples now.
        plateau: the batch size from which a worker gets no faster.
        last: workers that are taken only if the others do not suffice.
    """
    chosen: list[str] = []
    for load in sorted(loads, key=lambda load: (load.lease_id in last, -load.assigned, load.lease_id)):
        if unfinished <= 0:
            break
        chosen.append(load.lease_id)
        unfinished -= max(load.assigned, min(load.slots, plateau))
    return frozenset(chosen)
