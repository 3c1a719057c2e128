from __future__ import annotations

import asyncio

import pytest

from tests.lease_story import Story, listen, scheduled, whole_story
from tests.virtual_time import run_virtual
from tidemill.core.records import Lease, LeaseEnded, LeaseGranted, LeaseNoticed
from tidemill.pool.build_provider import static_timetable
from tidemill.pool.provider import BackOff, Change


def up(time_s: float, place: int = 0) -> Change:
    return Change(time_s=time_s, place=place, to="up")


def down(time_s: float, place: int = 0) -> Change:
    return Change(time_s=time_s, place=place, to="down")


def noticed(time_s: float, deadline_s: float, place: int = 0) -> Change:
    return Change(time_s=time_s, place=place, to="noticed", deadline_s=deadline_s)


def lease(lease_id: str, place: int, start_s: float) -> LeaseGranted:
    return LeaseGranted(
        lease=Lease(
            lease_id=lease_id, worker_id=f"spot-{place}", kind="preemptible", price_usd_per_hour=2.0, start_s=start_s
        )
    )


def test_a_timetable_becomes_leases() -> None:
    changes = [up(1.0), up(2.0, 1), noticed(5.0, 7.0), down(7.0), down(8.0, 1), up(9.0)]
    assert whole_story(iter(changes), until_s=20.0, session=4).told == [
        (1.0, lease("lease-4-1", 0, 1.0)),
        (2.0, lease("lease-4-2", 1, 2.0)),
        (5.0, LeaseNoticed(lease_id="lease-4-1", deadline_s=7.0, cause="the provider will take the machine")),
        (7.0, LeaseEnded(lease_id="lease-4-1", cause="the provider took the machine after notice")),
        (8.0, LeaseEnded(lease_id="lease-4-2", cause="the provider took the machine without notice")),
        (9.0, lease("lease-4-3", 0, 9.0)),
    ]


def test_another_session_uses_other_lease_ids() -> None:
    first, second = (whole_story(static_timetable(3), until_s=1.0, session=session) for session in (1, 2))
    assert not set(first.held) & set(second.held)
    assert list(first.held.values()) == list(second.held.values())


def test_the_timetable_starts_with_its_provider() -> None:
    async def run() -> Story:
        await asyncio.sleep(100.0)
        return await listen(scheduled(iter([up(1.0), noticed(2.0, 3.0), down(3.0)])), Story(), until_s=200.0)

    story = run_virtual(run())
    assert story.granted == [(101.0, "spot-0")]
    assert [event.deadline_s for _, event in story.noticed] == [103.0]


def test_next_event_has_a_deadline() -> None:
    async def run() -> None:
        provider = scheduled(iter([up(5.0)]))
        assert await provider.next_event(2.0) is None
        assert asyncio.get_running_loop().time() == 2.0
        assert await provider.next_event(0.0) is None
        assert await provider.next_event(4.0) is not None
        assert asyncio.get_running_loop().time() == 5.0

    run_virtual(run())


def test_want_wakes_next_event() -> None:
    async def run() -> None:
        provider = scheduled(static_timetable(1))
        provider.request_workers(0)
        waiting = asyncio.create_task(provider.next_event(100.0))
        await asyncio.sleep(3.0)
        provider.request_workers(1)
        assert await waiting == lease("lease-1-1", 0, 3.0)

    run_virtual(run())


def test_a_machine_that_came_and_went_is_not_granted() -> None:
    async def run() -> Story:
        provider = scheduled(iter([up(1.0), down(2.0), up(3.0, 1), up(4.0)]))
        await asyncio.sleep(10.0)
        return await listen(provider, Story(), until_s=11.0)

    assert run_virtual(run()).granted == [(10.0, "spot-0"), (10.0, "spot-1")]


async def give_back_all(story: Story, *, until_s: float, after_s: float, back_off: BackOff) -> None:
    """Every lease is given back `after_s` seconds after it was granted."""
    provider, loop = scheduled(static_timetable(1), back_off=back_off), asyncio.get_running_loop()
    while loop.time() < until_s:
        event = await provider.next_event(until_s - loop.time())
        if event is not None:
            story.hear(loop.time(), event)
            await asyncio.sleep(after_s)
            for lease_id in list(story.held):
                await provider.release(lease_id)
                del story.held[lease_id]


def test_back_off_after_failures() -> None:
    story = Story()
    run_virtual(give_back_all(story, until_s=60.0, after_s=0.0, back_off=BackOff(first_s=1.0, longest_s=8.0)))
    # waits of 1, 2, 4, then 8 s for ever
    assert [time_s for time_s, _ in story.granted] == pytest.approx([0, 1, 3, 7, 15, 23, 31, 39, 47, 55])


def test_a_long_lease_resets_the_back_off() -> None:
    story = Story()
    run_virtual(give_back_all(story, until_s=350.0, after_s=99.0, back_off=BackOff(first_s=1.0, settled_s=60.0)))
    assert [time_s for time_s, _ in story.granted] == pytest.approx([0, 100, 200, 300])


def test_the_back_off_is_bounded() -> None:
    assert BackOff(first_s=1.0, longest_s=60.0).after(10_000) == 60.0


def test_a_free_machine_replaces_a_released_one() -> None:
    async def run() -> None:
        provider, story = scheduled(static_timetable(2)), Story()
        provider.request_workers(1)
        await listen(provider, story, until_s=1.0)
        await provider.release("lease-1-1")
        story.held.clear()
        await listen(provider, story, until_s=9.0)
        assert story.granted == [(0.0, "spot-0"), (1.0, "spot-1")]

    run_virtual(run())


def test_a_free_machine_replaces_an_evicted_one() -> None:
    story = whole_story(iter([up(0.0), up(0.0, 1), down(5.0), up(6.0), down(8.0, 1)]), until_s=20.0, want=1)
    assert story.granted == [(0.0, "spot-0"), (5.0, "spot-1"), (8.0, "spot-0")]


def test_leases_never_exceed_the_limit() -> None:
    async def run() -> None:
        provider, story = scheduled(iter([up(0.0), up(0.0, 1), up(0.0, 2), down(5.0, 1)]), most=2), Story()
        await listen(provider, story, until_s=1.0)
        assert story.granted == [(0.0, "spot-0"), (0.0, "spot-1")]
        provider.request_workers(9)
        await listen(provider, story, until_s=20.0)
        assert story.granted[2:] == [(5.0, "spot-2")]  # in the place of the one that went

    run_virtual(run())


def test_a_released_machine_with_a_notice_is_not_leased_again() -> None:
    async def run() -> None:
        provider, story = scheduled(iter([up(0.0), noticed(5.0, 50.0), down(50.0), up(60.0)])), Story()
        await listen(provider, story, until_s=6.0)
        await provider.release("lease-1-1")
        story.held.clear()
        await listen(provider, story, until_s=100.0)
        assert story.granted == [(0.0, "spot-0"), (60.0, "spot-0")]
        assert story.ended == []  # it had ended by being given back

    run_virtual(run())


def test_a_machine_with_a_notice_is_not_leased() -> None:
    async def run() -> None:
        provider, story = scheduled(iter([up(0.0), noticed(5.0, 50.0), down(50.0)])), Story()
        provider.request_workers(0)
        await listen(provider, story, until_s=6.0)
        provider.request_workers(1)
        await listen(provider, story, until_s=100.0)
        assert story.told == []

    run_virtual(run())


def test_no_event_names_a_released_lease() -> None:
    async def run() -> None:
        provider, story = scheduled(iter([up(0.0), up(0.0, 1), down(5.0), down(5.0, 1)])), Story()
        await listen(provider, story, until_s=1.0)
        await asyncio.sleep(4.5)
        assert isinstance(await provider.next_event(0.0), LeaseEnded)  # of the first; the second's is waiting
        await provider.release("lease-1-2")
        assert await provider.next_event(10.0) is None

    run_virtual(run())


def test_releasing_an_unknown_lease_does_nothing() -> None:
    async def run() -> None:
        provider, story = scheduled(static_timetable(1)), Story()
        await listen(provider, story, until_s=1.0)
        await provider.release("lease-0-1")
        await provider.release("lease-1-1")
        await provider.release("lease-1-1")
        assert await provider.next_event(0.9) is None  # one failure, not two
        assert await provider.next_event(0.2) is not None

    run_virtual(run())


def test_no_events_after_close() -> None:
    async def run() -> None:
        provider = scheduled(iter([up(0.0), up(0.0, 1), down(5.0), up(6.0)]))
        assert await provider.next_event(1.0) is not None
        await provider.close()
        assert await provider.next_event(30.0) is None
        assert asyncio.get_running_loop().time() == 30.0

    run_virtual(run())


def test_an_avoided_machine_is_leased_again_after_its_time_even_if_it_came_back() -> None:
    async def run() -> Story:
        provider = scheduled(iter([up(0.0), up(0.0, 1), down(20.0), up(21.0)]), back_off=BackOff(first_s=1.0))
        story = await listen(provider, Story(), until_s=10.0)
        provider.avoid("spot-0", 40.0)
        await provider.release("lease-1-1")
        del story.held["lease-1-1"]
        return await listen(provider, story, until_s=100.0)

    assert run_virtual(run()).granted == [(0.0, "spot-0"), (0.0, "spot-1"), (50.0, "spot-0")]
