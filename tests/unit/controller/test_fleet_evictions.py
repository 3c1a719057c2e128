"""Leases that end, with a notice and without: what is lost, what goes on elsewhere, and how it is counted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.fake_pool import PoolSession, ended, granted, noticed, trained
from tests.fake_samples import make_report
from tests.fake_session import small_spec
from tests.small_pool import pool, quiet
from tests.virtual_time import run_virtual
from tidemill.controller.waiting import Timeouts
from tidemill.controller.worker_state import DecodeRate, WorkerState
from tidemill.core.records import Lease
from tidemill.telemetry.fleet_figures import fleet_figures


def test_an_eviction_without_notice_moves_samples_with_what_was_accepted() -> None:
    session = pool(granted("a"), granted("b"), ended("a", 2.23), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    assert (eviction["worker"], eviction["noticed"], eviction["cause"]) == ("spot-a", False, "taken away")
    assert eviction["samples"] > 0
    gone_on = [fields for fields in session.telemetry.named("migration") if fields["worker"] == "spot-a"]
    assert all(fields["lease"] == "lease-a" for fields in gone_on)
    assert sum(fields["samples"] for fields in gone_on) == eviction["samples"]
    assert sum(fields["tokens_kept"] for fields in gone_on) == eviction["tokens_kept"] > 0
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-a"]
    assert end["evicted"]
    assert end["held_s"] == pytest.approx(2.23)
    assert end["cost_usd"] == pytest.approx(2.23 / 1000)  # 3.6 USD an hour


def test_what_an_eviction_loses_is_less_than_a_tick() -> None:
    times = [1.0 + 0.37 * at for at in range(12)]
    script = [line for at, t in enumerate(times) for line in (granted(f"w{at}", max(0.0, t - 1.1)), ended(f"w{at}", t))]
    session = pool(*script)

    run_virtual(session.run())

    assert trained(session) == quiet()
    evictions = session.telemetry.named("eviction")
    assert len(evictions) >= 8
    reported = {fields["lease"]: fields["tokens"] for fields in session.telemetry.named("lease_end")}
    for fields in evictions:
        lost = session.host.engines[fields["lease"]].generated - reported[fields["lease"]]
        assert 0 <= lost <= 6  # a tick makes two tokens in each of three slots


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("notice_s", [0.0, 0.8])
def test_ahead_of_training_evictions_change_nothing_when_publishes_wait(lag: int, notice_s: float) -> None:
    schedule = {"max_policy_lag": lag, "unfinished": "wait"}
    spec = small_spec(batch={"prompts": 6, "group_size": 3}, trainer={"steps": 5}, schedule=schedule)
    for offset in (0.0, 0.13, 0.31):
        times = [1.0 + offset + 0.67 * at for at in range(14)]
        script = [granted(f"w{at}", max(0.0, t - 2.5)) for at, t in enumerate(times)]
        script += [noticed(f"w{at}", t - notice_s, t) for at, t in enumerate(times) if notice_s]
        script += [ended(f"w{at}", t) for at, t in enumerate(times)]
        session = pool(*script, spec=spec)

        run_virtual(session.run())

        assert trained(session) == quiet(spec)
        assert len(session.telemetry.named("eviction")) >= 8
        assert len(session.telemetry.named("migration")) >= 8


def test_a_notice_loses_nothing() -> None:
    session = pool(granted("a"), granted("b"), noticed("a", 1.5, 3.0), ended("a", 3.0), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    (notice,) = session.telemetry.named("notice")
    assert notice["grace_s"] == pytest.approx(1.5)
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-a"]
    assert end["tokens"] == session.host.engines["lease-a"].generated
    (eviction,) = session.telemetry.named("eviction")
    assert (eviction["noticed"], eviction["samples"], eviction["tokens_lost"]) == (True, 0, 0)
    # What was handed back goes on elsewhere from every token the worker had made of it.
    made = session.host.engines["lease-a"].handed_back
    gone_on = [fields for fields in session.telemetry.named("migration") if fields["lease"] == "lease-a"]
    assert sum(fields["samples"] for fields in gone_on) == len(made) > 0
    assert sum(fields["tokens_kept"] for fields in gone_on) == sum(made.values()) > 0


def test_what_the_steps_say_of_the_fleet_adds_up_to_what_the_summary_says() -> None:
    names = [f"w{at}" for at in range(8)]
    script = [line for at, name in enumerate(names) for line in (granted(name, 0.9 * at), ended(name, 0.9 * at + 2.1))]
    warned = [noticed(name, 0.9 * at + 1.2, 0.9 * at + 2.1) for at, name in enumerate(names) if at % 2]
    session = pool(*script, *warned, granted("last"), seeding_worker=False)

    run_virtual(session.run())

    told = session.telemetry
    events = [{"event": name, "session": 1, "elapsed_s": 0.0, **fields} for name, fields in told.events]
    figures = fleet_figures(events, [], wall_s=1.0, tokens_trained=1.0, reserved_usd_per_hour=0.0)
    for key in ("migrations", "evictions", "tokens_lost"):
        assert sum(step.values[key] for step in told.steps) == figures[key] > 0
    asked = sum(fields["samples"] for fields in (*told.named("drain"), *told.named("rebalance")))
    assert figures["samples_kept"] <= figures["migrations"] <= asked + sum(f["samples"] for f in told.named("eviction"))


def test_an_eviction_during_an_evaluation_counts_in_the_next_line() -> None:
    session = pool(granted("a"), ended("a", 0.85), granted("b", 0.5), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    before = session.telemetry.events[: session.telemetry.events.index(first_evaluation(session))]
    assert [name for name, _ in before].count("eviction") == 1
    assert session.telemetry.steps[0].step == 0
    assert session.telemetry.steps[0].values["evictions"] == 1.0
    assert session.telemetry.steps[0].values["migrations"] > 0
    assert sum(step.values["evictions"] for step in session.telemetry.steps) == 1.0


def first_evaluation(session: PoolSession) -> tuple[str, dict[str, Any]]:
    return next(event for event in session.telemetry.events if event[0] == "evaluation")


def test_a_worker_taken_in_its_first_tick_loses_what_it_had_made_until_then() -> None:
    # The second one boots for 0.2 s, pulls for 0.3 s, swaps in 0.1 s, takes samples in 0.1 s; its first tick of 0.1 s,
    # of two tokens in each of three slots, would be told at 1.8 s.
    session = pool(granted("a"), granted("late", 1.0), ended("late", 1.78), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-late"]
    assert end["tokens"] == 0
    assert eviction["samples"] > 0
    assert 0 < eviction["tokens_lost"] <= 6


LEASE = Lease(lease_id="l", worker_id="w", kind="preemptible", price_usd_per_hour=0.0, start_s=0.0)


def test_what_a_silent_worker_may_have_lost_is_no_more_than_a_tick() -> None:
    status = make_report().status
    member = WorkerState(lease=LEASE, slots=3, heard_s=10.0, heard_tokens=40)
    member.busy_since_s, member.busy_samples = 12.0, 5
    usual = DecodeRate(tokens_per_s=20.0, tokens=2.0)

    def lost(now_s: float, pace: DecodeRate | None = usual) -> int:
        return member.tokens_since(now_s, usual=pace)

    # No tick told of yet: three slots at 20 tokens/s for 0.05 s; a tick is two tokens in each.
    assert (lost(12.05), lost(12.1), lost(60.0)) == (3, 6, 6)
    assert lost(60.0, None) == 0
    # Its own reports say more: 400 tokens/s since 10 s, and 40 in a tick.
    member.status = replace(status, running=3, tokens_per_s=400.0)
    assert (lost(10.05), lost(60.0)) == (20, 40)
    # It had reported its last tick, and was given nothing since.
    member.status, member.busy_since_s = replace(status, running=0), None
    assert lost(60.0) == 0


def test_a_worker_lost_while_it_joins_or_pulls_delays_nobody() -> None:
    session = pool(granted("a"), ended("a", 0.1), granted("b"), ended("b", 0.4), granted("c"))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.telemetry.named("eviction") == []
    assert len(session.telemetry.named("join_failed")) == 2
    joined = [fields["worker"] for fields in session.telemetry.named("join") if "error" not in fields]
    assert joined == ["spot-c"]


def test_a_lease_that_is_granted_twice_is_one() -> None:
    session = pool(granted("a"), granted("a", 0.3), ended("a", 2.0), granted("a", 3.0))
    run_virtual(session.run())

    assert trained(session) == quiet()
    assert len(session.telemetry.named("lease")) == len(session.telemetry.named("eviction")) == 1


def test_all_workers_gone_for_a_while() -> None:
    script = [granted("a"), granted("b"), ended("a", 1.5), ended("b", 1.5), granted("c", 60.0)]
    session = pool(*script, seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert len(session.telemetry.named("eviction")) == 2
    assert session.telemetry.named("waiting")[0]["awaited"].startswith("a worker to generate")


def test_an_outage_longer_than_a_workers_deadline_is_not_held_against_those_who_come_back() -> None:
    script = [granted("a"), ended("a", 1.5), granted("b", 500.0)]
    session = pool(*script, seeding_worker=False, timeouts=Timeouts(worker_s=50.0))

    run_virtual(session.run())

    assert trained(session) == quiet()
