from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt
import pytest

from tidemill.robots.playback import QUATERNION, write_playback

MODEL = mujoco.MjModel.from_xml_string("""
<mujoco>
  <worldbody>
    <geom type="plane" size="0 0 1"/>
    <body pos="1 2 0" euler="0 0 90">
      <geom type="box" size="0.1 0.2 0.3" pos="0.5 0 0" rgba="1 0 0 1"/>
    </body>
    <body name="base">
      <freejoint/>
      <geom type="sphere" size="0.1"/>
      <geom type="box" size="1 1 1" group="3"/>
      <body pos="0 0 1">
        <joint axis="0 1 0"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0 0 1"/>
      </body>
    </body>
  </worldbody>
</mujoco>
""")


def poses(episodes: int, steps: int) -> npt.NDArray[np.float32]:
    """The base moves and turns about an axis by more than a full turn, and the joint moves."""
    found = np.zeros((episodes, steps, MODEL.nq), np.float32)
    times = np.linspace(0, 1, steps)
    for at in range(episodes):
        found[at, :, 0] = 3 * times - at
        found[at, :, 3], found[at, :, 6] = np.cos(4 * times), np.sin(4 * times)
        found[at, :, 7] = 2 * times
    return found


def motion(play: dict[str, Any], bodies: int) -> npt.NDArray[np.float64]:
    """What a page computes, [7, bodies, frames]."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(play["data"])), "<i2").reshape(7, bodies, -1)
    whole = np.cumsum(steps, axis=2, dtype=np.int16).astype(float)
    units = np.array([1000.0] * 3 + [QUATERNION] * 4)
    return np.asarray(whole / units[:, None, None])


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "episodes.json").read_bytes())
    return found


def test_bodies_are_where_mujoco_has_them(tmp_path: Path) -> None:
    moves = poses(2, 11)
    write_playback(tmp_path, "after", MODEL, moves, control_s=0.04, ended_at=np.array([11, 5]), label="2 of 2")
    (play,) = read(tmp_path)["plays"]
    assert play["episodes"] == [11, 5] and play["frame_s"] == 0.04 and play["label"] == "2 of 2"
    found, data = motion(play, 2), mujoco.MjData(MODEL)
    for frame, pose in enumerate([*moves[0], *moves[1, :5]]):
        data.qpos[:] = pose
        mujoco.mj_kinematics(MODEL, data)
        np.testing.assert_allclose(found[:3, :, frame], data.xpos[2:].T, atol=0.00051)
        turned = np.abs(np.sum(found[3:, :, frame] * data.xquat[2:].T, axis=0))  # q and -q are the same rotation
        np.testing.assert_allclose(turned, 1, atol=2e-4)
    assert np.all(np.sum(found[3:, :, 1:11] * found[3:, :, :10], axis=0) > 0), "neighbours can be interpolated"


def test_shapes_are_what_a_viewer_shows(tmp_path: Path) -> None:
    write_playback(tmp_path, "before", MODEL, poses(1, 2), control_s=0.04, ended_at=np.array([2]), label="")
    plane, box, sphere, capsule = read(tmp_path)["shapes"]  # without the box of group 3
    assert [(shape[0], shape[1]) for shape in (plane, box, sphere, capsule)] == [
        ("plane", 0), ("box", 0), ("sphere", 1), ("capsule", 2),
    ]  # fmt: skip
    # Of a body that no joint moves: in the frame of the world, (1, 2) and half a metre along the turned x axis.
    assert box[2] == pytest.approx([1, 2.5, 0]) and box[5] == [1, 0, 0, 1]
    assert np.abs(box[3]) == pytest.approx([0.7071, 0, 0, 0.7071])
    assert capsule[2] == [0, 0, 0.5] and capsule[4][:2] == [0.05, 0.5]


@pytest.mark.parametrize(
    ("control_s", "steps", "frame_s", "frames"),
    [(0.02, 100, 0.04, 50), (0.01, 100, 0.04, 25), (0.05, 20, 0.05, 20), (0.02, 5000, 0.4, 250)],
)
def test_frames_are_few(tmp_path: Path, control_s: float, steps: int, frame_s: float, frames: int) -> None:
    moves = np.zeros((6, steps, MODEL.nq), np.float32)
    moves[:, :, 3] = 1
    write_playback(tmp_path, "after", MODEL, moves, control_s=control_s, ended_at=np.full(6, steps), label="")
    (play,) = read(tmp_path)["plays"]
    assert play["frame_s"] == pytest.approx(frame_s) and play["episodes"] == [frames] * 4


def test_a_repeated_evaluation_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for when, label in (("before", "0"), ("after", "1"), ("after", "2")):
        write_playback(tmp_path, when, MODEL, poses(1, 2), control_s=0.04, ended_at=np.array([2]), label=label)
    assert [(play["when"], play["label"]) for play in read(tmp_path)["plays"]] == [("before", "0"), ("after", "2")]
