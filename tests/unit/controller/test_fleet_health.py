"""What the fleet does with the judgements of a guard of machines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.doubles.session import PoolEngine, PoolSession, granted, trained
from tests.small_pool import pool, quiet
from tests.virtual_time import run_virtual
from tidemill.core.evidence import MachineHealth
from tidemill.core.records import Lease, TokenDelta, WorkerReport, pack_logprobs
from tidemill.guard.machines import MachineWatch


class Verdict(MachineWatch):
    """Judges worker spot-a by its third report with tokens."""

    def __init__(self, state: str, **fields: Any) -> None:
        super().__init__()
        self.fields = {"state": state, "cause": "a test", "machine": "spot-a", "worker_id": "spot-a", **fields}
        self.reports = 0
        self.told: list[str] = []

    def reported(self, lease: Lease, report: WorkerReport, now_s: float) -> None:
        self.reports += lease.worker_id == "spot-a" and bool(report.deltas)
        if self.reports == 3 and not self.told:
            self.told.append(lease.lease_id)
            self._changes.append(MachineHealth(lease_id=lease.lease_id, **self.fields))

    def ended(self, lease: Lease, now_s: float) -> None:
        self.told.append(f"{lease.lease_id} ended")


def judged(state: str, **fields: Any) -> tuple[PoolSession, Verdict]:
    verdict = Verdict(state, **fields)
    session = pool(granted("a"), granted("b"), watch=verdict, seeding_worker=False)
    run_virtual(session.run())
    assert trained(session) == quiet()
    (event,) = session.telemetry.named("worker_health")
    assert (event["lease"], event["state"], event["cause"]) == ("lease-a", state, "a test")
    return session, verdict


def test_a_worker_that_is_drained_hands_its_samples_back_with_their_tokens() -> None:
    session, verdict = judged("draining")
    (drain,) = session.telemetry.named("drain")
    assert drain["worker"] == "spot-a"
    assert session.host.engines["lease-a"].handed_back
    assert session.provider.released == ["lease-a"]
    assert verdict.told == ["lease-a", "lease-a ended"]
    (end,) = (fields for fields in session.telemetry.named("lease_end") if fields["worker"] == "spot-a")
    assert (end["cause"], end["evicted"]) == ("it is quarantined: a test", False)
    assert session.telemetry.named("eviction") == []


@pytest.mark.parametrize("wrong", [False, True])
def test_a_quarantined_worker_ends_at_once_and_its_machine_is_avoided(wrong: bool) -> None:
    session, _ = judged("quarantined", away_s=90.0, wrong=wrong)
    assert session.provider.avoided == {"spot-a": 90.0}
    assert session.provider.released == ["lease-a"]
    assert len(session.telemetry.named("tainted")) == wrong


@pytest.mark.parametrize("fields", [{"state": "suspect"}, {"state": "quarantined", "acts": False, "wrong": True}])
def test_a_message_changes_nothing(fields: dict[str, Any]) -> None:
    session, _ = judged(**fields)
    assert session.provider.released == []
    assert session.provider.avoided == {}
    assert session.telemetry.named("tainted") == []


def test_tokens_with_logprobs_that_are_not_numbers_are_never_applied() -> None:
    class Broken(PoolEngine):
        def delta(self, *args: Any) -> TokenDelta:
            delta = super().delta(*args)
            wrong = pack_logprobs([float("nan")] * (len(delta.logprobs) // 4))
            return msgspec.structs.replace(delta, logprobs=wrong) if self.generated > 20 else delta

    session = pool(*(granted(name) for name in "abcd"), watch=MachineWatch(), seeding_worker=False)
    session.host.prepare = lambda lease, engine: (
        setattr(engine, "__class__", Broken) if lease.worker_id == "spot-b" else None
    )
    run_virtual(session.run())
    assert trained(session) == quiet()
    (event,) = (each for each in session.telemetry.named("worker_health") if each["state"] == "quarantined")
    assert event["worker"] == "spot-b"
    assert event["cause"].endswith("logprobs in a report are not numbers")


def test_a_worker_whose_model_changed_is_found_by_a_probe_between_two_loads() -> None:
    class Changed(PoolEngine):
        def probe(self, token_ids: bytes) -> bytes:
            return super().probe(token_ids) if self.generated < 10 else pack_logprobs([-0.5, -3.0])

    class Probing(MachineWatch):
        def wants_probe(self, lease: Lease, now_s: float, *, idle_s: float) -> bool:
            return True

    session = pool(granted("a"), granted("b"), watch=Probing(), seeding_worker=False)
    session.host.prepare = lambda lease, engine: (
        setattr(engine, "__class__", Changed) if lease.worker_id == "spot-b" else None
    )
    run_virtual(session.run())
    (event,) = session.telemetry.named("worker_health")
    assert (event["worker"], event["state"], event["value"]) == ("spot-b", "quarantined", 1.0)
    assert trained(session) == quiet()
