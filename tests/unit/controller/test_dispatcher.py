"""Samples on machines that live shorter than a recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.doubles.environments import FakeEnvironments
from tests.doubles.samples import GROUPS, V3, FakeCodec, make_plan, make_prompts
from tests.doubles.session import Disk, PoolEngine, PoolSession, Session, ended, granted, noticed, small_spec, trained
from tests.small_pool import FLEET
from tests.virtual_time import run_virtual
from tidemill.config.schema import RunSpec
from tidemill.controller.collector import collect_samples
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import LOCAL, InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.samples import Sample
from tidemill.core.errors import GuardStop
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Lease, LeaseEvent, SampleId, TokenDelta, Trajectory, count

AHEAD = {"schedule": {"max_policy_lag": 1, "unfinished": "wait"}}
ALONE = FLEET.model_copy(update={"seeding": False})


def short_lives(machines: int = 80, *, first_s: float = 0.0, notice_s: float = 0.0) -> list[tuple[float, LeaseEvent]]:
    """Machines that serve for half a second after 0.6 s of booting and pulling; two of them at any time."""
    script = []
    for index in range(machines):
        name, start_s = f"w{index}", first_s + 0.3 * index
        script += [granted(name, start_s), ended(name, start_s + 1.1)]
        if notice_s:
            script.append(noticed(name, start_s + 1.1 - notice_s, start_s + 1.1))
    return script


def generating(tokens: int, *, only: str = "") -> Callable[[Lease, PoolEngine], None]:
    """Engines that generate at most this number of tokens of each sample; those of other machines than `only` none."""

    def prepare(lease: Lease, engine: PoolEngine) -> None:
        most, decode = tokens if lease.lease_id.startswith(f"lease-{only}") else 0, engine._decode

        def decode_few(sample_id: SampleId) -> TokenDelta:
            request, length = engine.jobs[sample_id]
            engine.per_poll = int(length - count(request.prefix_ids) < most)
            return decode(sample_id)

        engine._decode = decode_few  # type: ignore[method-assign]

    return prepare


@dataclass
class ShortLives(PoolSession):
    """A session whose machines prepare their engines."""

    prepare: Callable[[Lease, PoolEngine], None] = field(default_factory=lambda: generating(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host.prepare = self.prepare


def session(**changes: Any) -> ShortLives:
    return ShortLives(**{"spec": SPEC, "script": short_lives(), "config": FLEET, **changes})


SPEC = small_spec(batch={"prompts": 3, "group_size": 3}, trainer={"steps": 2}, eval={"every_steps": 0, "prompts": 2})


def undisturbed(spec: RunSpec, environments: FakeEnvironments | None = None) -> object:
    quiet = Session(spec=spec, environments=environments)
    run_virtual(quiet.run())
    return trained(quiet)


@pytest.mark.parametrize(
    ("sections", "first_tokens", "notice_s", "acts"),
    [
        ({}, 0, 0.0, False),  # not even a prompt is computed
        ({}, 3, 0.0, False),  # tokens of the first machine are never computed again
        ({}, 3, 0.4, False),  # evictions with notice
        (AHEAD, 3, 0.0, False),
        ({}, 3, 0.0, True),  # the history of an agent
    ],
)
def test_a_sample_that_stalls_stays_on_the_reserved_engine(
    sections: dict[str, Any], first_tokens: int, notice_s: float, acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPEC.model_validate(SPEC.model_dump() | sections)
    environments = [FakeEnvironments() if acts else None for _ in range(2)]
    recalls = list[SampleId]()
    pinned = set[SampleId]()
    pin, abort = Dispatcher._pin, Fleet.abort

    def noted(self: Dispatcher, sample: Sample) -> None:
        pinned.add(sample.sample_id)
        pin(self, sample)

    def watched(self: Fleet, lease_id: str, sample_ids: Sequence[SampleId]) -> None:
        recalls.extend(sample_id for sample_id in sample_ids if sample_id in pinned)
        abort(self, lease_id, sample_ids)

    monkeypatch.setattr(Dispatcher, "_pin", noted)
    monkeypatch.setattr(Fleet, "abort", watched)
    disturbed = session(
        spec=spec,
        script=short_lives(notice_s=notice_s),
        prepare=generating(first_tokens, only="w0"),
        environments=environments[0],
    )

    run_virtual(disturbed.run())

    assert trained(disturbed) == undisturbed(spec, environments[1])
    stalled = disturbed.telemetry.named("stalled")
    assert len(stalled) >= 3
    assert {fields["lease"] for fields in stalled} == {LOCAL}
    assert recalls == []


def test_machines_that_leave_before_they_take_samples_do_not_stop_the_reserved_engine() -> None:
    machines = [(f"w{index}", 0.05 * index) for index in range(1000)]
    script = [event for name, at_s in machines for event in (granted(name, at_s), ended(name, at_s + 0.62))]
    disturbed = session(script=script)

    run_virtual(disturbed.run())

    assert trained(disturbed) == undisturbed(SPEC)
    assert len(disturbed.telemetry.named("eviction")) < 500


@pytest.mark.parametrize("changes", [{"config": ALONE}, {"seeding_worker": False}])
def test_without_a_reserved_engine_the_run_ends_and_can_be_resumed(changes: dict[str, Any]) -> None:
    disk = Disk()
    stuck = session(disk=disk, prepare=generating(3, only="w0"), **changes)

    with pytest.raises(GuardStop, match=r"moved 3 times without a new token: .* evicted after 0\.[45]\d* s") as raised:
        run_virtual(stuck.run())

    assert "takes more than 0." in str(raised.value)
    assert "set fleet.seeding = true" in str(raised.value)
    resumed = session(disk=disk, script=[granted("sound")], prepare=lambda lease, engine: None, **changes)
    run_virtual(resumed.run())
    assert trained(resumed) == undisturbed(SPEC)


def test_without_a_reserved_engine_a_server_keeps_its_requests() -> None:
    served = session(
        config=ALONE, script=[*short_lives(20), granted("sound", 9.0)], prepare=generating(9999, only="so")
    )
    in_flight = InFlight(make_plan(), version_number=3)
    in_flight.open(GROUPS, make_prompts())
    rollout = RolloutContext(
        fleet=served.fleet,
        ledger=Ledger(None),
        scorer=served.scorer,
        codec=FakeCodec(),
        telemetry=served.telemetry,
        clock=LoopClock(),
        stop=served.stop,
        gives_up=False,
    )

    async def serve() -> list[Trajectory]:
        async with served.fleet as fleet, collect_samples(in_flight, rollout) as collector:
            await fleet.publishing.publish(V3)
            return [trajectory async for trajectory in collector]

    assert len(run_virtual(serve())) == 6
    assert len(served.telemetry.named("eviction")) == 20


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prepare": generating(1), "slots": 9}, "each life gives one token"),
        ({"prepare": generating(9999), "slots": 1}, "queued samples move, and the one that is executed finishes"),
        (
            {
                "prepare": generating(9999, only="long"),
                "slots": 1,
                "script": [granted("long"), *short_lives(200, first_s=4.0)],
            },
            "another lives long",
        ),
    ],
)
@pytest.mark.parametrize("config", [FLEET.model_copy(update={"seed_window_s": 0.0}), ALONE])
def test_moves_that_are_no_stalls_do_not_count(changes: dict[str, Any], why: str, config: Any) -> None:
    disturbed = session(config=config, **{"script": short_lives(400), **changes})

    run_virtual(disturbed.run())

    assert trained(disturbed) == undisturbed(SPEC)
    if why != "another lives long":  # samples may meet three short lives
        assert disturbed.telemetry.named("stalled") == []
