"""The one table of all that the simulator is held against, from result files written here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator import __main__ as table


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path


def write(folder: Path, module: str, result: dict[str, Any]) -> None:
    (folder / f"{table.PARTS[module].result}.json").write_text(json.dumps(result))


def test_only_requested_published_figures_are_shown(results: Path) -> None:
    fitted = {"figure": "colocated", "published": 1.0, "simulated": 1.0, "asked": "", "reached": None, "error": None}
    missed = {**fitted, "figure": "memory", "published": 0.06, "simulated": 0.003, "asked": "near", "reached": False}
    write(results, "published", {"lines": [fitted, missed]})

    assert [*table.rows_of("published", kept=True)] == [table.Row("memory", "0.06, near", "0.00", reached=False)]


def test_a_defect_that_no_seed_finds_is_a_miss(results: Path) -> None:
    write(results, "planted_defects", {"most_seeds": 1000, "defects": {"a": {"seeds": 194}, "b": {"seeds": 0}}})

    (row,) = table.rows_of("planted_defects", kept=True)
    assert (row.asked, row.found, row.reached) == ("2 within 1,000 seeds", "1 within 194", False)


def test_a_result_that_cannot_be_read_is_a_miss(results: Path) -> None:
    write(results, "published", {"lines": [{"figure": "of an older form"}]})

    assert [row.reached for row in table.rows_of("published", kept=True)] == [False]


def test_violations_and_slow_seeds_are_misses(results: Path) -> None:
    write(results, "faults", {"seeds": 10_000, "violated": [7], "target_s": 0.3, "cpu_s_mean": 0.31})

    assert [(row.found, row.reached) for row in table.rows_of("faults", kept=True)] == [
        ("1", False),
        ("0.310 s", False),
    ]


def test_a_part_that_wrote_no_result_this_time_is_a_miss(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.PARTS, "scale", table.PARTS["scale"]._replace(measure=lambda: 0))
    write(results, "scale", {"target_s": 180.0, "cpu_s": 148.4, "reached": True})
    os.utime(results / "simulator_scale.json", (0, 0))  # long ago

    assert [row.reached for row in table.rows_of("scale", kept=True)] == [True]
    assert [row.reached for row in table.rows_of("scale", kept=False)] == [False]
    assert [row.reached for row in table.rows_of("ours", kept=True)] == [False]  # and nothing was there


def test_a_part_that_fails_after_its_result_is_a_miss(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        write(results, "scale", {"target_s": 180.0, "cpu_s": 148.4, "reached": True})
        raise RuntimeError("out of memory")

    monkeypatch.setitem(table.PARTS, "scale", table.PARTS["scale"]._replace(measure=fails))

    (row,) = table.rows_of("scale", kept=False)
    assert (row.reached, row.found) == (False, "RuntimeError('out of memory')")
