"""Simulators on a local Ray cluster: the bits of a run in one process, although one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.control_runs import session
from tests.processes import command_lines, processes_below
from tidemill.jobs.callbacks import Callback
from tidemill.telemetry.events import read_events

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


class KillASimulator(Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            found = [
                pid for pid, line in command_lines(processes_below(os.getpid())).items() if "SimulatorActor" in line
            ]
            os.kill(found[0], signal.SIGKILL)


def test_a_killed_actor_changes_no_bit(tmp_path: Path) -> None:
    settings = {"trainer": {"steps": 3, "threads": 1}}
    calm = session(tmp_path / "calm", **settings)
    on_ray = session(tmp_path / "ray", KillASimulator(), runtime="ray", pool={"kind": "ray"}, **settings)

    policies = [Path(summary["policy"]) / "policy.safetensors" for summary in (calm, on_ray)]
    assert policies[0].read_bytes() == policies[1].read_bytes()
    events = [event["event"] for event in read_events(tmp_path / "ray" / "events.jsonl")]
    assert events.count("eviction") == 1
