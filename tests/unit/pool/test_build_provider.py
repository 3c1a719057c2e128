from __future__ import annotations

from pathlib import Path

import pytest

from tests.lease_story import Story, listen
from tests.virtual_time import run_virtual
from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import LeaseGranted
from tidemill.pool.build_provider import ScheduledPool, build_provider, trace_outlasted, trace_remarks


def story_of(pool: ScheduledPool, until_s: float) -> Story:
    async def run() -> Story:
        provider = build_provider(pool, price_usd_per_hour=1.5, clock=LoopClock(), session=3)
        story = await listen(provider, Story(), until_s)
        await provider.close()
        return story

    return run_virtual(run())


def test_a_static_pool() -> None:
    story = story_of(StaticPool(workers=2), until_s=100.0)
    assert next(event.lease for _, event in story.told if isinstance(event, LeaseGranted)).price_usd_per_hour == 1.5
    assert list(story.held) == ["lease-3-1", "lease-3-2"]


def test_a_trace_pool_with_everything_set(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,0\n10,9\n30,1\n40,1\n")
    pool = TracePool(kind="trace", path=tmp_path / "t.csv", start_s=5.0, max_workers=2, notice_s=4.0, seed=1)
    story = story_of(pool, until_s=100.0)
    # Two of nine machines are taken; both go when eight do, and the ninth is taken instead.
    assert story.granted == [(5.0, "spot-0"), (5.0, "spot-1"), (25.0, "spot-5")]
    assert [(time_s, event.deadline_s) for time_s, event in story.noticed] == [(21.0, 25.0), (21.0, 25.0)]
    assert [time_s for time_s, _ in story.ended] == [25.0, 25.0]


def test_a_trace_that_is_played_faster(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,1\n100,1\n160,0\n220,1\n400,1\n")
    pool = TracePool(kind="trace", path=tmp_path / "t.csv", start_s=100.0, speed=60.0, notice_s=0.5)
    story = story_of(pool, until_s=10.0)
    # (160 - 100) / 60 = 1 s until the eviction, (220 - 100) / 60 = 2 s until the next machine; notices stay.
    assert story.granted == [(0.0, "spot-0"), (2.0, "spot-0")]
    assert [(time_s, event.deadline_s) for time_s, event in story.noticed] == [(0.5, 1.0)]
    assert [time_s for time_s, _ in story.ended] == [1.0]
    (note,) = trace_remarks(pool)
    assert "spans 5 s from second 100" in note


def test_a_synthetic_pool() -> None:
    pool = SyntheticPool(kind="synthetic", workers=3, notice_s=1.0, noticed=0.5, seed=2)
    story = story_of(pool, until_s=500.0)
    assert len(story.ended) > 10
    assert story.told == story_of(pool, until_s=500.0).told


def test_a_missing_trace_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        story_of(TracePool(kind="trace", path=tmp_path / "none.csv"), until_s=1.0)
    assert caught.value.exit_code == 2
    assert (caught.value.where, caught.value.hint) == (f"{tmp_path}/none.csv", "check pool.path")


def test_a_huge_count_is_cheap(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,99999999999\n100,1\n200,99999999999\n")
    story = story_of(TracePool(kind="trace", path=tmp_path / "t.csv", max_workers=3), until_s=250.0)
    assert [time_s for time_s, _ in story.granted][:3] == [0.0] * 3
    assert [time_s for time_s, _ in story.ended] == [100.0] * len(story.ended)
    assert len(story.ended) >= 2
    assert len(story.held) == 3


def test_an_initial_gap_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,2\n100,0\n21700,1\n30000,1\n")

    def notes(**changes: float) -> list[str]:
        return trace_remarks(TracePool.model_validate({"kind": "trace", "path": path, **changes}))[1:]

    assert notes() == []  # two machines from the start
    first = "the first appears at pool.start_s = 21700"
    assert notes(start_s=100.0) == [f"no machine for the first 6 h; {first}"]
    assert notes(start_s=100.0, speed=100.0) == [f"no machine for the first 3.6 min; {first}"]
    assert notes(start_s=21685.0) == []  # 15 s
    path.write_text("0,2\n100,0\n200,0\n")
    (note,) = notes(start_s=150.0)
    assert "no machine after second 150" in note
    assert trace_remarks(StaticPool(workers=2)) == []


def test_a_trace_is_described_by_span_and_mean(tmp_path: Path) -> None:
    # 2 machines for 100 s and 1 for 300 s: 500 machine-seconds in 400 s.
    path = tmp_path / "t.csv"
    path.write_text("0,2\n100,1\n400,1\n")
    pool = TracePool(kind="trace", path=path)
    assert trace_remarks(pool) == [f"{path} spans 6.67 min from second 0: 1.25 machines on average, 2 at most"]
    assert trace_remarks(pool.model_copy(update={"start_s": 100.0})) == [
        f"{path} spans 5 min from second 100: 1 machines on average, 1 at most"
    ]


def test_a_run_that_outlasts_its_trace_gets_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "hours.csv"
    path.write_text("0,2\n44,5\n89,3\n")  # meant as hours
    pool = TracePool(kind="trace", path=path)
    assert trace_outlasted(pool, 89.0) == []
    (warning,) = trace_outlasted(pool, 7200.0)
    assert all(part in warning for part in (str(path), "1.48 min", "3 machines", "the run takes 2 h"))
    assert trace_outlasted(StaticPool(workers=2), 7200.0) == []


@pytest.mark.parametrize(("until_s", "warnings"), [(80.0, 0), (200.0, 1)])
def test_the_provider_warns_once_when_its_trace_ends(until_s: float, warnings: int, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0,2\n44,5\n89,3\n")
    said: list[str] = []

    async def live() -> None:
        clock = LoopClock()
        pool = TracePool(kind="trace", path=path)
        provider = build_provider(pool, price_usd_per_hour=0.0, clock=clock, session=1, warn=said.append)
        while clock.now() < until_s:
            await provider.next_event(timeout_s=10.0)

    run_virtual(live())
    assert len(said) == warnings


def test_a_start_beyond_the_end_of_the_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,1\n100,2\n")
    with pytest.raises(UserError, match=r"100 lies beyond the end of .* which is 100 s long"):
        story_of(TracePool(kind="trace", path=tmp_path / "t.csv", start_s=100.0), until_s=1.0)
