from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.identify import identify_parameters
from tidemill.jobs.robot_checks import check_robot_stage
from tidemill.robots.engine import check_model
from tidemill.robots.parameters import apply_parameters, model_spec
from tidemill.robots.recordings import Recording, RecordingDescription, write_recording
from tidemill.robots.tasks import open_task

NAMES = ("mass:pole", "length:pole", "damping:hinge")
TRUE = (0.13, 0.45, 0.007)  # of 0.1, 0.6, 0.005 in the model
NOISE = np.array([0.002, 0.005])


def write_logs(folder: Path, *, logs: int, rows: int, **changes: Any) -> None:
    """Noisy logs of a cart-pole with other parameters, which hangs still and is shaken."""
    task = open_task("swingup")
    model = apply_parameters(model_spec(str(task.model)), check_model(task), dict(zip(NAMES, TRUE, strict=True)))
    random, data = np.random.default_rng(0), mujoco.MjData(model)
    times = 0.02 * np.arange(rows)
    positions, actions = [], []
    for number in range(logs):
        shaken = 0.8 * np.sin(2 * np.pi * times * (0.3 + 0.25 * times) + number)
        mujoco.mj_resetData(model, data)
        data.qpos[1] = np.pi
        for action in shaken:
            positions.append(data.qpos + random.standard_normal(2) * NOISE)
            data.ctrl[:] = task.controls(action[None, None])[0]
            mujoco.mj_step(model, data, 2)
        actions.append(shaken)
    tables = {"positions": np.array(positions), "actions": np.concatenate(actions)[:, None].astype(np.float32)}
    description: dict[str, Any] = {
        "joints": ("slide",),
        "control_s": 0.02,
        "lengths": (rows,) * logs,
        "measured": ("slide", "hinge"),
    }
    write_recording(folder, Recording(description=RecordingDescription(**(description | changes)), tables=tables))


def spec_of(tmp_path: Path, **identify: Any) -> RunSpec:
    settings = {"path": tmp_path / "logs", "parameters": NAMES} | identify
    return RunSpec.model_validate({"run": {"dir": tmp_path / "run"}, "identify": settings})


def test_parameters_are_identified_with_intervals(tmp_path: Path) -> None:
    write_logs(tmp_path / "logs", logs=2, rows=100)
    found = identify_parameters(spec_of(tmp_path))
    result = json.loads(Path(found["product"]).read_text())["parameters"]
    for name, true in zip(NAMES, TRUE, strict=True):
        assert result[name]["value"] == pytest.approx(true, rel=0.02)
        assert result[name]["low"] < true < result[name]["high"]
        assert not result[name]["at_limit"]
    assert found["figures"]["mass:pole value"] == result["mass:pole"]["value"]
    changed = check_model(open_task("swingup"), found["product"])
    assert changed.body("pole").mass[0] == pytest.approx(result["mass:pole"]["value"])


def test_a_value_outside_of_the_range_is_reported(tmp_path: Path) -> None:
    write_logs(tmp_path / "logs", logs=1, rows=30)
    found = identify_parameters(spec_of(tmp_path, parameters=["length:pole"], within=[0.9, 1.1]))
    assert "at the end of its range" in found["headline"]


@pytest.mark.parametrize(
    ("settings", "logged", "message", "hint"),
    [
        ({"parameters": ["mass:pol"]}, {}, 'no body "pol"', "did you mean pole?"),
        ({"parameters": []}, {}, "no parameters are given", "mass:BODY"),
        (
            {"parameters": ["friction:pole", "length:cart", "damping:hinge"]},
            {"joints": ("slid",)},
            "do not move slide",
            "",
        ),
        ({"path": None}, {}, "no logs are given", "recorded episodes"),
        ({}, {"measured": ("slide", "hinges")}, 'no joint with one position "hinges"', "did you mean hinge?"),
        ({}, {"measured": ()}, "no positions", "measured"),
        ({}, {"joints": ()}, "or no names", "of the actions in `joints`"),
        ({}, {"control_s": 0.04}, "recorded at 25 Hz", "resample"),
    ],
)
def test_bad_input_is_found_before_the_stage_runs(
    tmp_path: Path, settings: Any, logged: Any, message: str, hint: str
) -> None:
    write_logs(tmp_path / "logs", logs=1, rows=10, **logged)
    with pytest.raises(UserError, match=message) as raised:
        check_robot_stage("identify", spec_of(tmp_path, **settings))
    assert hint in raised.value.hint
