"""Which samples of a batch get a gold score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.core.records import SampleId

HASHES: Final = 2**64


def chosen_for_gold(sample_ids: Sequence[SampleId], *, share: float, most: int) -> list[int]:
    """Indices of the samples that get a gold score, ascending: those with the smallest hashes, where these are below
    `share`.

    A pure function of the ids. The policy sees none of them, so that it cannot behave differently on these samples.

    Args:
        most: of one batch.
    """
    hashed = sorted((sample_id.key, index) for index, sample_id in enumerate(sample_ids))
    return sorted(index for key, index in hashed[:most] if key < share * HASHES)
