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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import torch

from tidemill.config.keys import did_you_mean
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
from tidemill.robots.policy_arrays import pack
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy, read_policy
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
TEACHER = "teacher"


def check_clone(spec: RunSpec) -> None:
    """Raises UserError: a setting of `clone` cannot be used, or the episodes or the teacher are of another robot."""
    settings = spec.clone
    if (settings.path is None) == (settings.teacher is None):
        what = (
            "clone.path and clone.teacher are both given"
            if settings.path
            else "neither clone.path nor clone.teacher is given"
        )
        raise UserError(what, where="clone", hint="give recorded episodes or a teacher")
    if settings.on_policy and settings.teacher is None:
        what = "on_policy needs a teacher that labels what the student observes"
        raise UserError(what, where="clone.on_policy", hint="give clone.teacher, or leave on_policy out")
    given = settings.path or settings.teacher
    if str(given).startswith(PREFIX):
        return
    description = describe(spec)
    if settings.path is not None:
        _demonstrations(_recording(spec, description, settings.path), description)
    else:
        _teacher(spec, description)


def clone_policy(
    spec: RunSpec,
    *,
    telemetry_stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a policy in `spec.directory` that imitates; resumes like `jobs.control.train_control`.

    Returns:
        The summary, as `train_control`. With a teacher, `figures` has its return in the same episodes, and if that is
        positive the share of it that the policy reaches.

    Raises:
        UserError: the input, the run directory or the disk is at fault.
        DeadlineError: a wait timed out.
    """
    check_clone(spec)
    if not spec.clone.on_policy:
        trainer = spec.trainer.model_copy(update={"steps": spec.clone.epochs})
        spec = spec.model_copy(update={"trainer": trainer})
    prepared = _on_policy if spec.clone.on_policy else _recorded
    summary = train_policy(spec, "clone", prepared, telemetry_stream=telemetry_stream, callbacks=callbacks, stop=stop)
    if spec.clone.teacher is None or not summary["figures"]:
        return summary
    returns = asyncio.run(_teacher_returns(spec))
    summary["figures"]["teacher_return"] = returns
    summary["headline"] += f", of the teacher {returns:.3g}"
    if returns > 0:
        summary["figures"]["share_of_teacher"] = summary["figures"]["return_mean"] / returns
    return summary


# Methods.


async def _recorded(session: Session) -> Method:
    """Regression on recorded episodes; records them first if there is a teacher."""
    spec, description = session.spec, session.description
    folder = spec.clone.path or session.run.path / RECORDED
    if spec.clone.path is None and not (folder / DESCRIPTION).is_file():
        session.recorder.note(f"the teacher records {spec.clone.episodes} episodes")
        teacher = _teacher(spec, description)
        write_recording(folder, await _record(session, teacher))
    recording = _recording(spec, description, folder)
    training, held_out = _split(recording, _demonstrations(recording, description), seed=spec.run.seed)
    learner = RecordedLearner(
        session.networks, spec.clone, spec.control, training=training, held_out=held_out, seed=spec.run.seed
    )
    return Method(learner=learner, setup=setup_of(spec), simulates=False)


async def _on_policy(session: Session) -> Method:
    """The student acts with its mean, and every chunk also records the groups that the teacher reads."""
    spec, description = session.spec, session.description
    teacher = _teacher(spec, description)
    learner = TeacherLearner(session.networks, spec.clone, spec.control, description, teacher, seed=spec.run.seed)
    setup = setup_of(spec)
    setup = msgspec.structs.replace(setup, obs_groups=setup.obs_groups | {TEACHER: _groups_read(teacher.description)})
    return Method(learner=learner, setup=setup, deterministic=True)


# Recorded episodes.


def _recording(spec: RunSpec, description: PolicyDescription, folder: Path) -> Recording:
    recording = read_recording(folder, where="clone.path")
    rename = spec.clone.rename_joints
    return for_joints(recording, description.joints, description.control_s, rename=rename, where="clone")


def _demonstrations(recording: Recording, description: PolicyDescription) -> Demonstrations:
    """What each policy observed, and the actions it should take: the teacher's means where they were recorded."""
    actions = torch.from_numpy(recording.tables["means" if "means" in recording.tables else "actions"])
    inputs, labels = {}, {}
    for name, joints in description.policies.items():
        groups = description.obs_groups[name]
        observed = observations(recording, groups, description.layout, history=description.history, where="clone.path")
        inputs[name] = torch.from_numpy(observed)
        labels[name] = actions[:, [description.joints.index(joint) for joint in joints]]
    return Demonstrations(inputs=inputs, labels=labels)


def _split(recording: Recording, rows: Demonstrations, *, seed: int) -> tuple[Demonstrations, Demonstrations]:
    """Rows to learn, and rows of at least one episode to measure the loss on."""
    lengths = recording.description.lengths
    if len(lengths) < 2:
        what = f"there is {len(lengths)} recorded episode, and one is held out"
        raise UserError(what, where="clone.path", hint="record at least two")
    chosen = random_of(seed, "held out").permutation(len(lengths))[: max(1, round(HELD_OUT * len(lengths)))]
    held_out = torch.from_numpy(np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths))

    def part(mask: torch.Tensor) -> Demonstrations:
        inputs = {name: each[mask] for name, each in rows.inputs.items()}
        return Demonstrations(inputs=inputs, labels={name: each[mask] for name, each in rows.labels.items()})

    return part(~held_out), part(held_out)


async def _record(session: Session, teacher: StoredPolicy) -> Recording:
    """Episodes of the teacher with its exploration noise, which shows the student how to come back from mistakes."""
    spec, description = session.spec, session.description
    setup = _teacher_setup(spec, teacher.description)
    groups = tuple(dict.fromkeys(each for name in description.policies for each in description.obs_groups[name]))
    setup = msgspec.structs.replace(setup, obs_groups=setup.obs_groups | {"student": groups})
    played = await _play(
        session.spec, setup, teacher, purpose="recording", episodes=spec.clone.episodes, deterministic=False
    )
    tables, lengths = recorded(played.chunks, groups, teacher.description.history)
    lengths, rows = lengths[: spec.clone.episodes], sum(lengths[: spec.clone.episodes])
    tables = {name: table[:rows] for name, table in tables.items()}
    order = [joint for joints in description.policies.values() for joint in joints]  # of the means' columns
    tables["means"] = tables["means"][:, [order.index(joint) for joint in description.joints]]
    layout = {group: description.layout[group] for group in groups}
    described = RecordingDescription(
        joints=description.joints,
        control_s=description.control_s,
        lengths=lengths,
        task=description.task,
        layout=layout,
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


# The teacher.


def _teacher(spec: RunSpec, description: PolicyDescription) -> StoredPolicy:
    """Raises UserError: it is of another robot, or reads what the student's simulation does not have."""
    assert spec.clone.teacher is not None
    where = "clone.teacher"
    teacher = read_policy(spec.clone.teacher, where=where)
    found = teacher.description
    if found.policies != description.policies or found.joints != description.joints:
        unknown = [joint for joint in found.joints if joint not in description.joints]
        what = f"the teacher moves {', '.join(found.joints)}, and the task {', '.join(description.joints)}"
        hint = (did_you_mean(unknown[0], description.joints) if unknown else "") or "use a teacher of the same joints"
        raise UserError(what, where=where, hint=hint)
    if abs(found.control_s / description.control_s - 1) > 1e-6:
        what = f"the teacher acts every {found.control_s:g} s, and the task every {description.control_s:g} s"
        raise UserError(what, where=where, hint="use a teacher of the same control_s")
    for group in _groups_read(found):
        if found.layout[group] != description.layout.get(group):
            what = f"the teacher reads observations {group}, which have other terms in this task or none"
            raise UserError(what, where=where, hint="use a teacher of the same task")
    if spec.clone.on_policy and found.history > description.history:
        what = f"the teacher reads {found.history} observations, and the student records {description.history}"
        raise UserError(what, where=where, hint=f"set robot.history = {found.history}")
    return teacher


def _groups_read(description: PolicyDescription) -> tuple[str, ...]:
    read = [group for name in description.policies for group in description.obs_groups[name]]
    return tuple(dict.fromkeys(read))


def _teacher_setup(spec: RunSpec, teacher: PolicyDescription) -> SimulationSetup:
    """The student's robot, on which the teacher acts."""
    groups: Mapping[str, tuple[str, ...]] = {name: teacher.obs_groups[name] for name in teacher.policies}
    robot = spec.robot.model_dump(mode="json") | {"history": teacher.history}
    return SimulationSetup(robot=robot, obs_groups=dict(groups), activation=teacher.activation)


async def _play(
    spec: RunSpec, setup: SimulationSetup, teacher: StoredPolicy, *, purpose: str, episodes: int, deterministic: bool
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


async def _teacher_returns(spec: RunSpec) -> float:
    """The teacher's mean return in the episodes of the student's evaluation."""
    teacher = _teacher(spec, describe(spec))
    setup = undisturbed(_teacher_setup(spec, teacher.description))
    episodes = spec.control.eval_episodes
    played = await _play(spec, setup, teacher, purpose="evaluation", episodes=episodes, deterministic=True)
    return played.mean("return")
