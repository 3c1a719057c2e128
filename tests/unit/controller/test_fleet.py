"""Workers that join, leave, hang and lie, in virtual time: the run learns the same thing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fake_fleet import FakeEngine, Session, make_id, make_report, small_spec
from tests.fake_pool import BrokenHost, FakeHost, FakeSource, PoolEngine, PoolSession, ended, granted, noticed, trained
from tests.virtual_time import run_virtual
from tidemill.config.pool import FleetConfig
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.member import Member, Pace
from tidemill.controller.offload import OffloadState
from tidemill.controller.waiting import Patience
from tidemill.core.buffers import pack_logprobs
from tidemill.core.errors import DeadlineError, TidemillError, UserError, WeightsError
from tidemill.core.records import Lease, LeaseEvent, PolicyVersion, Pulled, TokenDelta
from tidemill.telemetry.fleet_figures import fleet_figures

SPEC = small_spec(batch={"prompts": 6, "group_size": 3})
FLEET = FleetConfig(silence_s=5.0, join_s=20.0, hand_back_s=0.5, seed_window_s=1.0)


def quiet(spec: RunSpec = SPEC) -> object:
    session = Session(spec=spec)
    run_virtual(session.run())
    return trained(session)


def pool(*script: tuple[float, LeaseEvent], **changes: Any) -> PoolSession:
    return PoolSession(**{"spec": SPEC, "script": script, "config": FLEET, **changes})


def test_workers_share_the_work_and_change_nothing() -> None:
    session = pool(granted("a"), granted("b"))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert all(session.host.engines[f"lease-{name}"].generated > 20 for name in "ab")
    joins = session.telemetry.named("join")
    assert [fields["worker"] for fields in joins] == ["spot-a", "spot-b"]
    # It boots for 0.2 s and pulls for 0.3 s; the rest is the swap, between two ticks.
    assert all(0.5 <= fields["duration_s"] < 0.8 for fields in joins)
    # each worker pulled every version but the last, or that too
    assert {fields["version"] for fields in session.telemetry.named("pull")} >= {0, 1, 2, 3}


def test_zero_workers_is_a_normal_state() -> None:
    session = pool()

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.telemetry.named("waiting") == []


def test_remote_workers_alone_are_enough() -> None:
    session = pool(granted("a"), seeding_worker=False, config=FLEET.model_copy(update={"seeding": False}))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.engine.generated == 0


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
    asked = sum(fields["samples"] for fields in (*told.named("hand_back"), *told.named("rebalance")))
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
    member = Member(lease=LEASE, slots=3, heard_s=10.0, heard_tokens=40)
    member.busy_since_s, member.busy_samples = 12.0, 5
    usual = Pace(tokens_per_s=20.0, tokens=2.0)

    def lost(now_s: float, pace: Pace | None = usual) -> int:
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


def test_a_worker_that_joins_in_the_middle_of_a_step_serves_that_step() -> None:
    session = pool(granted("a"), granted("late", 1.0), seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    first = session.telemetry.named("decode")
    assert any(fields["worker"] == "spot-late" and fields["step"] == 1 for fields in first)


def test_a_worker_lost_while_it_joins_or_pulls_delays_nobody() -> None:
    session = pool(granted("a"), ended("a", 0.1), granted("b"), ended("b", 0.4), granted("c"))

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert session.telemetry.named("eviction") == []
    assert len(session.telemetry.named("join_failed")) == 2
    joined = [fields["worker"] for fields in session.telemetry.named("join") if "error" not in fields]
    assert joined == ["spot-c"]


@pytest.mark.parametrize("silent", [False, True])
def test_machines_that_never_come_up_are_given_back(silent: bool) -> None:
    class Host(BrokenHost):
        pass

    Host.silent = silent
    session = pool(granted("a"), host_type=Host, spec=small_spec(trainer={"steps": 30}))

    run_virtual(session.run())

    assert session.provider.released == ["lease-a"]
    (failed,) = session.telemetry.named("join_failed")
    assert ("20 s" if silent else "no such machine; try another zone") in failed["cause"]


def spoil(session: PoolSession, name: str, how: Any) -> None:
    def prepare(lease: Lease, engine: PoolEngine) -> None:
        if lease.worker_id == f"spot-{name}":
            how(engine)

    session.host.prepare = prepare


def test_a_worker_that_computes_something_else_is_quarantined() -> None:
    session = pool(granted("a"), granted("b"))

    def lie(engine: PoolEngine) -> None:
        engine.probe_logprobs = pack_logprobs([-0.5, -1.5])

    spoil(session, "a", lie)
    run_virtual(session.run())

    assert trained(session) == quiet()
    (quarantine,) = session.telemetry.named("quarantine")
    assert (quarantine["worker"], quarantine["difference"], quarantine["limit"]) == ("spot-a", 0.25, 0.1)
    assert session.host.engines["lease-a"].generated == 0
    assert [fields["worker"] for fields in session.telemetry.named("join") if "error" not in fields] == ["spot-b"]
    assert session.provider.released == ["lease-a"]
    assert session.telemetry.named("eviction") == []


@pytest.mark.parametrize("said", [[float("nan"), -1.0], [-0.5]])
def test_a_worker_that_says_no_numbers_is_quarantined(said: list[float]) -> None:
    session = pool(granted("a"))
    spoil(session, "a", lambda engine: setattr(engine, "probe_logprobs", pack_logprobs(said)))

    run_virtual(session.run())

    assert len(session.telemetry.named("quarantine")) == 1


@pytest.mark.parametrize("whose", ["local", "preemptible"])
def test_an_engine_without_the_logprobs_that_are_needed_ends_the_run_before_it_generates(whose: str) -> None:
    session = pool(granted("a"), seeding_worker=whose == "local")

    def forget(engine: FakeEngine) -> None:
        engine.logprobs = False

    if whose == "local":
        forget(session.engine)
    spoil(session, "a", forget)
    with pytest.raises(UserError) as caught:
        run_virtual(session.run())
    assert caught.value.what == (
        'the engine returns no logprobs of the tokens it samples, and algorithm.correction.kind = "tis" needs them'
    )
    assert 'algorithm.correction.kind = "none"' in caught.value.cure
    assert session.engine.submitted == []
    assert all(engine.submitted == [] for engine in session.host.engines.values())


def test_an_engine_without_logprobs_will_do_where_nothing_needs_them() -> None:
    session = Session(spec=small_spec(algorithm={"correction": {"kind": "none"}}))
    session.engine.logprobs = False
    assert run_virtual(session.run()).steps == 4


def test_a_silent_worker_loses_its_lease_and_its_work_moves_on() -> None:
    session = pool(granted("a"), granted("b"), seeding_worker=False)
    polls = 0

    def hang(engine: PoolEngine) -> None:
        def on_poll() -> None:
            nonlocal polls
            polls += 1
            if polls == 3:
                session.host.workers["lease-a"].next_report = stopped  # type: ignore[method-assign]

        engine.on_poll = on_poll

    async def stopped(timeout_s: float) -> None:
        await asyncio.sleep(10**6)

    spoil(session, "a", hang)
    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    assert eviction["worker"] == "spot-a"
    assert "silent for" in eviction["cause"]
    assert session.provider.released == ["lease-a"]


def test_a_worker_whose_engine_raises_is_lost_and_the_run_is_not() -> None:
    session = pool(granted("a"), granted("b"))
    polls = 0

    def fail(engine: PoolEngine) -> None:
        def on_poll() -> None:
            nonlocal polls
            polls += 1
            if polls == 3:
                raise ValueError("engine on fire")

        engine.on_poll = on_poll

    spoil(session, "a", fail)
    run_virtual(session.run())

    assert trained(session) == quiet()
    (crash,) = session.telemetry.named("crash")
    assert "engine on fire" in crash["cause"]
    assert crash["samples"] > 0
    assert session.telemetry.named("eviction") == []  # the machine was there, and is given back
    assert session.provider.released == ["lease-a"]
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-a"]
    assert not end["evicted"]
    for key, expected in (("crashes", 1.0), ("evictions", 0.0)):
        assert sum(step.values[key] for step in session.telemetry.steps) == expected


LIES: dict[str, dict[str, Any]] = {
    "it sent what does not fit (gap)": {"start": 1000},
    "it sent what does not fit (malformed)": {"logprobs": b""},
    "it speaks for another lease": {"lease_id": "local"},
    "it was heard of, but 51 s without a token that is of use": {"sample_id": make_id("nobody's")},
}


@pytest.mark.parametrize("cause", LIES)
def test_a_worker_whose_reports_are_of_no_use_loses_its_lease_and_the_run_goes_on(cause: str) -> None:
    session = pool(granted("a"), granted("b"), seeding_worker=False, patience=Patience(worker_s=50.0))

    def lie(engine: PoolEngine) -> None:
        truth = engine.delta
        engine.delta = lambda *of: replace(truth(*of), **LIES[cause])  # type: ignore[method-assign]

    spoil(session, "a", lie)
    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    assert (eviction["worker"], eviction["cause"]) == ("spot-a", cause)
    assert session.provider.released == ["lease-a"]


def test_a_worker_that_forgot_what_it_had_does_not_hold_up_an_evaluation() -> None:
    ahead = small_spec(eval={"every_steps": 1}, schedule={"max_policy_lag": 1})
    session = pool(granted("a"), spec=ahead, patience=Patience(worker_s=50.0))
    second = {prompt.prompt_id for _, prompt in session.source.train_batch(2)}

    def forget(engine: PoolEngine) -> None:
        def forgetful(requests: Any) -> None:
            """What the second batch is for, it has under way when the first is evaluated."""
            PoolEngine.submit(engine, [one for one in requests if one.sample_id.prompt_id not in second])

        engine.submit = forgetful  # type: ignore[method-assign]

    spoil(session, "a", forget)
    result = run_virtual(session.run())

    assert result.steps == ahead.trainer.steps
    assert [fields["worker"] for fields in session.telemetry.named("eviction")] == ["spot-a"]


def test_a_lease_that_is_granted_twice_is_one() -> None:
    session = pool(granted("a"), granted("a", 0.3), ended("a", 2.0), granted("a", 3.0))
    run_virtual(session.run())

    assert trained(session) == quiet()
    assert len(session.telemetry.named("lease")) == len(session.telemetry.named("eviction")) == 1


def test_a_worker_whose_pull_is_overtaken_by_a_newer_version_pulls_that() -> None:
    session = pool(granted("a"))
    gone: list[int] = []

    class Overtaken(FakeSource):
        async def prepare(self, version: PolicyVersion) -> Pulled:
            """So slow that version 1 is not kept any more when it has read half of it."""
            if version.number == 1:
                while max(self.publisher.manifests) == 1:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.1)
                gone.append(version.number)
                raise WeightsError("there is no version 1")
            return await super().prepare(version)

    session.host.source_type = Overtaken
    run_virtual(session.run())

    assert (trained(session), gone) == (quiet(), [1])
    assert session.telemetry.named("crash") == []
    assert [fields["version"] for fields in session.telemetry.named("pull")][:2] == [0, 2]


def test_a_reserved_engine_whose_reports_are_of_no_use_ends_the_run() -> None:
    session = pool(patience=Patience(worker_s=50.0))
    truth = session.engine.delta
    session.engine.delta = lambda *of: replace(truth(*of), start=0)  # type: ignore[method-assign]

    with pytest.raises(DeadlineError, match=r"tokens of .* samples .*messages ignored: .*overlap"):
        run_virtual(session.run())


def test_a_sample_that_breaks_every_worker_ends_the_run() -> None:
    session = pool(*[granted(f"w{at}") for at in range(16)], seeding_worker=False)

    def fail(lease: Lease, engine: PoolEngine) -> None:
        def poll(deadline_s: float) -> list[TokenDelta]:
            if engine.jobs:
                raise ValueError("engine on fire")
            return []

        engine.poll = poll  # type: ignore[method-assign]

    session.host.prepare = fail
    with pytest.raises(TidemillError, match=r"3 attempts to generate .* failed; the last: .*engine on fire"):
        run_virtual(session.run())


def test_nobody_to_generate_meets_a_deadline_that_names_the_pool() -> None:
    session = pool(seeding_worker=False, patience=Patience(worker_s=50.0, pool_s=100.0))

    with pytest.raises(DeadlineError, match=r"a worker to generate .* samples of step 0 .*look at \[pool\]"):
        run_virtual(session.run())


def test_all_workers_gone_for_a_while() -> None:
    script = [granted("a"), granted("b"), ended("a", 1.5), ended("b", 1.5), granted("c", 60.0)]
    session = pool(*script, seeding_worker=False)

    run_virtual(session.run())

    assert trained(session) == quiet()
    assert len(session.telemetry.named("eviction")) == 2
    assert session.telemetry.named("waiting")[0]["awaited"].startswith("a worker to generate")


def test_an_outage_longer_than_a_workers_deadline_is_not_held_against_those_who_come_back() -> None:
    script = [granted("a"), ended("a", 1.5), granted("b", 500.0)]
    session = pool(*script, seeding_worker=False, patience=Patience(worker_s=50.0))

    run_virtual(session.run())

    assert trained(session) == quiet()


@pytest.mark.parametrize("windows", [{"seed_window_s": 0.35}, {"seed_window_s": 1e3, "known_windows": (0.35,)}])
def test_the_reserved_side_stops_generating_when_its_window_is_over(windows: dict[str, Any]) -> None:
    config = FLEET.model_copy(update={"window_gain": 1e9, **windows})
    session = pool(granted("a"), config=config, spec=small_spec(batch={"prompts": 12, "group_size": 4}))
    alone = Session(spec=session.spec)

    run_virtual(session.run())
    run_virtual(alone.run())

    assert trained(session) == trained(alone)
    local = [f for f in session.telemetry.named("decode") if f["worker"] == "local" and f["purpose"] == "train"]
    assert session.engine.generated < session.host.engines["lease-a"].generated
    # the window, and the tick that was running; the worker took 8 s and more for its share
    assert all(fields["duration_s"] < 1.0 for fields in local if fields["step"] >= 2)


def test_what_the_reserved_side_began_it_finishes_under_the_same_weights_where_that_is_asked_for() -> None:
    config = FLEET.model_copy(update={"seed_window_s": 0.35, "window_gain": 1e9})
    spec = small_spec(
        batch={"prompts": 6, "group_size": 3},
        schedule={"max_policy_lag": 2, "unfinished": "finish"},
        sampling={"max_new_tokens": 24},
        eval={"every_steps": 0},
        trainer={"steps": 6},
    )
    session = pool(granted("a"), granted("b"), config=config, spec=spec)

    run_virtual(session.run())

    batches: Any = session.trainer.state.history
    made_by = [{run.version.number for run in sample[7]} for batch in batches for group in batch for sample in group[2]]
    assert len(made_by) == 6 * 6 * 3
    assert all(len(versions) == 1 for versions in made_by)


def test_a_worker_that_finishes_before_a_publish_reaches_it_takes_the_new_weights_at_once() -> None:
    session, busy = Session(), [LOCAL]

    async def publish_while_it_finishes() -> None:
        async with session.fleet as fleet:
            await fleet.publishing.publish(session.trainer.version)
            newer = PolicyVersion(number=1, digest="1" * 32)
            publishing = asyncio.create_task(fleet.publishing.publish(newer, finishing=lambda: busy))
            busy.clear()  # its last report is read before the task begins
            await publishing
            assert fleet[LOCAL].version == newer

    run_virtual(publish_while_it_finishes())


def test_the_window_adapts_and_the_provider_hears_how_many_are_wanted() -> None:
    config = FLEET.model_copy(update={"size": "adaptive"})
    session = pool(granted("a"), config=config, spec=small_spec(trainer={"steps": 6}))

    run_virtual(session.run())

    steps = [step.values for step in session.telemetry.steps if step.step]
    assert session.provider.wanted[0] == 1  # as many as there are engines on the reserved side
    assert len(session.provider.wanted) == 1 + 6
    assert all(wanted >= 0 for wanted in session.provider.wanted)
    assert len({values["seed_window_s"] for values in steps}) > 1
    assert steps[-1]["workers_mean"] == 1.0  # also while it takes new weights


def test_the_window_is_that_of_all_who_will_generate_though_they_still_take_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def remembered(state: OffloadState, workers: int) -> float:
        asked.append(workers)
        return 0.2

    monkeypatch.setattr("tidemill.controller.seeding.window", remembered)
    session = pool(granted("a"), granted("b"))

    run_virtual(session.run())

    assert asked[-2:] == [2, 2]


def test_the_metrics_have_the_window_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []

    def remembered(state: OffloadState, workers: int) -> float:
        used.append(0.2 + 0.01 * len(used))
        return used[-1]

    monkeypatch.setattr("tidemill.controller.seeding.window", remembered)
    session = pool(granted("a"))

    run_virtual(session.run())

    assert [step.values["seed_window_s"] for step in session.telemetry.steps if step.step] == used
    assert len(used) == 4


def test_everything_ends_with_the_fleet() -> None:
    session = pool(granted("a"), granted("b"))

    async def run() -> int:
        await session.run()
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    assert run_virtual(run()) == 0
    ends = {fields["lease"]: fields["cause"] for fields in session.telemetry.named("lease_end")}
    assert ends == dict.fromkeys(("local", "lease-a", "lease-b"), "the run ended")


def test_the_host_is_asked_for_workers_only_when_leases_come() -> None:
    session = pool()

    run_virtual(session.run())

    assert isinstance(session.host, FakeHost)
    assert session.host.workers == {}
