"""Imitate recorded episodes, or a teacher: the stage `clone`.

```
 clone.path ───────────────────────────────────────▶ recording ─▶ epochs of regression ─┐
 clone.teacher ─▶ records clone.episodes ─▶ episodes/ ──┘                                ├─▶ policy
 clone.teacher, on_policy ─▶ student acts ─▶ teacher labels ─▶ regression, each iteration ─┘
```
The session, its checkpoints and evaluations are those of `jobs/control.py`: an iteration is an epoch of recorded
episodes, or a chunk of every shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import torch

from tidemill.config.load import PREFIX
from tidemill.config.robot import WORLDS_PER_SHARD
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.control import Method, Session, digest_of, train_policy
from tidemill.jobs.stopping import StopRequest
from tidemill.robots.episodes import PlayedEpisodes, play_episodes
from tidemill.robots.matching import matched_policy, setup_with, terms_of
from tidemill.robots.policy_arrays import pack
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.recordings import (
    DESCRIPTION,
    Recording,
    RecordingDescription,
    for_joints,
    observations,
    read_recording,
    recorded,
    write_recording,
)
from tidemill.robots.setup import SimulationSetup, describe, setup_of, task_of, undisturbed
from tidemill.robots.simulation import random_of
from tidemill.runtime.simulators import open_chunks
from tidemill.trainer.imitation import Demonstrations, RecordedLearner, TeacherLearner

RECORDED = "episodes"
"""Folder of the run with the episodes that the teacher recorded."""
HELD_OUT = 0.1
"""Share of the episodes that are not learned."""


def check_clone(spec: RunSpec) -> None:
    """Raises UserError: a setting of `clone` cannot be used, or the episodes or the teacher are of another robot."""
    settings = spec.clone
    if (settings.path is None) == (settings.teacher is None):
        which = "clone.path and clone.teacher are both" if settings.path else "neither clone.path nor clone.teacher is"
        raise UserError(f"{which} given", where="clone", hint="give recorded episodes or a teacher")
    if settings.on_policy and settings.teacher is None:
        what = "on_policy needs a teacher that labels what the student observes"
        raise UserError(what, where="clone.on_policy", hint="give clone.teacher, or leave on_policy out")
    if str(settings.path or settings.teacher).startswith(PREFIX):
        return
    description = describe(spec)
    if settings.path is not None:
        _demonstrations(spec, description, settings.path)
    else:
        _teacher(spec, description)


def clone_policy(
    spec: RunSpec,
    *,
    telemetry_stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a policy in `spec.directory` that imitates; resumes and raises like `jobs.control.train_control`.

    Returns:
        The summary, as `train_control`. With a teacher, `figures` has its return in the same episodes, and if that is
        positive the share of it that the policy reaches.
    """
    check_clone(spec)
    if not spec.clone.on_policy:
        trainer = spec.trainer.model_copy(update={"steps": spec.clone.epochs})
        spec = spec.model_copy(update={"trainer": trainer})
    prepared = _on_policy if spec.clone.on_policy else _recorded
    summary = train_policy(spec, "clone", prepared, telemetry_stream=telemetry_stream, callbacks=callbacks, stop=stop)
    if spec.clone.teacher is None or not summary["figures"]:
        return summary
    teacher = _teacher(spec, describe(spec))
    setup, episodes = undisturbed(setup_with(teacher.description, spec.robot)), spec.control.eval_episodes
    returns = asyncio.run(_play(spec, setup, teacher, "evaluation", episodes, deterministic=True)).mean("return")
    summary["figures"]["teacher_return"] = returns
    summary["headline"] += f", of the teacher {returns:.3g}"
    if returns > 0:
        summary["figures"]["share_of_teacher"] = summary["figures"]["return_mean"] / returns
    return summary


async def _recorded(session: Session) -> Method:
    """Regression on recorded episodes; records them first if there is a teacher."""
    spec, description = session.spec, session.description
    folder = spec.clone.path or session.run.path / RECORDED
    if spec.clone.path is None and not (folder / DESCRIPTION).is_file():
        session.recorder.note(f"the teacher records {spec.clone.episodes} episodes")
        write_recording(folder, await _record(session))
    rows, recording = _demonstrations(spec, description, folder)
    lengths = recording.lengths
    if not recording.joints or not (recording.measured or recording.layout):
        session.recorder.note("columns of the recorded episodes without names are taken in the task's order")
    if len(lengths) < 2:
        what = f"there is {len(lengths)} recorded episode, and one is held out"
        raise UserError(what, where="clone.path", hint="record at least two")
    shuffled = random_of(spec.run.seed, "held out").permutation(len(lengths))
    chosen = shuffled[: max(1, round(HELD_OUT * len(lengths)))]
    held_out = torch.from_numpy(np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths))
    learner = RecordedLearner(
        session.networks,
        spec.clone,
        spec.control,
        training=rows.rows(~held_out),
        held_out=rows.rows(held_out),
        seed=spec.run.seed,
    )
    return Method(learner=learner, setup=setup_of(spec), simulates=False)


async def _on_policy(session: Session) -> Method:
    """The student acts with its mean, and every chunk also records the groups that the teacher reads."""
    spec, description = session.spec, session.description
    teacher = _teacher(spec, description)
    learner = TeacherLearner(
        session.networks, spec.clone, spec.control, description=description, teacher=teacher, seed=spec.run.seed
    )
    setup = _also_recording(setup_of(spec), teacher.description)
    return Method(learner=learner, setup=setup, deterministic=True)


def _demonstrations(
    spec: RunSpec, description: PolicyDescription, folder: Path
) -> tuple[Demonstrations, RecordingDescription]:
    """What each policy observed and the actions it should take, the teacher's means where they were recorded."""
    recording = read_recording(folder, where="clone.path")
    recorded_as, terms, rename = recording.description, terms_of(spec), spec.clone.rename_joints
    recording = for_joints(recording, description.joints, description.control_s, rename=rename, where="clone")
    actions = torch.from_numpy(recording.tables["means" if "means" in recording.tables else "actions"])
    inputs, labels = {}, {}
    for name, joints in description.policies.items():
        groups = description.obs_groups[name]
        history = description.history
        observed = observations(recording, groups, description.layout, terms, history=history, where="clone.path")
        inputs[name] = torch.from_numpy(observed)
        labels[name] = actions[:, [description.joints.index(joint) for joint in joints]]
    return Demonstrations(inputs=inputs, labels=labels), recorded_as


async def _record(session: Session) -> Recording:
    """Episodes of the teacher with its exploration noise, which shows the student how to come back from mistakes."""
    spec, description = session.spec, session.description
    teacher, episodes = _teacher(spec, description), spec.clone.episodes
    setup = _also_recording(setup_with(teacher.description, spec.robot), description)
    played = await _play(spec, setup, teacher, "recording", episodes, deterministic=False)
    groups = _groups_read(description)
    tables, lengths = recorded(played.chunks, groups, teacher.description.history)
    lengths, rows = lengths[:episodes], sum(lengths[:episodes])
    tables = {name: table[:rows] for name, table in tables.items()}
    order = [joint for joints in description.policies.values() for joint in joints]  # of the means' columns
    tables["means"] = tables["means"][:, [order.index(joint) for joint in description.joints]]
    described = RecordingDescription(
        joints=description.joints,
        control_s=description.control_s,
        lengths=lengths,
        task=description.task,
        layout={group: description.layout[group] for group in groups},
        parameters=_parameters(played, spec.clone.episodes),
    )
    return Recording(description=described, tables=tables)


def _parameters(played: PlayedEpisodes, episodes: int) -> dict[str, tuple[float, ...]]:
    """What was drawn for each recorded episode, in the order of the worlds."""
    shards = np.arange(len(played)) // WORLDS_PER_SHARD
    order = np.lexsort((played.figures["world"], shards))[:episodes]
    prefix = "parameter/"
    drawn = {name: values for name, values in played.figures.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tuple(values[order].tolist()) for name, values in drawn.items()}


def _teacher(spec: RunSpec, description: PolicyDescription) -> StoredPolicy:
    """Raises UserError: it is of another robot, or reads what the student's simulation does not have."""
    teacher = matched_policy(spec, spec.clone.teacher, where="clone.teacher")
    history = teacher.description.history
    if spec.clone.on_policy and history > description.history:
        what = f"the teacher reads {history} observations, and the student records {description.history}"
        raise UserError(what, where="clone.teacher", hint=f"set robot.history = {history}")
    return teacher


def _groups_read(description: PolicyDescription) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group for name in description.policies for group in description.obs_groups[name]))


def _also_recording(setup: SimulationSetup, reader: PolicyDescription) -> SimulationSetup:
    """A simulation whose chunks also have the groups that another policy reads."""
    return msgspec.structs.replace(setup, obs_groups=setup.obs_groups | {"reader": _groups_read(reader)})


async def _play(
    spec: RunSpec, setup: SimulationSetup, teacher: StoredPolicy, purpose: str, episodes: int, *, deterministic: bool
) -> PlayedEpisodes:
    version = PolicyVersion(number=0, digest=digest_of(teacher.weights))
    async with open_chunks(spec, [setup], run=None, recorder=None, clock=LoopClock()) as chunks:
        await chunks.publish(version, pack(teacher.weights))
        return await play_episodes(
            chunks,
            version.number,
            purpose=purpose,
            seed=spec.run.seed,
            episodes=episodes,
            steps=task_of(spec.robot).steps_per_episode(),
            deterministic=deterministic,
        )
