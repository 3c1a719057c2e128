"""Least squares for costs: non-negative, robust against outliers, and merging causes that cannot be separated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tidemill.core.records import Record

Array: TypeAlias = npt.NDArray[np.float64]

TELLS_APART = 0.03
"""A cause is merged if less than this fraction of it is independent of the causes before it."""
HUBER = 1.345
"""Residuals above this number of standard deviations get less weight (95 % efficiency for normal errors)."""
MAD_TO_DEVIATION = 1.4826
EXACT = 1e-9
"""Residuals that are rounding errors, relative to the largest observation."""
ROUNDS = 30
NEARLY = 0.95
"""Another set of causes must reduce the residual below this fraction."""


class Solution(Record):
    """Cost of one unit of each cause, in seconds."""

    values: dict[str, float]  # of every cause
    errors: dict[str, float]  # standard errors; 0 for causes that were not fitted
    merged: tuple[str, ...]  # causes that cannot be separated from those before them; their time is included there
    residual: float  # sum of |seconds - fitted| / sum of seconds
    count: int  # observations


def solve(names: Sequence[str], amounts: Array, seconds: Array) -> Solution:
    """Fit `seconds` [N] by `amounts` [N, K] of causes, the most important first.

    The variance of an observation is assumed to be proportional to its seconds, because it sums many passes.
    Observations without time are ignored.
    """
    there = seconds > 0
    root = np.sqrt(seconds[there])
    rows = amounts[there] / root[:, None]
    told = _independent_columns(rows)
    merged = tuple(names[at] for at, column in enumerate(rows.T) if at not in told and column.any())
    fitted, weights = _robust(rows[:, told], root)
    values = dict.fromkeys(names, 0.0) | {names[at]: float(value) for at, value in zip(told, fitted, strict=True)}
    errors = dict.fromkeys(names, 0.0)
    left = root - rows[:, told] @ fitted
    for at, error in zip(told, _errors(rows[:, told], fitted, weights, left), strict=True):
        errors[names[at]] = float(error)
    residual = float((np.abs(left) * root).sum() / (root**2).sum()) if len(root) else 0.0
    return Solution(values=values, errors=errors, merged=merged, residual=residual, count=len(rows))


def solve_with_few(names: Sequence[str], amounts: Array, seconds: Array, causes: int = 2) -> Solution:
    """Fit the `causes` causes that explain most; prefers the first ones among nearly equal sets.

    For causes that increase together, which few observations cannot separate.
    """
    found: Solution | None = None
    for chosen in combinations(range(len(names)), causes):
        one = solve([names[at] for at in chosen], amounts[:, chosen], seconds)
        if found is None or one.residual < NEARLY * found.residual:
            found = one
    assert found is not None, "fewer causes than requested"
    there = {name for name, column in zip(names, amounts.T, strict=True) if column.any()}
    nothing = dict.fromkeys(names, 0.0)
    used = {name for name, value in found.values.items() if value}
    return replace(
        found,
        values=nothing | found.values,
        errors=nothing | found.errors,
        merged=tuple(name for name in names if name in there - used),
    )


def _independent_columns(rows: Array) -> list[int]:
    """Columns that are not linear combinations of those before them (Gram-Schmidt)."""
    told: list[int] = []
    basis = np.zeros((len(rows), 0))
    for at, column in enumerate(rows.T):
        left = column - basis @ (basis.T @ column)
        left -= basis @ (basis.T @ left)  # repeated against rounding errors
        if (length := float(np.linalg.norm(left))) > TELLS_APART * np.linalg.norm(column):
            told.append(at)
            basis = np.column_stack([basis, left / length])
    return told


def _robust(rows: Array, right: Array) -> tuple[Array, Array]:
    """Return (values [K], weights [N]) by iteratively reweighted least squares (Huber)."""
    weights = np.ones(len(rows))
    if not len(rows):
        return np.zeros(rows.shape[1]), weights
    for _ in range(ROUNDS):
        values = _nonnegative(rows, right, weights)
        left = np.abs(right - rows @ values)
        limit = max(HUBER * MAD_TO_DEVIATION * float(np.median(left)), EXACT * float(right.max()))
        now = np.minimum(1.0, limit / np.maximum(left, limit))
        if np.allclose(now, weights, atol=1e-6):
            break
        weights = now
    return values, weights


def _nonnegative(rows: Array, right: Array, weights: Array) -> Array:
    """Weighted least squares; removes causes with negative values, the worst first."""
    values = np.zeros(rows.shape[1])
    root = np.sqrt(weights)
    left = list(range(rows.shape[1]))
    while left:
        found, *_ = np.linalg.lstsq(rows[:, left] * root[:, None], right * root, rcond=None)
        if found.min() >= 0:
            values[left] = found
            break
        # Relative to the time that it explains, because causes have different units.
        worst = int(np.argmin(found * np.abs(rows[:, left]).mean(axis=0)))
        del left[worst]
    return values


def _errors(rows: Array, values: Array, weights: Array, left: Array) -> Array:
    """Standard errors of the values; 0 for values at their limit."""
    errors = np.zeros(len(values))
    free = np.flatnonzero(values)
    if len(rows) > len(free) > 0:
        used = rows[:, free]
        variance = float((weights * left**2).sum()) / (len(rows) - len(free))
        inverse = np.linalg.pinv((used * weights[:, None]).T @ used)
        errors[free] = np.sqrt(np.maximum(np.diag(inverse) * variance, 0.0))
    return errors
