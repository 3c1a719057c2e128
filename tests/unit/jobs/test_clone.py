from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.clone import clone_policy
from tidemill.jobs.robot_checks import check_robot_stage
from tidemill.models.actor import arrays_of
from tidemill.robots.engine import PARAMETERS
from tidemill.robots.policy_folder import PolicyDescription, read_policy, write_policy
from tidemill.robots.recordings import Recording, RecordingDescription, read_recording, write_recording
from tidemill.robots.setup import describe
from tidemill.telemetry.metrics import read_metrics
from tidemill.trainer.control import ControlNetworks

TASK = '''
from tidemill.robots.tasks.swingup import Swingup

class Blind(Swingup):
    """The policy does not observe velocities."""
    episode_s = 1.0
    obs_groups = {"policy": ("policy",), "critic": ("policy", "privileged")}

    def observe(self, worlds):
        terms = dict(super().observe(worlds)["policy"])
        return {"privileged": {"velocities": terms.pop("velocities")}, "policy": terms}
'''
BOTH = {"policy": ["policy", "privileged"]}
SMALL: dict[str, dict[str, Any]] = {
    "robot": {"worlds": 64, "history": 2},
    "control": {"num_steps_per_env": 16, "actor_hidden_dims": (32,), "critic_hidden_dims": (8,), "eval_episodes": 64},
    "clone": {"episodes": 60, "epochs": 6, "learning_rate": 0.01, "batch_size": 256},
    "trainer": {"steps": 6, "threads": 1},
    "checkpoint": {"every_steps": 2},
    "telemetry": {"live": False},
}


def spec_of(tmp_path: Path, name: str = "run", **sections: dict[str, Any]) -> RunSpec:
    (tmp_path / "tasks.py").write_text(TASK)
    base = SMALL | {"run": {"dir": tmp_path / name}}
    base["robot"] = base["robot"] | {"task": f"{tmp_path / 'tasks.py'}:Blind"}
    return RunSpec.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def write_teacher(tmp_path: Path, **changes: Any) -> Path:
    """A policy with random weights that also reads the velocities, and only the newest observation."""
    spec = spec_of(tmp_path, robot={"history": changes.get("history", 1)}, control={"obs_groups": BOTH})
    description: PolicyDescription = describe(spec)
    weights = arrays_of(ControlNetworks(description, spec.control, seed=7).actors)
    weights["policy.layers.1.weight"] *= 5
    weights["policy.log_std"] -= 2
    folder = tmp_path / "teacher"
    folder.mkdir(exist_ok=True)
    write_policy(folder, msgspec.structs.replace(description, **changes), weights)
    return folder


def cloned(tmp_path: Path, name: str, *callbacks: Callback, **sections: dict[str, Any]) -> dict[str, Any]:
    with (tmp_path / "view.txt").open("a") as view:
        return clone_policy(spec_of(tmp_path, name, **sections), telemetry_stream=view, callbacks=callbacks)


def losses(directory: Path, name: str) -> list[float]:
    return [line.values[name] for line in read_metrics(directory / "metrics.jsonl") if name in line.values]


class StopAt(Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            self.stop("tested")


@pytest.mark.parametrize(
    ("on_policy", "metric"), [(False, "eval/loss"), (True, "loss")], ids=["recorded episodes", "on policy"]
)
def test_a_policy_imitates_its_teacher_and_resumes_to_the_same_bits(
    tmp_path: Path, on_policy: bool, metric: str
) -> None:
    settings = {"clone": SMALL["clone"] | {"teacher": write_teacher(tmp_path), "on_policy": on_policy}}
    summary = cloned(tmp_path, "calm", **settings)
    stored = read_policy(Path(summary["policy"]), where="test")
    assert stored.description.obs_groups["policy"] == ("policy",)
    assert stored.weights["policy.layers.0.weight"].shape == (32, 2 * 3)  # two observations without velocities
    first, *_, last = losses(tmp_path / "calm", metric)
    assert last < 0.5 * first
    figures = summary["figures"]
    if figures["teacher_return"] > 0:
        assert figures["share_of_teacher"] == figures["return_mean"] / figures["teacher_return"]
    assert ", of the teacher " in summary["headline"]
    assert cloned(tmp_path, "stopped", StopAt(), **settings)["interrupted"]
    again = cloned(tmp_path, "stopped", **settings)
    for file in ("policy.safetensors", "shards.safetensors"):
        assert (Path(again["policy"]) / file).read_bytes() == (Path(summary["policy"]) / file).read_bytes()
    if not on_policy:
        recording = read_recording(tmp_path / "calm" / "episodes", where="test")
        assert len(recording.description.lengths) == 60
        drawn = recording.description.parameters
        assert {name: len(values) for name, values in drawn.items()} == dict.fromkeys(PARAMETERS, 60)
        noise = recording.tables["actions"] - recording.tables["means"]
        assert noise.std() == pytest.approx(np.exp(-2), rel=0.1)


def test_recorded_episodes_are_cloned(tmp_path: Path) -> None:
    """Actions that are a linear function of the observation, of joints with another name."""
    random = np.random.default_rng(0)
    seen = random.standard_normal((600, 3)).astype(np.float32)
    actions = seen @ np.array([[0.5], [-0.2], [0.1]], dtype=np.float32)
    layout: dict[str, tuple[tuple[str, int], ...]] = {"policy": (("pole_direction", 2), ("cart_position", 1))}
    description = RecordingDescription(joints=("rail",), control_s=0.02, lengths=(100,) * 6, layout=layout)
    recording = Recording(description=description, tables={"obs/policy": seen, "actions": actions})
    write_recording(tmp_path / "episodes", recording)
    settings = {"path": tmp_path / "episodes", "epochs": 30, "batch_size": 64, "rename_joints": {"rail": "slide"}}
    summary = cloned(tmp_path, "run", clone=settings, control={"eval_episodes": 0}, robot={"history": 1})
    assert losses(tmp_path / "run", "eval/loss")[-1] < 0.01 * float(actions.var())
    assert summary["figures"] == {}
    assert "without names" not in (tmp_path / "view.txt").read_text()
    unnamed = RecordingDescription(joints=(), control_s=0.02, lengths=(100,) * 6)
    write_recording(
        tmp_path / "unnamed", Recording(description=unnamed, tables={"obs/state": seen, "actions": actions})
    )
    again = settings | {"path": tmp_path / "unnamed", "epochs": 1, "rename_joints": {}}
    cloned(tmp_path, "again", clone=again, control={"eval_episodes": 0}, robot={"history": 1})
    assert "without names are taken in the task's order" in (tmp_path / "view.txt").read_text()
    with pytest.raises(UserError, match="do not move slide"):
        check_robot_stage("clone", spec_of(tmp_path, clone=settings | {"rename_joints": {}}))


@pytest.mark.parametrize(
    ("clone", "teacher", "message", "hint"),
    [
        ({}, {}, "neither clone.path nor clone.teacher", "recorded episodes or a teacher"),
        ({"path": "a", "teacher": "b"}, {}, "both given", "recorded episodes or a teacher"),
        ({"path": "a", "on_policy": True}, {}, "on_policy needs a teacher", "clone.teacher"),
        ({"path": "missing"}, {}, "holds no recorded episodes", "LeRobot"),
        ({"teacher": "missing"}, {}, "holds no trained policy", "control or clone stage"),
        ({"teacher": "teacher"}, {"policies": {"policy": ("slid",)}}, "moves the joint slid,", "did you mean slide?"),
        ({"teacher": "teacher"}, {"control_s": 0.01}, "acts every 10 ms", "change control_s"),
        ({"teacher": "teacher", "on_policy": True}, {"history": 3}, "reads 3 observations", "robot.history = 3"),
        ({"teacher": "teacher"}, {"layout": {"policy": (("pole", 2),)}}, "reads the term pole,", "pole_direction"),
    ],
)
def test_bad_input_is_found_before_the_stage_runs(
    tmp_path: Path, clone: dict[str, Any], teacher: dict[str, Any], message: str, hint: str
) -> None:
    write_teacher(tmp_path, **teacher)
    settings = {key: tmp_path / value if isinstance(value, str) else value for key, value in clone.items()}
    with pytest.raises(UserError, match=message) as raised:
        check_robot_stage("clone", spec_of(tmp_path, clone=settings))
    assert hint in raised.value.hint
