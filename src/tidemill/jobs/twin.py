"""The stage `twin`: a policy in another engine, or with other parameters, over a grid.

Every cell is a simulation with fixed parameters, and its episodes are chunks. A finished cell is kept in its own file,
so that a killed stage computes the others only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.load import PREFIX
from tidemill.config.robot import RandomiseConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion
from tidemill.jobs.stopping import StopRequest
from tidemill.robots.engine import check_model
from tidemill.robots.episodes import PlayedEpisodes, play_episodes
from tidemill.robots.matching import check_names, joint_terms, match_policy, policy_digest
from tidemill.robots.policy_arrays import pack
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.setup import SimulationSetup, build, describe, setup_of
from tidemill.robots.simulation import Simulation
from tidemill.robots.tasks import open_task
from tidemill.runtime.simulators import open_chunks
from tidemill.telemetry.jsonl import encode, write_atomically
from tidemill.telemetry.run_dir import read_json
from tidemill.telemetry.statistics import wilson_interval

REPORT = "twin.json"
CELLS = "cells"
NOMINAL = "nominal"
AT_ONCE = 4
"""Cells whose chunks are requested at the same time."""


def run_twin(
    spec: RunSpec, *, progress: Callable[[str], None] = lambda _: None, stop: StopRequest | None = None
) -> dict[str, Any]:
    """Play episodes in every cell, and write `twin.json` into the stage's folder.

    Returns:
        `product`, `headline` and `figures`; `interrupted` if it was asked to stop. A twin that fails is a result, not
        an error.

    Raises:
        UserError: the policy cannot be read or does not fit the task, or the twin is where it was trained.
    """
    policy = twin_policy(spec)
    folder = spec.directory
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    cells = asyncio.run(_play_cells(spec, policy, folder / CELLS, progress, stop or StopRequest()))
    if None in cells:
        return {"interrupted": True}
    report = twin_report(spec, policy, [cell for cell in cells if cell is not None])
    write_atomically(folder / REPORT, msgspec.json.format(encode(report)) + b"\n")
    required = [cell for cell in report["cells"] if cell["required"]]
    figures = {
        "passed": report["passed"],
        "cells": len(cells),
        "cells_passed": sum(cell["passed"] for cell in report["cells"]),
        "success_low": min(cell["success_interval"][0] for cell in required),
        "falls_high": max(cell["falls_interval"][1] for cell in required),
    }
    return {"product": folder / REPORT, "headline": _headline(report), "figures": figures}


def check_twin(spec: RunSpec, trained: PolicyDescription | None = None, *, is_identified: bool = False) -> None:
    """
    Args:
        trained: the policy of an earlier stage; None: it is on disk, or not known yet.
        is_identified: the twin has parameters of a stage that has not run yet.

    Raises:
        UserError: as `run_twin`.
    """
    for factor in spec.twin.timestep:
        check_model(open_task(spec.robot.task), timestep=factor)
    if trained is not None:
        check_names(trained, describe(spec), "twin.policy")
    elif str(spec.twin.policy).startswith(PREFIX):
        return
    else:
        trained = matched_policy(spec, spec.twin.policy, where="twin.policy").description
    if not is_identified:
        _refuse_repetition(spec, trained)


def twin_policy(spec: RunSpec) -> StoredPolicy:
    """The policy that the twin runs, in the order of the task. Raises UserError: as `run_twin`."""
    policy = matched_policy(spec, spec.twin.policy, where="twin.policy")
    _refuse_repetition(spec, policy.description)
    return policy


def _refuse_repetition(spec: RunSpec, trained: PolicyDescription) -> None:
    """Raises UserError: the twin has the engine and parameters of the training."""
    trained_in, identified = trained.engine, describe(spec).parameters.get("identified")
    is_nominal = len(spec.twin.cells) == 1 and identified == trained.parameters.get("identified")
    if trained_in == spec.twin.engine and is_nominal:
        other = "newton" if trained_in == "mujoco" else "mujoco"
        what = f"the policy was trained in {trained_in} with these parameters: the twin would repeat its evaluation"
        hint = f'write twin.engine = "{other}", or add parameters, such as twin.mass = [0.8, 1.2]'
        raise UserError(what, where="twin.engine", hint=hint)


def matched_policy(spec: RunSpec, path: Path | None, *, where: str) -> StoredPolicy:
    """Raises UserError: no policy is named, or it cannot be read or does not fit the task."""
    if spec.robot.environment:
        what, hint = "an environment of another package has no twin and no bundle", "write robot.task"
        raise UserError(what, where="robot.environment", hint=hint)
    if path is None:
        raise UserError("no policy is named", where=where, hint='write "stage:NAME", or the path of a trained policy')
    setup = msgspec.structs.replace(setup_of(spec), worlds=1)
    terms = joint_terms(task_simulation(_in_engine(setup, "mujoco")))
    return match_policy(path, describe(spec), terms, where=where)


def task_simulation(setup: SimulationSetup) -> Simulation:
    """Raises UserError: the task or its model cannot be used."""
    simulation = build(setup)
    assert isinstance(simulation, Simulation)  # environments of others are refused before
    return simulation


def cell_name(parameters: Mapping[str, float]) -> str:
    """`nominal`, `mass=1.2`, or several of these with commas."""
    varied = [f"{name}={value:g}" for name, value in parameters.items() if value != _nominal(name)]
    return ",".join(varied) or NOMINAL


def cell_setup(spec: RunSpec, policy: StoredPolicy, parameters: Mapping[str, float]) -> SimulationSetup:
    """The simulation of a cell: with its parameters, and without noise, pushes and other randomisation."""
    described = policy.description
    ranges = {name: (value, value) for name, value in parameters.items() if name != "timestep"}
    randomise = RandomiseConfig.model_validate(ranges | {"inertia": ranges["mass"]})
    robot = spec.robot.model_copy(update={"randomise": randomise, "history": described.history})
    setup = SimulationSetup(
        robot=robot.model_dump(mode="json"),
        obs_groups=described.obs_groups,
        activation=described.activation,
        timestep=parameters["timestep"],
    )
    return _in_engine(setup, spec.twin.engine)


async def _play_cells(
    spec: RunSpec, policy: StoredPolicy, folder: Path, progress: Callable[[str], None], stop: StopRequest
) -> list[dict[str, Any] | None]:
    """The results of all cells; None for those that were not played after a request to stop."""
    cells = spec.twin.cells
    setups = [cell_setup(spec, policy, each) for each in cells]
    digest = policy_digest(Path(str(spec.twin.policy)))
    steps = open_task(spec.robot.task).steps_per_episode()
    places = asyncio.Semaphore(AT_ONCE)
    async with open_chunks(spec, setups, run=None, recorder=None, clock=LoopClock()) as chunks:
        await chunks.publish(PolicyVersion(number=0, digest=digest), pack(policy.weights))

        async def play(number: int) -> dict[str, Any] | None:
            name = cell_name(cells[number])
            file = folder / f"{name}.json"
            identity = [digest, setups[number], spec.twin.episodes, spec.run.seed]
            key = hashlib.blake2b(encode(identity), digest_size=16).hexdigest()
            if (kept := read_json(file)).get("key") == key:
                return dict(kept["cell"])
            async with places:
                if stop.requested:
                    return None
                played = await play_episodes(
                    chunks,
                    0,
                    purpose=f"twin:{name}",
                    seed=spec.run.seed,
                    episodes=spec.twin.episodes,
                    steps=steps,
                    setup=number,
                )
            cell = {"name": name, "parameters": cells[number], **_figures(played)}
            write_atomically(file, encode({"key": key, "cell": cell}) + b"\n")
            progress(f"{name}: success {cell['success']:.2f}, falls {cell['falls']:.2f}")
            return cell

        return list(await asyncio.gather(*map(play, range(len(cells)))))


def twin_report(spec: RunSpec, policy: StoredPolicy, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `twin.json` has. `sensitivity` has the cells that differ from the nominal one in one parameter."""
    twin, described = spec.twin, policy.description
    judged = []
    for cell in cells:
        required = twin.required == "all" or cell["name"] == NOMINAL
        reasons = []
        if (low := cell["success_interval"][0]) < twin.min_success:
            reasons.append(f"success {cell['success']:.3f}, at least {low:.3f}, is below {twin.min_success:g}")
        if (high := cell["falls_interval"][1]) > twin.max_falls:
            reasons.append(f"falls {cell['falls']:.3f}, at most {high:.3f}, are above {twin.max_falls:g}")
        judged.append({**cell, "required": required, "passed": not reasons, "reasons": reasons})
    failures = [f"{each['name']}: {reason}" for each in judged if each["required"] for reason in each["reasons"]]
    nominal = cells[0]["parameters"]
    sensitivity = {}
    for name in nominal:
        others = {key: value for key, value in nominal.items() if key != name}
        curve = [each for each in judged if others.items() <= each["parameters"].items()]
        if len(curve) > 1:
            points = [{"value": each["parameters"][name], **_without(each, "parameters", "reasons")} for each in curve]
            sensitivity[name] = sorted(points, key=lambda point: float(point["value"]))
    return {
        "format": 1,
        "policy": policy_digest(Path(str(twin.policy))),
        "task": spec.robot.task,
        "engine": twin.engine,
        "trained_in": described.engine,
        "episodes": cells[0]["episodes"],
        "seed": spec.run.seed,
        "thresholds": {"min_success": twin.min_success, "max_falls": twin.max_falls, "required": twin.required},
        "passed": not failures,
        "reasons": failures,
        "cells": judged,
        "sensitivity": sensitivity,
    }


def _figures(played: PlayedEpisodes) -> dict[str, Any]:
    episodes = len(played)
    success, falls = played.count("success") / episodes, played.count("fell") / episodes
    return {
        "episodes": episodes,
        "success": success,
        "success_interval": list(wilson_interval(success, episodes)),
        "falls": falls,
        "falls_interval": list(wilson_interval(falls, episodes)),
        "return_mean": played.mean("return"),
        "figures": {
            name.removeprefix("figure/"): played.mean(name) for name in played.figures if name.startswith("figure/")
        },
    }


def _headline(report: Mapping[str, Any]) -> str:
    cells = counted(len(report["cells"]), "cell")
    if report["passed"]:
        return f"passed in {report['engine']}: {cells} of {report['episodes']} episodes"
    return f"failed in {report['engine']}: {'; '.join(report['reasons'][:2])}"


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _nominal(name: str) -> float:
    return 0.0 if name == "delay_s" else 1.0


def _in_engine(setup: SimulationSetup, engine: str) -> SimulationSetup:
    return msgspec.structs.replace(setup, robot=setup.robot | {"engine": engine})
