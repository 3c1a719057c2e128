"""Splits and orders, for any rows."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.char_codec import CharCodec
from tidemill.config.task import DataConfig
from tidemill.core.records import unpack_tokens
from tidemill.data.examples import load_demonstrations
from tidemill.data.prompts import EpochOrder
from tidemill.data.row_split import MixedOrder

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6).filter(
    lambda text: text.strip() and "\t" not in text
)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=24, unique_by=lambda row: " ".join(row[0].split()))


def sides(rows: list[tuple[str, str]], fraction: float) -> tuple[set[str], set[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.jsonl"
        path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows), encoding="utf-8")
        config = DataConfig(path=path, held_out_fraction=fraction, end_token=False)
        read = load_demonstrations(config, codec=CharCodec(), context_limit=99, chat_template=False)
    train, held_out = (
        {CharCodec().decode(unpack_tokens(example.prompt_ids)) for example in side}
        for side in (read.train, read.held_out)
    )
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


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 9), min_size=4, max_size=4),
    batch=st.integers(1, 12),
    seed=st.integers(0, 9),
)
@settings(max_examples=40)
def test_sources_mix_in_proportion_and_each_repeats_only_after_an_epoch(
    sizes: list[int], weights: list[float], batch: int, seed: int
) -> None:
    sources = np.repeat(np.arange(len(sizes)), sizes)
    names = [f"row {row}" for row in range(len(sources))]
    weights = weights[: len(sizes)]
    order = MixedOrder(names, sources, weights, batch=batch, seed=seed)
    steps = [order.batch(step) for step in range(1, 60)]
    resumed = MixedOrder(names, sources, weights, batch=batch, seed=seed)
    assert resumed.batch(37) == steps[36]  # of any step, without the earlier ones
    taken = [place for step in steps for place in step]
    assert len(set(taken)) == len(taken)
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = [(epoch, row) for epoch, row in taken if sources[row] == source]
        assert abs(len(own) - len(taken) * weight / sum(weights)) < 4
        assert all(epoch == place // size for place, (epoch, _) in enumerate(own))
