from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.core.errors import UserError
from tidemill.robots.recordings import (
    Recording,
    RecordingDescription,
    for_joints,
    observations,
    read_recording,
    write_recording,
)

STATES = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]])  # of episodes of 3 and 2 rows


def small(**changes: Any) -> Recording:
    description: dict[str, Any] = {
        "joints": ("hip", "knee"),
        "control_s": 0.02,
        "lengths": (3, 2),
        "layout": {"policy": (("angle", 1), ("speed", 1))},
        "measured": ("hip", "knee"),
    }
    tables = {"obs/policy": STATES.astype(np.float32), "actions": 10 * STATES.astype(np.float32), "positions": STATES}
    return Recording(description=RecordingDescription(**(description | changes)), tables=tables)


def write_lerobot(folder: Path, **changes: Any) -> None:
    """Two data files; the rows of the second episode are spread over both."""
    motors = ["knee.pos", "hip.pos"]
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": motors}},
        "observation.images.top": {"dtype": "video", "shape": [480, 640, 3], "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": [2], "names": motors},
        "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    info = {
        "codebase_version": "v3.0",
        "total_frames": 5,
        "fps": 50,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": features,
    }
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps(info | changes))
    (folder / "data" / "chunk-000").mkdir(parents=True)
    episodes, frames = [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]
    for number, rows in enumerate(([4, 1, 0], [2, 3])):
        table = {
            "observation.state": [STATES[at].tolist() for at in rows],
            "action": [(10 * STATES[at]).tolist() for at in rows],
            "episode_index": [episodes[at] for at in rows],
            "frame_index": [frames[at] for at in rows],
        }
        pq.write_table(pa.table(table), folder / "data" / "chunk-000" / f"file-{number:03d}.parquet")


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_recording(tmp_path / "episodes", small())
    found = read_recording(tmp_path / "episodes", where="clone.path")
    assert found.description == small().description
    assert [rows.tolist() for rows in found.episodes("positions")] == [STATES[:3].tolist(), STATES[3:].tolist()]


def test_a_lerobot_dataset_is_read_in_the_order_of_frames_and_matched_by_names(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "set")
    found = read_recording(tmp_path / "set", where="clone.path")
    assert found.description.lengths == (3, 2)
    assert found.description.control_s == 0.02
    assert found.description.measured == ("knee", "hip")
    assert found.tables["obs/state"].tolist() == STATES.tolist()
    matched = for_joints(found, ("hip", "shin"), 0.02, rename={"knee": "shin"}, where="clone")
    assert matched.tables["actions"].tolist() == (10 * STATES[:, ::-1]).tolist()
    assert matched.description.measured == ("shin", "hip")
    # Of a task with one group, observation.state is that group.
    joints, layout = {"policy": {"angle": ("hip", "shin")}}, {"policy": (("angle", 2),)}
    inputs = observations(matched, ["policy"], layout, joints, history=1, where="clone.path")
    assert inputs.tolist() == STATES[:, ::-1].tolist()


def test_a_lerobot_dataset_without_names_has_the_order_of_the_task(tmp_path: Path) -> None:
    feature = {"dtype": "float32", "shape": [2], "names": None}
    write_lerobot(tmp_path / "set", features={"observation.state": feature, "action": feature})
    found = read_recording(tmp_path / "set", where="clone.path")
    matched = for_joints(found, ("hip", "shin"), 0.02, rename={}, where="clone")
    assert matched.tables["actions"].tolist() == (10 * STATES).tolist()
    joints, layout = {"policy": {"angle": ("hip", "shin")}}, {"policy": (("angle", 2),)}
    inputs = observations(matched, ["policy"], layout, joints, history=1, where="clone.path")
    assert inputs.tolist() == STATES.tolist()
    with pytest.raises(UserError, match="do not move ankle; they move hip, knee"):
        for_joints(found, ("hip", "knee", "ankle"), 0.02, rename={}, where="clone")
    with pytest.raises(UserError, match="move further columns, which the task does not"):
        for_joints(found, ("hip",), 0.02, rename={}, where="clone")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"b": ["knee.pos"], "a": ["hip.pos"]}, ("knee", "hip")),
        (["knee", "hip"], ("knee", "hip")),
    ],
)
def test_names_of_a_lerobot_feature(names: Any, expected: tuple[str, ...], tmp_path: Path) -> None:
    action = {"dtype": "float32", "shape": [2], "names": names}
    write_lerobot(tmp_path / "set", features={"action": action})
    assert read_recording(tmp_path / "set", where="clone.path").description.joints == expected


@pytest.mark.parametrize(
    ("joints", "name", "hint"),
    [
        ({"angle": ("hip",), "speed": ("knie",)}, "knie", "did you mean knee?"),
        ({"angle": ("hip",), "speed": ("hip",)}, "angle/hip", "one of knee, hip"),  # there are two of this joint
        ({"angle": ("hip",)}, "speed/0", "one of knee, hip"),
    ],
)
def test_states_of_other_joints_are_refused(
    joints: dict[str, tuple[str, ...]], name: str, hint: str, tmp_path: Path
) -> None:
    write_lerobot(tmp_path / "set")
    found = read_recording(tmp_path / "set", where="clone.path")
    layout = {"policy": (("angle", 1), ("speed", 1))}
    with pytest.raises(UserError, match=f'no recorded column of observations "{name}"') as raised:
        observations(found, ["policy"], layout, {"policy": joints}, history=1, where="clone.path")
    assert hint in raised.value.hint


@pytest.mark.parametrize("names", [["speed/0", "hip"], ["speed/0", "angle/hip.pos"]])
def test_a_state_of_terms_without_joints_is_matched_by_names(names: list[str], tmp_path: Path) -> None:
    write_lerobot(tmp_path / "set")
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    info["features"]["observation.state"]["names"] = names
    (tmp_path / "set" / "meta" / "info.json").write_text(json.dumps(info))
    found = read_recording(tmp_path / "set", where="clone.path")
    layout, joints = {"policy": (("angle", 1), ("speed", 1))}, {"policy": {"angle": ("hip",)}}
    inputs = observations(found, ["policy"], layout, joints, history=1, where="clone.path")
    np.testing.assert_array_equal(inputs, STATES[:, ::-1])


def test_windows_of_observations_start_again_with_each_episode() -> None:
    layout = small().description.layout
    inputs = observations(small(), ["policy"], layout, {}, history=2, where="clone.path")
    assert inputs.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [6, 7, 6, 7], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("joints", "control_s", "rename", "message", "hint"),
    [
        (("hips", "knee"), 0.02, {}, "do not move hips", "did you mean hip?"),
        (("hip",), 0.02, {}, "move knee, which the task does not", "the task moves hip"),
        (("hip", "knee", "ankle"), 0.02, {}, "do not move ankle", "clone.rename_joints"),
        (("hip", "knee"), 0.02, {"knie": "knee"}, 'no recorded joint "knie"', "did you mean knee?"),
        (("hip", "knee"), 0.01, {}, "recorded at 50 Hz, but the task acts at 100 Hz", "resample"),
    ],
)
def test_demonstrations_of_another_robot_are_refused(
    joints: tuple[str, ...], control_s: float, rename: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        for_joints(small(), joints, control_s, rename=rename, where="clone")
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("groups", "layout", "message", "hint"),
    [
        (["polisy"], {"polisy": (("angle", 2),)}, 'no recorded group of observations "polisy"', "did you mean policy?"),
        (["policy"], {"policy": (("speed", 1), ("angle", 1))}, r"recorded with angle \(1\), speed \(1\)", "this task"),
    ],
)
def test_other_observations_are_refused(groups: list[str], layout: Any, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        observations(small(), groups, layout, {}, history=1, where="clone.path")
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"codebase_version": "v2.1"}, "version v2.1, not v3", "convert"),
        ({"total_frames": 6}, "5 of 6 frames", "download"),
        ({"fps": 0}, "no recorded episodes", "LeRobot v3 dataset"),
        ({"features": {}, "data_path": None}, "no recorded episodes", "LeRobot v3 dataset"),
    ],
)
def test_lerobot_datasets_that_cannot_be_used(tmp_path: Path, changes: Any, message: str, hint: str) -> None:
    write_lerobot(tmp_path / "set", **changes)
    with pytest.raises(UserError, match=message) as raised:
        read_recording(tmp_path / "set", where="clone.path")
    assert hint in raised.value.hint


def test_a_folder_without_episodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no recorded episodes"):
        read_recording(tmp_path, where="clone.path")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"actions": np.zeros((5, 3), np.float32)}, r"actions has the shape \[5, 3\], not \[5, 2\]"),
        ({"actions": np.full((5, 2), np.nan, np.float32)}, "row 0 of actions is not finite"),
        ({"positions": np.zeros((4, 2))}, "positions has 4 rows, but the episodes have 5"),
    ],
)
def test_tables_that_do_not_fit_their_description_are_refused(tables: Any, message: str, tmp_path: Path) -> None:
    recording = small()
    changed = msgspec.structs.replace(recording, tables=recording.tables | tables)
    write_recording(tmp_path, changed)
    with pytest.raises(UserError, match=message):
        read_recording(tmp_path, where="clone.path")
