"""Recorded episodes: demonstrations to imitate, and logs from which parameters are identified.

The project's format is a folder with `recording.json` and `recording.safetensors`. The tables have one row for each
control step of all episodes, one episode after another; a row holds what was measured before its action:

    obs/GROUP   float32 [rows, width], one observation, without history
    actions     float32 [rows, joints], as a policy returns them
    positions   float64 [rows, measured joints], in rad or m
    controls    float64 [rows, joints], targets or forces of the actuators; default: those of the actions

LeRobot v3 datasets are read as the same tables: `observation.NAME` is `obs/NAME`, `action` is `actions`, and an
`observation.state` whose columns have names is also `positions`. Columns without names have the task's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tidemill.config.keys import did_you_mean
from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json
from tidemill.data.row_files import import_extra
from tidemill.robots.engine import known_name
from tidemill.robots.policy_arrays import Singles
from tidemill.telemetry.jsonl import write_json

DESCRIPTION, TABLES = "recording.json", "recording.safetensors"
LEROBOT = Path("meta") / "info.json"
LEROBOT_VERSION = "v3."
POSITION_SUFFIX = ".pos"  # of joints in LeRobot's names
RATE_TOLERANCE = 0.01
ACTED = ("actions", "means")  # tables of what a policy returned

Tables = dict[str, npt.NDArray[Any]]


class RecordingDescription(Record):
    """What the columns of a recording mean, by name."""

    joints: tuple[str, ...]  # that the actions move, in their order; of LeRobot: () without names
    control_s: float  # between two rows
    lengths: tuple[int, ...]  # rows of each episode
    task: str = ""
    layout: dict[str, tuple[tuple[str, int], ...]] = {}  # terms and widths of each group; of LeRobot: none
    measured: tuple[str, ...] = ()  # joints of `positions`, in their order
    parameters: dict[str, tuple[float, ...]] = {}  # of each simulated episode, such as factors of `mass`


class Recording(Record):
    """Recorded episodes."""

    description: RecordingDescription
    tables: Tables

    def episodes(self, name: str) -> list[npt.NDArray[Any]]:
        """A table, cut into episodes."""
        return np.split(self.tables[name], np.cumsum(self.description.lengths)[:-1])


def write_recording(folder: Path, recording: Recording) -> None:
    """Write both files into a new or existing folder. Raises OSError: the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(each) for name, each in recording.tables.items()}, folder / TABLES)
    write_json(folder / DESCRIPTION, msgspec.to_builtins(recording.description))  # last: a kill leaves no recording


def read_recording(folder: Path, *, where: str) -> Recording:
    """Read a folder of the project's format, or a LeRobot v3 dataset.

    Raises:
        UserError: `folder`, at the key `where`, holds no recorded episodes.
    """
    try:
        if (folder / LEROBOT).is_file():
            recording = _read_lerobot(folder, where=where)
        else:
            description = decode_json((folder / DESCRIPTION).read_bytes(), RecordingDescription)
            recording = Recording(description=description, tables=dict(load_file(folder / TABLES)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, msgspec.MsgspecError) as error:
        cause = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        hint = f"name a folder with {DESCRIPTION} and {TABLES}, or a LeRobot v3 dataset with {LEROBOT}"
        raise UserError(f"{folder} holds no recorded episodes ({cause})", where=where, hint=hint) from error
    _check_tables(recording, folder)
    return recording


def _check_tables(recording: Recording, folder: Path) -> None:
    """Raises UserError: a table does not fit the description, or has numbers that are not finite."""
    description, rows = recording.description, sum(recording.description.lengths)
    named = dict.fromkeys(("actions", "means", "controls"), description.joints) | {"positions": description.measured}
    widths = {name: len(columns) for name, columns in named.items() if columns}
    problem = "" if rows else "there are no rows"
    for name, table in recording.tables.items():
        if len(table) != rows:
            problem = f"{name} has {len(table)} rows, but the episodes have {rows}"
        elif table.ndim != 2 or table.shape[1] != widths.get(name, table.shape[1]):
            problem = f"{name} has the shape {list(table.shape)}, not {[rows, widths.get(name, 'width')]}"
        elif not np.isfinite(table).all():
            problem = f"row {int(np.argmin(np.isfinite(table).all(axis=1)))} of {name} is not finite"
    if not {"actions", "controls"} & set(recording.tables):
        problem = "there are no actions"
    if problem:
        raise UserError(problem, where=str(folder), hint="record the episodes again")


# LeRobot.


def _read_lerobot(folder: Path, *, where: str) -> Recording:
    info = decode_json((folder / LEROBOT).read_bytes(), dict)
    version = str(info.get("codebase_version"))
    if not version.startswith(LEROBOT_VERSION):
        hint = "convert it with lerobot.datasets.v30.convert_dataset_v21_to_v30"
        raise UserError(f"{folder} is a LeRobot dataset of version {version}, not v3", where=where, hint=hint)
    features = info["features"]
    joints, measured = (_column_names(features.get(name, {})) for name in ("action", "observation.state"))
    is_table = {name: each["dtype"].startswith("float") and len(each["shape"]) == 1 for name, each in features.items()}
    observed = [name for name in features if name.startswith("observation.") and is_table[name]]
    rows = _lerobot_rows(folder, info, ["action", *observed])
    tables: Tables = {f"obs/{name.removeprefix('observation.')}": rows[name].astype(np.float32) for name in observed}
    tables["actions"] = rows["action"].astype(np.float32)
    if measured:
        tables["positions"] = rows["observation.state"].astype(np.float64)
    lengths = np.unique(rows["episode_index"], return_counts=True)[1]
    description = RecordingDescription(
        joints=joints, control_s=1 / float(info["fps"]), lengths=tuple(lengths.tolist()), measured=measured
    )
    return Recording(description=description, tables=tables)


def _column_names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a feature's columns, without LeRobot's suffix of positions; empty unless every column has one."""
    names = feature.get("names") or ()
    if isinstance(names, Mapping):  # {"motors": [...], "gripper": [...]}
        names = [name for part in names.values() for name in part]
    if [len(names)] != list(feature.get("shape", ())):
        return ()
    return tuple(str(name).removesuffix(POSITION_SUFFIX) for name in names)


def _lerobot_rows(folder: Path, info: Mapping[str, Any], columns: Sequence[str]) -> Tables:
    """Columns of all data files, in the order of episodes and frames."""
    parquet: Any = import_extra("pyarrow.parquet", package="pyarrow", needed_by="LeRobot datasets", extra="data")
    pattern = re.sub(r"\{[^}]*\}", "*", info["data_path"])
    keys = ["episode_index", "frame_index"]
    parts = [parquet.read_table(file, columns=[*keys, *columns]) for file in sorted(folder.glob(pattern))]
    frames = sum(len(part) for part in parts)
    if frames != info["total_frames"] or not frames:
        what = f"{folder / pattern} has {frames} of {info['total_frames']} frames"
        raise UserError(what, where=str(folder / LEROBOT), hint="download the data set again")
    rows = {name: np.concatenate([np.array(part[name].to_pylist()) for part in parts]) for name in [*keys, *columns]}
    order = np.lexsort((rows["frame_index"], rows["episode_index"]))
    return {name: values[order].reshape(frames, -1) for name, values in rows.items()}


# What a job reads.


def for_joints(
    recording: Recording, joints: Sequence[str], control_s: float, *, rename: Mapping[str, str], where: str
) -> Recording:
    """The recording with the actions in the order of a task's joints, and the task's names of joints.

    Raises:
        UserError: it has other joints, or another control rate.
    """
    description = recording.description
    rename = {name.removesuffix(POSITION_SUFFIX): new for name, new in rename.items()}
    for name in rename:
        known = (*description.joints, *description.measured)
        known_name(name, known, "recorded joint", where=f"{where}.rename_joints")
    moved = {name: recording.tables[name] for name in ("actions", "controls") if name in recording.tables}
    in_order = [*joints, "further columns"][: next(iter(moved.values())).shape[1]]
    names = [rename.get(name, name) for name in description.joints] or in_order
    missing, extra = ([each for each in one if each not in other] for one, other in ((joints, names), (names, joints)))
    if missing:
        what = f"the recorded episodes do not move {', '.join(missing)}; they move {', '.join(names)}"
        hint = did_you_mean(missing[0], extra) or "names must agree; see clone.rename_joints"
        raise UserError(what, where=f"{where}.path", hint=hint)
    if extra:
        what = f"the recorded episodes move {', '.join(extra)}, which the task does not"
        raise UserError(what, where=f"{where}.path", hint=f"the task moves {', '.join(joints)}")
    if abs(description.control_s / control_s - 1) > RATE_TOLERANCE:
        rates = f"recorded at {1 / description.control_s:g} Hz, but the task acts at {1 / control_s:g} Hz"
        hint = "resample them, or use a task of the same control_s"
        raise UserError(f"the episodes were {rates}", where=f"{where}.path", hint=hint)
    order = [names.index(joint) for joint in joints]
    columns = {name: table[:, order] for name, table in moved.items()}
    measured = tuple(rename.get(name, name) for name in description.measured)
    description = msgspec.structs.replace(description, joints=tuple(joints), measured=measured)
    return Recording(description=description, tables=recording.tables | columns)


def observations(
    recording: Recording,
    groups: Sequence[str],
    layout: Mapping[str, Sequence[tuple[str, int]]],
    joint_terms: Mapping[str, Mapping[str, Sequence[str]]],
    *,
    history: int,
    where: str,
) -> Singles:
    """What a policy that reads `groups` with `history` would have read in every row, [rows, inputs].

    A dataset without groups of this name stands for one group by its `observation.state`, matched by `joint_terms`.

    Raises:
        UserError: the recording has no such group, or one of other terms.
    """
    tables = {name.removeprefix("obs/"): each for name, each in recording.tables.items() if name.startswith("obs/")}
    parts = []
    for group in groups:
        recorded_group = "state" if group not in tables and len(groups) == 1 and "state" in tables else group
        known_name(recorded_group, tables, "recorded group of observations", where=where)
        terms = tuple((term, int(width)) for term, width in layout[group])
        recorded_terms = recording.description.layout.get(group, ())
        columns = tables[recorded_group].shape[1]
        if recorded_terms not in ((), terms) or columns != sum(width for _, width in terms):
            has, wanted = (", ".join(f"{term} ({width})" for term, width in each) for each in (recorded_terms, terms))
            has = has or f"{columns} columns"
            what = f"observations {group} were recorded with {has}, but the task's are {wanted}"
            raise UserError(what, where=where, hint="record the episodes with this task")
        order = np.arange(columns)
        if joint_terms and recorded_group == "state" and not recorded_terms and recording.description.measured:
            joints = joint_terms[group]
            names = [f"{term}/{part}" for term, width in terms for part in joints.get(term) or range(width)]
            order = _order(recording.description.measured, names)
        episodes = recording.episodes(f"obs/{recorded_group}")
        parts += [np.concatenate([_windows(rows[:, order], history) for rows in episodes])]
    return np.concatenate(parts, axis=1)


def _order(recorded_names: Sequence[str], columns: Sequence[str]) -> npt.NDArray[np.intp]:
    """Where columns TERM/JOINT and TERM/NUMBER are among those of a dataset, which may name the only column of a joint
    JOINT."""
    parts = [column.split("/", 1)[1] for column in columns]
    names = [
        part if column not in recorded_names and parts.count(part) == 1 and not part.isdigit() else column
        for column, part in zip(columns, parts, strict=True)
    ]
    for name in names:
        known_name(name, recorded_names, "recorded column of observations", where="clone.rename_joints")
    return np.array([recorded_names.index(name) for name in names])


def _windows(rows: Singles, history: int) -> Singles:
    """Each row with the `history - 1` before it, newest last; the first one stands for those before it."""
    at = np.arange(len(rows))[:, None] + np.arange(1 - history, 1)
    windows: Singles = rows[np.maximum(at, 0)].reshape(len(rows), -1)
    return windows


def recorded(experiences: Sequence[Tables], groups: Sequence[str], history: int) -> tuple[Tables, tuple[int, ...]]:
    """Tables and lengths of the first episode of every world of `episodes.play_episodes`."""
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*(f"obs/{each}" for each in groups), *ACTED)}
    lengths = []
    for experience in experiences:
        ended = experience["terminated"] | experience["truncated"]
        for world, length in enumerate((ended.argmax(axis=1) + 1).tolist()):
            lengths.append(length)
            for name, rows in parts.items():
                windows = experience[name][world, :length]
                rows.append(windows if name in ACTED else windows[:, -(windows.shape[1] // history) :])
    return {name: np.concatenate(rows) for name, rows in parts.items()}, tuple(lengths)
