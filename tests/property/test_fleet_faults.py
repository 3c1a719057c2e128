"""Worker and controller faults do not change the tokens that the trainer receives."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.session import Disk, PoolSession, Session, ended, granted, noticed, small_spec, trained
from tests.virtual_time import run_virtual
from tidemill.config.pool import FleetConfig
from tidemill.core.records import LeaseEvent

SPEC = small_spec(batch={"prompts": 4, "group_size": 3}, trainer={"steps": 3}, eval={"every_steps": 0})


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[float, LeaseEvent]]:
    """Up to six machines: kept, evicted without notice, or evicted with notice."""
    script: list[tuple[float, LeaseEvent]] = []
    for name in range(draw(st.integers(0, 6))):
        start = draw(st.floats(0, 8))
        script.append(granted(str(name), start))
        fate = draw(st.sampled_from(["stays", "taken", "warned"]))
        end = start + draw(st.floats(0, 6))
        if fate == "warned":
            script.append(noticed(str(name), end, end + 1.0))
            end += 1.0
        if fate != "stays":
            script.append(ended(str(name), end))
    return script


configs = st.builds(
    FleetConfig,
    seed_window_s=st.sampled_from([0.0, 0.5, 5.0]),
    hand_over=st.sampled_from(["window", "balance"]),
    queue_limit=st.sampled_from([1, 8]),
    max_moves=st.sampled_from([0, 2]),
    tail_fraction=st.sampled_from([0.0, 0.3, 0.9]),
    drain_margin_s=st.sampled_from([0.0, 0.3, 2.0]),
    heartbeat_timeout_s=st.just(5.0),
)


def quiet() -> object:
    session = Session(spec=SPEC)
    run_virtual(session.run())
    return trained(session)


QUIET = quiet()


@settings(max_examples=15)
@given(script=scripts(), config=configs)
def test_evictions_joins_and_notices_do_not_change_the_result(
    script: list[tuple[float, LeaseEvent]], config: FleetConfig
) -> None:
    session = PoolSession(spec=SPEC, script=script, config=config)

    run_virtual(session.run())

    assert trained(session) == QUIET
    granted_leases = {f["lease"] for f in session.telemetry.named("lease")}
    assert granted_leases == {f["lease"] for f in session.telemetry.named("lease_end")} - {"local"}


@settings(max_examples=10)
@given(script=scripts(), cuts=st.lists(st.integers(0, 6000), min_size=1, max_size=3))
def test_a_controller_killed_at_any_byte_does_not_change_the_result(
    script: list[tuple[float, LeaseEvent]], cuts: list[int]
) -> None:
    disk = Disk()
    for cut in [*cuts, None]:
        changes: dict[str, Any] = {"spec": SPEC, "script": script, "disk": disk, "power_cut_after": cut}
        session = PoolSession(**changes)
        if run_virtual(session.run_until_power_cut()) is not None:
            break

    assert trained(session) == QUIET
