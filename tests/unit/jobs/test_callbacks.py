from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import tidemill as tm
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.evidence import GuardDecision
from tidemill.jobs.callbacks import CallbackTelemetry, check_callback
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

FIELDS: dict[str, Any] = {
    "number": 1, "step": 17, "onset": 12, "test": "gain", "action": "rollback", "reason": "R. S.", "target": 10,
    "proxy": (0.5, 0.75), "gold": [0.5, 0.25],
}  # fmt: skip


def test_on_guard_gets_each_decision_and_can_stop_the_run(tmp_path: Path) -> None:
    class Watch(tm.Callback):
        def on_guard(self, decision: GuardDecision) -> None:
            seen.append(decision)
            self.stop("the guard decided")

    seen, stops = list[GuardDecision](), list[str]()
    spec = RunSpec.model_validate({"run": {"dir": str(tmp_path)}})
    with RunDirectory.open(tmp_path) as run, Recorder(run, spec, stream=io.StringIO()) as recorder:
        telemetry = CallbackTelemetry(recorder, [Watch()], stops.append)
        telemetry.event("gold", step=17, pairs=8)
        telemetry.event("guard", **FIELDS)
    assert seen == [GuardDecision(**FIELDS | {"gold": (0.5, 0.25)})]
    assert stops == ["the guard decided"]


def test_on_guard_needs_its_argument() -> None:
    class Wrong(tm.Callback):
        def on_guard(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(UserError, match="cannot be called with decision") as caught:
        check_callback(Wrong())
    assert "def on_guard(self, decision)" in caught.value.hint
