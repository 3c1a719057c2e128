"""Splits and orders, for any rows."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.envs.text.data.examples import read_split
from tidemill.envs.text.data.schemas import read_demonstrations
from tidemill.envs.text.prompts import EpochOrder

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(str.strip)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=24, unique_by=lambda row: " ".join(row[0].split()))


def sides(rows: list[tuple[str, str]], fraction: float) -> tuple[set[str], set[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.jsonl"
        path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows), encoding="utf-8")
        read = read_split(read_demonstrations, path, None, fraction, section="data")
    train, held_out = ({row.messages[0].content for row in side} for side in (read.train, read.held_out))
    return train, held_out


@given(rows=ROWS, data=st.data(), fraction=st.floats(0.05, 0.95))
@settings(max_examples=40)
def test_reordered_and_repeated_rows_keep_their_split(
    rows: list[tuple[str, str]], data: st.DataObject, fraction: float
) -> None:
    moved = data.draw(st.permutations(rows + rows[:3]))
    assert sides(moved, fraction) == sides(rows, fraction)


@given(rows=ROWS, kept=st.integers(2, 24), fraction=st.floats(0.05, 0.95))
@settings(max_examples=40)
def test_appended_rows_move_at_most_the_row_that_filled_an_empty_split(
    rows: list[tuple[str, str]], kept: int, fraction: float
) -> None:
    before, after = sides(rows[:kept], fraction), sides(rows, fraction)
    # With one question alone on a side, it may be there only because no side may be empty.
    assert len(before[0] & after[1]) <= (len(before[0]) == 1)
    assert len(before[1] & after[0]) <= (len(before[1]) == 1)


@given(size=st.integers(1, 40), batch=st.integers(1, 12), seed=st.integers(0, 9), epochs=st.integers(1, 4))
def test_every_epoch_has_every_example_once(size: int, batch: int, seed: int, epochs: int) -> None:
    order = EpochOrder([f"id {number}" for number in range(size)], batch=batch, seed=seed)
    steps = -(-size * epochs // batch)
    taken = [place for step in range(1, steps + 1) for place in order.batch(step)][: size * epochs]
    assert Counter(taken) == Counter((epoch, index) for epoch in range(epochs) for index in range(size))
    if size >= 2 * batch:
        for step in range(1, steps + 1):
            assert len({index for _, index in order.batch(step)}) == batch
