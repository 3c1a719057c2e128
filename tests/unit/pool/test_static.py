from __future__ import annotations

from tests.lease_story import Story, listen, scheduled, whole_story
from tests.virtual_time import run_virtual
from tidemill.pool.build_provider import static_timetable


def test_all_workers_are_granted_at_once() -> None:
    story = whole_story(static_timetable(3), until_s=1e6)
    assert story.granted == [(0.0, "spot-0"), (0.0, "spot-1"), (0.0, "spot-2")]
    assert story.ended == []


def test_no_workers() -> None:
    assert whole_story(static_timetable(0), until_s=10.0).told == []


def test_want_limits_new_leases_only() -> None:
    async def run() -> None:
        provider, story = scheduled(static_timetable(3)), Story()
        provider.request_workers(1)
        await listen(provider, story, until_s=5.0)
        assert story.granted == [(0.0, "spot-0")]
        provider.request_workers(9)
        await listen(provider, story, until_s=10.0)
        assert story.granted[1:] == [(5.0, "spot-1"), (5.0, "spot-2")]
        provider.request_workers(0)
        await listen(provider, story, until_s=20.0)
        assert len(story.held) == 3  # they leave when they are given back
        for lease_id in story.held:
            await provider.release(lease_id)
        await listen(provider, story, until_s=1000.0)
        assert len(story.granted) == 3

    run_virtual(run())
