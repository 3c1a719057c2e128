"""Workers that do not join, hang, raise or send wrong data: they lose their lease, or the run ends with an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.doubles.engine import FakeEngine
from tests.doubles.samples import make_id
from tests.doubles.session import BrokenHost, PoolEngine, PoolSession, Session, granted, small_spec, trained
from tests.small_pool import pool, quiet
from tests.virtual_time import run_virtual
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import DeadlineError, TidemillError, UserError
from tidemill.core.records import Lease, TokenDelta, pack_logprobs


@pytest.mark.parametrize("silent", [False, True])
def test_leases_whose_worker_does_not_join_are_released(silent: bool) -> None:
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


def test_a_worker_with_different_probe_logprobs_is_quarantined() -> None:
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
def test_a_worker_with_invalid_probe_logprobs_is_quarantined(said: list[float]) -> None:
    session = pool(granted("a"))
    spoil(session, "a", lambda engine: setattr(engine, "probe_logprobs", pack_logprobs(said)))

    run_virtual(session.run())

    assert len(session.telemetry.named("quarantine")) == 1


@pytest.mark.parametrize("whose", ["local", "preemptible"])
def test_an_engine_without_needed_logprobs_ends_the_run_before_it_generates(whose: str) -> None:
    session = pool(granted("a"), seeding_worker=whose == "local")

    def forget(engine: FakeEngine) -> None:
        engine.logprobs = False

    if whose == "local":
        forget(session.engine)
    spoil(session, "a", forget)
    with pytest.raises(UserError) as caught:
        run_virtual(session.run())
    assert caught.value.where == "algorithm"
    assert 'algorithm.correction.kind = "tis"' in caught.value.what
    assert 'algorithm.correction.kind = "none"' in caught.value.hint
    assert session.engine.submitted == []
    assert all(engine.submitted == [] for engine in session.host.engines.values())


def test_an_engine_without_logprobs_is_accepted_if_nothing_needs_them() -> None:
    session = Session(spec=small_spec(algorithm={"correction": {"kind": "none"}}))
    session.engine.logprobs = False
    assert run_virtual(session.run()).steps == 4


def test_a_worker_without_heartbeats_loses_its_lease_and_its_samples_move() -> None:
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
    assert "no report" in eviction["cause"]
    assert session.provider.released == ["lease-a"]


def test_a_worker_error_does_not_end_the_run() -> None:
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
    assert session.telemetry.named("eviction") == []  # the machine was not lost: its lease is released
    assert session.provider.released == ["lease-a"]
    (end,) = [fields for fields in session.telemetry.named("lease_end") if fields["lease"] == "lease-a"]
    assert not end["evicted"]
    for key, expected in (("crashes", 1.0), ("evictions", 0.0)):
        assert sum(step.values[key] for step in session.telemetry.steps) == expected


WRONG_DELTAS: dict[str, dict[str, Any]] = {  # fields changed in every delta, by a part of the eviction's cause
    "(gap)": {"start": 1000},
    "(malformed)": {"logprobs": b""},
    "report carries lease local, expected lease-a": {"lease_id": "local"},
    "no new tokens for 51 s": {"sample_id": make_id("unknown")},
}


@pytest.mark.parametrize("cause", WRONG_DELTAS)
def test_a_worker_that_sends_wrong_deltas_loses_its_lease_and_the_run_continues(cause: str) -> None:
    session = pool(granted("a"), granted("b"), seeding_worker=False, timeouts=Timeouts(worker_s=50.0))

    def corrupt(engine: PoolEngine) -> None:
        correct = engine.delta
        engine.delta = lambda *of: replace(correct(*of), **WRONG_DELTAS[cause])  # type: ignore[method-assign]

    spoil(session, "a", corrupt)
    run_virtual(session.run())

    assert trained(session) == quiet()
    (eviction,) = session.telemetry.named("eviction")
    assert eviction["worker"] == "spot-a"
    assert cause in eviction["cause"]
    assert session.provider.released == ["lease-a"]


def test_a_worker_that_lost_its_samples_does_not_block_an_evaluation() -> None:
    ahead = small_spec(eval={"every_steps": 1}, schedule={"max_policy_lag": 1})
    session = pool(granted("a"), spec=ahead, timeouts=Timeouts(worker_s=50.0))
    second = {prompt.prompt_id for _, prompt in session.source.train_batch(2)}

    def forget(engine: PoolEngine) -> None:
        def forgetful(requests: Any) -> None:
            """Ignores samples of the second batch, which are in flight when the first is evaluated."""
            PoolEngine.submit(engine, [one for one in requests if one.sample_id.prompt_id not in second])

        engine.submit = forgetful  # type: ignore[method-assign]

    spoil(session, "a", forget)
    result = run_virtual(session.run())

    assert result.steps == ahead.trainer.steps
    assert [fields["worker"] for fields in session.telemetry.named("eviction")] == ["spot-a"]


def test_a_local_worker_that_sends_wrong_deltas_ends_the_run() -> None:
    session = pool(timeouts=Timeouts(worker_s=50.0))
    truth = session.engine.delta
    session.engine.delta = lambda *of: replace(truth(*of), start=0)  # type: ignore[method-assign]

    with pytest.raises(DeadlineError) as caught:
        run_virtual(session.run())
    assert "tokens of" in caught.value.awaited
    assert "overlap" in caught.value.look_at


def test_a_sample_that_breaks_every_worker_ends_the_run() -> None:
    session = pool(*[granted(f"w{at}") for at in range(16)], seeding_worker=False)

    def fail(lease: Lease, engine: PoolEngine) -> None:
        def poll(deadline_s: float) -> list[TokenDelta]:
            if engine.jobs:
                raise ValueError("engine on fire")
            return []

        engine.poll = poll  # type: ignore[method-assign]

    session.host.prepare = fail
    with pytest.raises(TidemillError, match=r"3 attempts to generate .* failed; last error: .*engine on fire"):
        run_virtual(session.run())


def test_without_workers_the_deadline_names_the_pool() -> None:
    session = pool(seeding_worker=False, timeouts=Timeouts(worker_s=50.0, pool_s=100.0))

    with pytest.raises(DeadlineError) as caught:
        run_virtual(session.run())
    assert "a worker to generate" in caught.value.awaited
    assert "[pool]" in caught.value.look_at
