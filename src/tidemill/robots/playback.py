"""Episodes that a page plays without a graphics driver: the shapes of a model, and how its bodies move.

`episodes.json` of a run, by key:

    shapes   [kind, body, position, quaternion, size, colour]: a geom in the frame of its body; body 0 is the world.
             Kinds and sizes are MuJoCo's; meshes are their bounding boxes.
    plays    one for each evaluation: `when`, `label`, `frame_s`, `episodes` (the frames of each), and `data`
             (base64, deflate): int16 [7, bodies, frames of all episodes], differences along frames of positions in
             millimetres and of quaternions in units of 1/QUATERNION.
"""

from __future__ import annotations

import base64
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.robots.episodes import PlayedEpisodes
from tidemill.telemetry.jsonl import write_atomically
from tidemill.telemetry.run_dir import PLAYBACK, read_json

if TYPE_CHECKING:
    import mujoco

FRAME_S = 0.04  # between two frames, at least
MOST_FRAMES = 250  # of an episode
MOST_EPISODES = 4
LAST_GROUP = 2  # of geoms: viewers hide those of higher groups, which collide in place of what is seen
QUATERNION = 8192


def record_episodes(
    folder: Path, when: str, model: mujoco.MjModel, played: PlayedEpisodes, *, control_s: float
) -> None:
    """Add the episodes of the first worlds of an evaluation, as `write_playback`. Without poses nothing is written."""
    chunk = played.chunks[0]
    if "poses" not in chunk:
        return
    first = chunk["episode/number"] == 0
    lengths = dict(zip(chunk["episode/world"][first].tolist(), chunk["episode/length"][first].tolist(), strict=True))
    worlds = sorted(lengths)[:MOST_EPISODES]
    ended_at = np.array([lengths[world] for world in worlds])
    label = f"success in {played.count('success')} of {len(played)} episodes"
    write_playback(folder, when, model, chunk["poses"][worlds], control_s=control_s, ended_at=ended_at, label=label)


def write_playback(
    folder: Path,
    when: str,
    model: mujoco.MjModel,
    poses: npt.NDArray[np.float32],
    *,
    control_s: float,
    ended_at: npt.NDArray[np.integer[Any]],
    label: str,
) -> None:
    """Add episodes to `folder/episodes.json`, in place of those of the same `when`.

    Args:
        when: "before" or "after".
        poses: [E, T, nq]; the first `MOST_EPISODES` episodes are kept.
        control_s: time between two poses.
        ended_at: [E], poses of each episode.
        label: their result, for readers.
    """
    lengths = [int(length) for length in ended_at[:MOST_EPISODES]]
    stride = max(1, round(FRAME_S / control_s), math.ceil(max(lengths) / MOST_FRAMES))
    frames = [poses[at, :length:stride] for at, length in enumerate(lengths)]
    bodies = _moving(model)
    play = {
        "when": when,
        "label": label,
        "frame_s": control_s * stride,
        "episodes": [len(one) for one in frames],
        "data": _packed(_motion(model, bodies, np.concatenate(frames))),
    }
    path = folder / PLAYBACK
    others = [one for one in read_json(path).get("plays", []) if one["when"] != when]
    document = {"shapes": _shapes(model, bodies), "plays": [*others, play]}
    write_atomically(path, msgspec.json.encode(document))


def _moving(model: mujoco.MjModel) -> list[int]:
    """The bodies that a joint moves, directly or not."""
    return [body for body in range(1, model.nbody) if model.body_weldid[body]]


def _motion(model: mujoco.MjModel, bodies: list[int], poses: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Positions and quaternions of bodies, [7, bodies, frames]."""
    import mujoco

    data = mujoco.MjData(model)
    motion = np.empty((7, len(bodies), len(poses)))
    for at, pose in enumerate(poses):
        data.qpos[:] = pose
        mujoco.mj_kinematics(model, data)
        motion[:3, :, at] = data.xpos[bodies].T
        motion[3:, :, at] = data.xquat[bodies].T
    # q and -q are the same rotation: the page interpolates between the two that are closer.
    turns = np.sum(motion[3:, :, 1:] * motion[3:, :, :-1], axis=0) < 0
    motion[3:, :, 1:] *= np.where(np.cumsum(turns, axis=1) % 2, -1, 1)
    return motion


def _packed(motion: npt.NDArray[np.float64]) -> str:
    units = np.array([1000] * 3 + [QUATERNION] * 4)[:, None, None]
    whole = np.clip(np.round(motion * units), -32768, 32767).astype(np.int64)
    steps = np.diff(whole, axis=2, prepend=0).astype("<i2")  # wraps around, as the sum in the page does
    return base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()


def _shapes(model: mujoco.MjModel, bodies: list[int]) -> list[list[Any]]:
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    number = {body: at + 1 for at, body in enumerate(bodies)}
    drawn = []
    for geom in range(model.ngeom):
        material = model.geom_matid[geom]
        colour = model.mat_rgba[material] if material >= 0 else model.geom_rgba[geom]
        if model.geom_group[geom] > LAST_GROUP or colour[3] == 0:
            continue
        kind = mujoco.mjtGeom(model.geom_type[geom]).name.removeprefix("mjGEOM_").lower()
        body, size = int(model.geom_bodyid[geom]), model.geom_size[geom]
        position, quaternion = model.geom_pos[geom].copy(), model.geom_quat[geom].copy()
        if kind in ("mesh", "hfield", "sdf"):
            kind, size = "box", model.geom_aabb[geom, 3:]
            moved = np.zeros(3)
            mujoco.mju_rotVecQuat(moved, model.geom_aabb[geom, :3], quaternion)
            position += moved
        if body not in number:  # in the frame of the world
            placed, turned = np.zeros(3), np.zeros(4)
            mujoco.mju_mulPose(placed, turned, data.xpos[body], data.xquat[body], position, quaternion)
            position, quaternion = placed, turned
        values = [np.round(each.astype(float), 4).tolist() for each in (position, quaternion, size, colour)]
        drawn.append([kind, number.get(body, 0), *values])
    return drawn
