"""Evictions with and without notice: lost tokens, migrated samples, and their counts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.doubles.samples import make_report
from tests.doubles.session import PoolSession, ended, granted, noticed, small_spec, trained
from tests.small_pool import pool, quiet
from tests.virtual_time import run_virtual
from tidemill.controller.waiting import Timeouts
from tidemill.controller.worker_state import DecodeRate, WorkerState
from tidemill.core.records import Lease
from tidemill.telemetry.fleet_figures import fleet_figures


def test_an_eviction_without_notice_moves_samples_with_their_accepted_tokens() -> None:
    session = pool(granted("a"), granted("b"), ended("a", 2.23), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    assert (eviction["worker"], eviction["noticed"], eviction["cause"]) == ("spot-a", False, "evicted")
    assert eviction["samples"] > 0
    gone_on = [fields for fields in session.telemetry.named("migration") if fields["worker"] == "spot-a"]
    assert all(fields["lease"] == "lease-a" for fields in gone_on)
    assert sum(fields["samples"] for fields in gone_on) == eviction["samples"]
    assert sum(fields["tokens_kept"] for fields in gone_on) == eviction["tokens_kept"] > 0
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-a"]
    assert end["evicted"]
    assert end["held_s"] == pytest.approx(2.23)
    assert end["cost_usd"] == pytest.approx(2.23 / 1000)  # 3.6 USD an hour


def test_an_eviction_loses_less_than_one_report_interval() -> None:
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
        assert 0 <= lost <= 6  # a tick generates two tokens in each of three slots


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("notice_s", [0.0, 0.8])
def test_with_unfinished_wait_evictions_do_not_change_the_result(lag: int, notice_s: float) -> None:
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
    # Samples handed back continue with all tokens that the worker generated.
    made = session.host.engines["lease-a"].handed_back
    gone_on = [fields for fields in session.telemetry.named("migration") if fields["lease"] == "lease-a"]
    assert sum(fields["samples"] for fields in gone_on) == len(made) > 0
    assert sum(fields["tokens_kept"] for fields in gone_on) == sum(made.values()) > 0


@pytest.mark.parametrize(("ends_s", "interrupted"), [(None, 2), (3.05, 0)])
def test_a_worker_whose_end_is_known_gets_no_sample_that_outlasts_it(ends_s: float | None, interrupted: int) -> None:
    spec = small_spec(batch={"prompts": 1, "group_size": 3}, trainer={"steps": 4})  # the other has three slots
    session = pool(granted("a", ends_s=ends_s), granted("b"), ended("a", 3.05), spec=spec, seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet(spec)
    (eviction,) = session.telemetry.named("eviction")
    assert eviction["samples"] == interrupted


def test_fleet_metrics_of_all_steps_add_up_to_the_summary() -> None:
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


def test_an_eviction_during_an_evaluation_counts_in_the_next_metrics_line() -> None:
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


def test_an_eviction_before_the_first_report_loses_the_estimated_tokens() -> None:
    # The second one boots for 0.2 s, pulls for 0.3 s, swaps in 0.1 s, takes samples in 0.1 s; its first tick of 0.1 s,
    # of two tokens in each of three slots, would be reported at 1.8 s.
    session = pool(granted("a"), granted("late", 1.0), ended("late", 1.78), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-late"]
    assert end["tokens"] == 0
    assert eviction["samples"] > 0
    assert 0 < eviction["tokens_lost"] <= 6


LEASE = Lease(lease_id="l", worker_id="w", kind="preemptible", price_usd_per_hour=0.0, start_s=0.0)


def test_the_estimate_of_lost_tokens_is_at_most_one_report_interval() -> None:
    status = make_report().status
    member = WorkerState(lease=LEASE, slots=3, reported_s=10.0, reported_tokens=40)
    member.busy_since_s, member.busy_samples = 12.0, 5
    usual = DecodeRate(tokens_per_s=20.0, tokens=2.0)

    def lost(now_s: float, pace: DecodeRate | None = usual) -> int:
        return member.unreported_tokens(now_s, fleet_rate=pace)

    # Before its first report: three slots at 20 tokens/s for 0.05 s; a tick is two tokens in each.
    assert (lost(12.05), lost(12.1), lost(60.0)) == (3, 6, 6)
    assert lost(60.0, None) == 0
    # From its own reports: 400 tokens/s since 10 s, but at most the 40 of a tick.
    member.status = replace(status, running=3, tokens_per_s=400.0)
    assert (lost(10.05), lost(60.0)) == (20, 40)
    # Its last report was of its last tick, and it has no new samples.
    member.status, member.busy_since_s = replace(status, running=0), None
    assert lost(60.0) == 0


def test_a_worker_lost_while_it_joins_or_pulls_delays_no_other() -> None:
    session = pool(granted("a"), ended("a", 0.1), granted("b"), ended("b", 0.4), granted("c"))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.telemetry.named("eviction") == []
    assert len(session.telemetry.named("join_failed")) == 2
    joined = [fields["worker"] for fields in session.telemetry.named("join") if "error" not in fields]
    assert joined == ["spot-c"]


def test_a_lease_granted_twice_is_one_worker() -> None:
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


def test_an_outage_does_not_count_towards_the_deadline_of_new_workers() -> None:
    script = [granted("a"), ended("a", 1.5), granted("b", 500.0)]
    session = pool(*script, seeding_worker=False, timeouts=Timeouts(worker_s=50.0))

    run_virtual(session.run())

    assert trained(session) == quiet()
