"""Figures of a batch that can explain a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.core.records import Prompt, Trajectory


def witnesses(samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float]) -> dict[str, float]:
    return {}
