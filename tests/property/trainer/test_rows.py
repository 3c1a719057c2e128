"""Rows, trained positions and targets of 10,000 random trajectories against a walk over single tokens."""

from __future__ import annotations

import numpy as np

from tests.trajectories import Part, agent_trajectory
from tidemill.core.records import Trajectory, unpack_tokens
from tidemill.models.token_tree import build_tree
from tidemill.trainer.packing import rows_of, trained_positions

TRAJECTORIES = 10_000
Prediction = tuple[tuple[int, ...], int, int]
"""Everything that the model sees before a token, the token, and its completion position."""


def random_trajectory(rng: np.random.Generator) -> Trajectory:
    """Up to 9 segments of 1 to 4 tokens from an alphabet of 5, so that rows often share prefixes. Half of the
    contexts are the start of the previous one."""

    def words() -> list[int]:
        return [int(each) for each in rng.integers(1, 6, rng.integers(1, 5))]

    prompt = words()
    parts: list[Part] = []
    seen = list(prompt)
    for _ in range(rng.integers(0, 10)):
        role = ("action", "action", "observation", "context")[rng.integers(4)]
        ids = words()
        if role == "context" and rng.random() < 0.5:
            ids = seen[: rng.integers(1, len(seen) + 1)]
        seen = list(ids) if role == "context" else [*seen, *ids]
        parts.append((role, ids))  # type: ignore[arg-type]
    return agent_trajectory(prompt, parts, [0.0] * len(parts))


def walked(t: Trajectory) -> list[Prediction]:
    """What an engine computed: each generated token after the context that it was generated in."""
    context: list[int] = []
    found, ids, roles = [], unpack_tokens(t.token_ids), [s.role for s in t.segments for _ in range(s.start, s.end)]
    starts = {segment.start for segment in t.segments if segment.role == "context"}
    for place, (token, role) in enumerate(zip(ids, roles, strict=True)):
        if place in starts:
            context = []
        if role == "action":
            found.append((tuple(context), token, place - t.prompt_length))
        context.append(token)
    return found


def test_rows_and_targets_are_those_of_the_engine() -> None:
    rng = np.random.default_rng(0)
    tokens = branched = repeated = 0
    for _ in range(TRAJECTORIES):
        t = random_trajectory(rng)
        rows, expected = rows_of(t), walked(t)
        found = [(tuple(row.token_ids[:at].tolist()), int(row.token_ids[at])) for row in rows for at in row.trained]
        assert found == [(context, token) for context, token, _ in expected]
        assert trained_positions(t).tolist() == [position for *_, position in expected]
        assert all(row.trained[-1] == len(row.token_ids) - 1 for row in rows)
        tree = build_tree([row.token_ids[:-1] for row in rows])
        nodes = [path[at - 1] for path, row in zip(tree.paths, rows, strict=True) for at in row.trained]
        # equal contexts have one node, different contexts have different nodes
        assert len(set(zip(nodes, [context for context, *_ in expected], strict=True))) == len(set(nodes))
        assert len(set(nodes)) == len({context for context, *_ in expected})
        tokens += len(found)
        branched += len(rows) > 1
        repeated += len(set(nodes)) < len(nodes)
    assert tokens > 50_000
    assert branched > 2_500
    assert repeated > 300
