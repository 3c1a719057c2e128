from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import UserError
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import write_samples
from tidemill.telemetry.sample_index import COLUMNS, SampleIndex, SamplePage, SampleQuery, SampleRow


def line(step: int, prompt: str, index: int, reward: float, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "purpose": "train",
        "prompt_id": prompt,
        "index": index,
        "prompt": f"{prompt} {step}",
        "completion": f"Straße {reward}",
        "token_ids": [7] * (index + 1),
        "reward": reward,
        "valid": True,
        "finish": "stop",
        "versions": [[step - 1, "d", 0, 1]],
        "sources": [["vllm/spot-1", "l-1", step - 1, 0, index + 1]],
        **fields,
    }


def write_step(run: RunDirectory, step: int, *, bonus: float = 0.0, purpose: str = "train") -> None:
    """Two groups of two; the second one has equal rewards."""
    lines = [line(step, prompt, index, reward + bonus) for prompt, index, reward in ROWS]
    write_samples(run.samples / samples_name(step, purpose), [{**each, "purpose": purpose} for each in lines])


ROWS = [("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 0.5), ("b", 1, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three steps, and an evaluation."""
    run = RunDirectory(tmp_path / "run")
    run.samples.mkdir(parents=True)
    for step in (1, 2, 3):
        write_step(run, step)
    write_step(run, 2, purpose="eval:held_out")
    return run


def index_of(run: RunDirectory) -> SampleIndex:
    index = SampleIndex(run)
    index.refresh()
    return index


def found(index: SampleIndex, **query: Any) -> list[tuple[int, str, int, float | None]]:
    page = index.query(SampleQuery(**{"purpose": "all", **query}))
    return sorted((row.step, row.prompt_id, row.index, row.reward) for row in page.rows)


def everything(run: RunDirectory) -> list[tuple[int, str, int, float | None]]:
    """The samples in the files."""
    lines = [json.loads(text) for _, _, path in run.sample_files() for text in path.read_text().splitlines()]
    return sorted((each["step"], each["prompt_id"], each["index"], each["reward"]) for each in lines)


def forget_index(run: RunDirectory) -> None:
    (run.samples_index).unlink()


def kill_before_index_line(run: RunDirectory) -> None:
    path = run.samples_index
    write_step(run, 4)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def kill_in_index_line(run: RunDirectory) -> None:
    path = run.samples_index
    write_step(run, 4)
    path.write_bytes(path.read_bytes()[:-20])


def rewind(run: RunDirectory) -> None:
    run.rewind(1)
    write_step(run, 2, bonus=5.0)


def roll_back(run: RunDirectory) -> None:
    aside = run.path / "abandoned" / "1" / "samples"
    aside.mkdir(parents=True)
    (run.samples / samples_name(3)).replace(aside / samples_name(3))
    run.rewind(2)


def damage_index(run: RunDirectory) -> None:
    (run.samples_index).write_text('{"file":"step_000001.jsonl","step":1,"purpose":"","rows":[[0]]}\n[]\n?\n')


def damage_samples(run: RunDirectory) -> None:
    path = run.samples / samples_name(2)
    path.write_bytes(b"garbage\n" + path.read_bytes().splitlines(keepends=True)[1])


CHANGES: list[Callable[[RunDirectory], None]] = [
    lambda run: None,
    lambda run: write_step(run, 4),
    lambda run: write_step(run, 3, bonus=5.0),
    lambda run: run.clear(),
    forget_index,
    kill_before_index_line,
    kill_in_index_line,
    rewind,
    roll_back,
    damage_index,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_has_the_samples_of_the_files(run: RunDirectory, change: Callable[[RunDirectory], None]) -> None:
    run.checkpoints.mkdir()
    earlier = index_of(run)
    change(run)
    earlier.refresh()
    assert found(earlier) == found(index_of(run)) == everything(run)
    assert not earlier.refresh()
    for row in earlier.query(SampleQuery()).rows:
        assert earlier.read(row).reward == row.reward


def test_unreadable_lines_are_skipped_and_the_others_keep_their_places(run: RunDirectory) -> None:
    damage_samples(run)
    index = index_of(run)
    assert found(index, step_min=2, step_max=2, purpose="train") == [(2, "a", 1, 1.0)]
    assert index.group(2, "a")[0].completion == "Straße 1.0"


def test_runs_without_the_new_keys_are_indexed(run: RunDirectory) -> None:
    old = {"step": 1, "prompt": "p", "completion": "c", "reward": 0.5, "valid": True}
    (run.samples / samples_name(1)).write_text(json.dumps(old) + "\n")
    (row,) = index_of(run).query(SampleQuery(step_max=1)).rows
    assert (row.reward, row.advantage, row.workers, row.oldest, row.signal) == (0.5, None, (), -1, True)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"step_min": 2, "step_max": 2, "purpose": "train"}, [(2, *row) for row in ROWS]),
        ({"reward_min": 0.5, "reward_max": 0.9, "step_max": 1}, [(1, "b", 0, 0.5), (1, "b", 1, 0.5)]),
        ({"tokens_min": 2, "step_max": 1}, [(1, "a", 1, 1.0), (1, "b", 1, 0.5)]),
        ({"tokens_max": 1, "step_max": 1}, [(1, "a", 0, 0.0), (1, "b", 0, 0.5)]),
        ({"no_signal": True, "step_max": 1}, [(1, "b", 0, 0.5), (1, "b", 1, 0.5)]),
        ({"purpose": "eval:held_out", "no_signal": True}, []),  # only training needs a signal
        ({"truncated": True}, [(9, "c", 0, 0.25)]),
        ({"invalid": True}, [(9, "c", 1, None)]),
        ({"detailed": True}, [(9, "c", 0, 0.25)]),
        ({"worker": "spot-9"}, [(9, "c", 0, 0.25)]),
        ({"worker": "vllm/spot-9"}, [(9, "c", 0, 0.25)]),
        ({"worker": "spot"}, []),
        ({"version": 6}, [(9, "c", 0, 0.25)]),
        ({"text": "STRASSE 1", "step_max": 1}, [(1, "a", 1, 1.0)]),
        ({"text": 'a "quoted"\nline'}, [(9, "c", 0, 0.25)]),
        ({"text": "raised"}, [(9, "c", 1, None)]),
        ({"step_min": 10**30}, []),
    ],
)
def test_filters(run: RunDirectory, query: dict[str, Any], expected: list[tuple[int, str, int, float | None]]) -> None:
    special = line(
        9, "c", 0, 0.25, finish="length", entropies=[1.0], completion='A "quoted"\nline',
        sources=[["vllm/spot-9", "l", 5, 0, 1], ["vllm/spot-1", "l", 7, 1, 2]],
        versions=[[5, "d", 0, 1], [7, "e", 1, 2]],
    )  # fmt: skip
    invalid = line(9, "c", 1, 0.0, valid=False, reason="it raised")
    write_samples(run.samples / samples_name(9), [special, invalid])
    assert found(index_of(run), **query) == sorted(expected)


def test_a_sample_takes_at_most_100_bytes() -> None:
    assert COLUMNS.itemsize <= 100


def test_sorting_and_pages(run: RunDirectory) -> None:
    index = index_of(run)
    rewards = [row.reward for row in index.query(SampleQuery(sort="reward", ascending=True)).rows]
    assert rewards == [0.0] * 3 + [0.5] * 6 + [1.0] * 3
    assert [row.step for row in index.query(SampleQuery()).rows] == [3] * 4 + [2] * 4 + [1] * 4
    write_samples(run.samples / samples_name(4), [line(4, f"p{at}", 0, float(at)) for at in range(120)])
    index.refresh()
    query = SampleQuery(step_min=4, sort="reward", page=3)
    page = index.query(query)
    assert (page.matches, page.pages, [row.reward for row in page.rows]) == (
        120,
        3,
        [float(at) for at in range(19, -1, -1)],
    )
    assert index.query(SampleQuery(page=10**12)).page == 3  # 132 samples


def test_a_search_out_of_time_says_how_far_it_got_and_goes_on(run: RunDirectory) -> None:
    now = iter(range(1000))
    index = SampleIndex(run, clock=lambda: float(next(now)))
    index.refresh()
    query, rounds = SampleQuery(text="straße 1"), list[SamplePage]()
    while not rounds or rounds[-1].unsearched:
        rounds.append(index.query(query, limit_s=4.5))
    assert (rounds[0].matches, rounds[0].unsearched, rounds[0].searched_to) == (1, 8, 3)
    assert (rounds[-1].matches, rounds[-1].searched_to) == (3, 1)
    left = [page.unsearched for page in rounds]
    assert left == sorted(set(left), reverse=True), "each request searches on"
    write_step(run, 4)
    index.refresh()
    assert index.query(query, limit_s=4.5).matches == 4, "the new file comes first"


def test_bars_of_the_histogram_are_shares_of_all_rewards(run: RunDirectory) -> None:
    bins = index_of(run).histogram(SampleQuery(reward_min=0.5))
    assert bins.values == (0.0, 0.5, 1.0)
    assert bins.first == (0.25, 0.5, 0.25) and bins.last == (0.0, 0.5, 0.25)
    shutil.rmtree(run.samples)
    assert index_of(run).histogram(SampleQuery()).first == (0.0,)


def test_a_sample_that_a_rewind_deleted_is_gone(run: RunDirectory) -> None:
    index = index_of(run)
    row: SampleRow = index.query(SampleQuery(step_min=3)).rows[0]
    run.rewind(2)
    with pytest.raises(UserError, match="not in the run any more"):
        index.read(row)


def test_the_parameters_of_a_url() -> None:
    query = SampleQuery(reward_min=0.1, truncated=True, text="a&b=c", version=0, purpose="all")
    given = {"reward_min": "0.1", "truncated": "1", "text": "a&b=c", "version": "0", "purpose": "all", "sort": "?"}
    assert SampleQuery.of_url({**given, "sort": "step"}) == query
    assert query.url() == "purpose=all&reward_min=0.1&truncated=1&version=0&text=a%26b%3Dc"
    wrong = {
        "step_min": "x",
        "reward_max": "nan",
        "reward_min": "1e999",
        "page": "",
        "truncated": "maybe",
        "other": "1",
    }
    assert SampleQuery.of_url(wrong) == SampleQuery()
