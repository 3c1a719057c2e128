"""The goodput benchmark counts all of the machines' time, and fails if what it measures did not happen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks import goodput
from benchmarks.goodput import check_migrations, ideal_s, measure
from benchmarks.slot_time import TimedEngine, Watch
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.in_flight import InFlight
from tidemill.controller.samples import Sample
from tidemill.core.records import GenerateRequest
from tidemill.pool.traces import CapacityTrace
from tidemill.sim.workload import Workload

MODES = ["batches", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("endless", "endless, keep_cache"))]
TRACE = CapacityTrace(steps=((0.0, 3), (150.0, 1), (200.0, 3)), end_s=600.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(goodput.GeometricLengths):
        def quantile(self, share: float) -> int:
            return min(800, 1 + int(-math.log1p(-share) * 300))

    monkeypatch.setattr(goodput, "PROMPTS", 64)
    monkeypatch.setattr(goodput, "WORK", Workload(lengths=Short(), prompt_tokens=64))


@pytest.mark.parametrize("mode", MODES)
def test_shares_add_up_and_evicted_samples_migrate(mode: str) -> None:
    found = measure(TRACE, 600.0, mode, seed=7)

    assert math.isclose(sum(found["shares"].values()), 1.0, abs_tol=1e-9)
    assert min(found["shares"].values()) > -1e-9
    assert found["evictions"] == 2
    assert found["migrated_samples"] > 0
    assert found["goodput"] <= found["shares"]["decode"] + 1e-9  # accepted tokens were decoded
    assert 0.3 < found["goodput"] < 1
    assert found.get("of_ideal", 0.5) < 1


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher drops every seventh sample that lost its machine."""
    push = Dispatcher._push

    def drops(self: Dispatcher, sample: Any) -> None:
        if not (sample.attempt and sample.ordinal % 7 == 0):
            push(self, sample)

    monkeypatch.setattr(Dispatcher, "_push", drops)


@pytest.mark.usefixtures("forgets")
def test_a_dispatcher_that_forgets_evicted_samples_is_found() -> None:
    with pytest.raises(RuntimeError, match="although slots were free"):
        measure(TRACE, 600.0, "endless", seed=7)


@pytest.mark.usefixtures("forgets")
def test_forgotten_samples_are_found_when_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh samples are in front of those that lost their machine, and there are always more."""
    monkeypatch.setattr(goodput, "PROMPTS", 128)
    monkeypatch.setattr(goodput, "LONGEST_WAIT_S", 150.0)
    monkeypatch.setattr(goodput, "STALL_S", math.inf)
    trace = CapacityTrace(steps=((0.0, 3), (50.0, 1), (80.0, 3)), end_s=300.0)
    with pytest.raises(RuntimeError, match="lost its machine waited"):
        measure(trace, 300.0, "endless", seed=7)


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_start_anew_after_an_eviction_are_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    revoke = InFlight.revoke

    def restarts(self: InFlight, lease_id: str) -> list[Sample]:
        self.restart(found := revoke(self, lease_id))
        return found

    monkeypatch.setattr(InFlight, "revoke", restarts)
    with pytest.raises(RuntimeError, match="unfinished samples lost"):
        measure(TRACE, 600.0, mode, seed=7)


@pytest.mark.parametrize("mode", MODES)
def test_moved_samples_that_no_engine_receives_are_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = TimedEngine.submit

    def loses(self: TimedEngine, requests: Iterable[GenerateRequest], now_s: float) -> None:
        submit(self, [one for one in requests if not (one.prefix_ids and one.sample_id.index == 3)], now_s)

    monkeypatch.setattr(TimedEngine, "submit", loses)
    monkeypatch.setattr(goodput, "LONGEST_PAUSE_S", 200.0)
    with pytest.raises(RuntimeError, match="got no token for"):
        measure(TRACE, 600.0, mode, seed=7)


def test_evictions_without_migrations_fail() -> None:
    class Run:
        events = ({"event": "eviction", "samples": 3},)

    with pytest.raises(RuntimeError, match="none migrated"):
        check_migrations(Run(), Watch(clock=None, end_s=1.0), endless=False)  # type: ignore[arg-type]


def test_the_ideal_is_the_longest_sample_or_the_work_of_all_slots() -> None:
    step_s, slots = goodput.SPEED.step_s, goodput.SPEED.slots
    constant = CapacityTrace(steps=((0.0, 2),), end_s=1e6)
    assert ideal_s(constant, [[1000]]) == 1000 * step_s
    assert math.isclose(ideal_s(constant, [[10] * (8 * slots)]), 40 * step_s)
    grows = CapacityTrace(steps=((0.0, 1), (1.0, 2)), end_s=1e6)
    assert math.isclose(ideal_s(grows, [[100] * (4 * slots)]), 1 + (400 * step_s - 1) / 2)
