"""Training on simulators that are evicted and killed gives the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.control_runs import session
from tests.doubles.provider import EventProvider
from tidemill.controller.fleet import Fleet
from tidemill.controller.worker_state import WorkerCommand
from tidemill.core.errors import UserError
from tidemill.core.records import Lease, LeaseEnded, LeaseGranted
from tidemill.runtime import simulators
from tidemill.telemetry.events import read_events


class Market(EventProvider):
    """Machines that are replaced at once when they are evicted, or given back after their process was killed."""

    def __init__(self, machines: int) -> None:
        super().__init__()
        self.granted = 0
        for _ in range(machines):
            self._grant()

    def _grant(self) -> None:
        self.granted += 1
        lease_id, worker_id = f"lease-{self.granted}", f"spot-{self.granted}"
        lease = Lease(lease_id=lease_id, worker_id=worker_id, kind="preemptible", price_usd_per_hour=0.0, start_s=0.0)
        self.tell(LeaseGranted(lease=lease))

    def evict(self, lease_id: str) -> None:
        self.tell(LeaseEnded(lease_id=lease_id, cause="the provider took the machine without notice"))
        self._grant()

    async def release(self, lease_id: str) -> None:
        self._grant()


class Disturber:
    """Evicts every third worker that is given a chunk, while it computes, and kills the process of some."""

    def __init__(self, patch: pytest.MonkeyPatch, *, kill_every: int) -> None:
        self.evictions = self.kills = self._chunks = 0
        self.market: Market | None = None
        original = Fleet.call

        def call(fleet: Fleet, lease_id: str, command: WorkerCommand, **fields: Any) -> None:
            original(fleet, lease_id, command, **fields)
            self._chunks += 1
            if self._chunks % kill_every == 0:
                asyncio.get_running_loop().call_later(0.03, self._kill, fleet, lease_id)
            elif self._chunks % 3 == 0:
                asyncio.get_running_loop().call_later(0.05, self._evict, fleet, lease_id)

        def provider(*_: Any, **__: Any) -> Market:
            self.market = Market(2)
            return self.market

        patch.setattr(Fleet, "call", call)
        patch.setattr(simulators, "scheduled_provider", provider)

    def _kill(self, fleet: Fleet, lease_id: str) -> None:
        if lease_id in fleet:
            handle: Any = fleet[lease_id].handle
            os.kill(handle.process.pid, signal.SIGKILL)
            self.kills += 1

    def _evict(self, fleet: Fleet, lease_id: str) -> None:
        if lease_id in fleet and self.market is not None:
            self.market.evict(lease_id)
            self.evictions += 1


def quadruped(lag: int, *, worlds: int, iterations: int, steps: int) -> dict[str, Any]:
    control = {"num_steps_per_env": steps, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,), "eval_episodes": 0}
    return {
        "robot": {"task": "quadruped", "worlds": worlds, "randomise": {"mass": (0.8, 1.2), "delay_s": (0.0, 0.02)}},
        "control": control | {"max_policy_lag": lag},
        "trainer": {"steps": iterations, "threads": 1},
    }


def weights(summary: dict[str, Any]) -> dict[str, bytes]:
    found = Path(summary["policy"]).rglob("*.safetensors")
    return {path.name: path.read_bytes() for path in found if path.name != "random.safetensors"}


LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("lag", "worlds", "iterations", "evictions", "kills"),
    [
        pytest.param(1, 128, 3, 1, 1, id="short"),
        pytest.param(0, 256, 26, 30, 10, id="long", marks=LONG),
        pytest.param(1, 256, 26, 30, 10, id="long at lag 1", marks=LONG),
    ],
)
def test_evictions_and_kills_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int, worlds: int, iterations: int, evictions: int, kills: int
) -> None:
    settings = quadruped(lag, worlds=worlds, iterations=iterations, steps=8)
    calm = session(tmp_path / "calm", **settings)
    disturber = Disturber(monkeypatch, kill_every=10 if kills > 1 else 4)
    disturbed = session(tmp_path / "disturbed", pool={"kind": "static", "workers": 2}, **settings)

    assert disturber.evictions >= evictions
    assert disturber.kills >= kills
    assert weights(disturbed) == weights(calm)
    events = [event["event"] for event in read_events(tmp_path / "disturbed" / "events.jsonl")]
    assert events.count("eviction") >= evictions
    print(f"lag {lag}: {disturber.evictions} evictions, {disturber.kills} kills")


FAILING = """
from tidemill.robots.tasks.swingup import Swingup

class Task(Swingup):
    def rewards(self, worlds):
        if worlds.steps.max() > 3:
            raise RuntimeError("the beam is missing")
        return super().rewards(worlds)
"""


def test_a_failing_task_ends_the_run_and_its_simulators(tmp_path: Path) -> None:
    (tmp_path / "beam.py").write_text(FAILING)
    with pytest.raises(UserError, match=r"RuntimeError: the beam is missing\n.*beam\.py, line 7"):
        session(tmp_path / "run", robot={"task": f"{tmp_path}/beam.py:Task"}, pool={"kind": "static", "workers": 1})
