"""Deltas between two versions of the weights: what coding takes, and what is left to send."""

from __future__ import annotations

CODED_PER_CORE_S = 1.1e9
"""Parameters that one core compares and encodes in a second; applying them is faster. Measured on one machine's CPU
(benchmarks/results/weights.json: 134.5M in 0.12 s), so another's will differ."""
DELTA_ELEMENT_BYTES = 2.0
"""Of a changed element with its place; measured 1.0 to 2.0, the more the fewer elements change (the same file)."""
