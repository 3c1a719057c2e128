"""Which samples get a gold score."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.records import SampleId


def chosen_for_gold(sample_ids: Sequence[SampleId], *, share: float, most: int) -> list[int]:
    """Indices of the samples of a batch that get a gold score, ascending.

    A function of the ids, which the policy does not see: those with the smallest hashes, `share` of the batch, at
    least one.

    Args:
        most: of one batch.
    """
    count = min(most, max(1, round(share * len(sample_ids))))
    ranked = sorted((sample_id.key, index) for index, sample_id in enumerate(sample_ids))
    return sorted(index for _, index in ranked[:count])
