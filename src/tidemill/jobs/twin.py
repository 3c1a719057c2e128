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
from tidemill.robots.deployment import check_exported
from tidemill.robots.engine import check_model
from tidemill.robots.episodes import PlayedEpisodes, play_episodes
from tidemill.robots.matching import check_names, matched_policy, policy_digest, setup_with
from tidemill.robots.policy_arrays import pack
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.robots.setup import SimulationSetup, describe
from tidemill.robots.tasks import open_task
from tidemill.runtime.simulators import open_chunks
from tidemill.telemetry.jsonl import encode, write_atomically, write_json
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
    policy = matched_policy(spec, spec.twin.policy, where="twin.policy")
    check_twin(spec, policy.description)
    folder = spec.directory
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    cells = asyncio.run(_play_cells(spec, policy, folder / CELLS, progress, stop or StopRequest()))
    if None in cells:
        return {"interrupted": True}
    report = twin_report(spec, policy, [cell for cell in cells if cell is not None])
    write_json(folder / REPORT, report)
    required = [cell for cell in report["cells"] if cell["required"]]
    played = f"{counted(len(cells), 'cell')} of {report['episodes']} episodes"
    outcome = f"passed in {spec.twin.engine}: {played}"
    if not report["passed"]:
        outcome = f"failed in {spec.twin.engine}: {'; '.join(report['reasons'][:2])}"
    figures = {
        "passed": report["passed"],
        "cells": len(cells),
        "cells_passed": sum(cell["passed"] for cell in report["cells"]),
        "success_low": min(cell["success_interval"][0] for cell in required),
        "falls_high": max(cell["falls_interval"][1] for cell in required),
    }
    return {"product": folder / REPORT, "headline": outcome, "figures": figures}


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
    if spec.twin.policy is not None and spec.twin.policy.suffix == ".onnx":
        check_exported(spec.twin.policy, open_task(spec.robot.task), where="twin.policy")
    identified = describe(spec).parameters.get("identified")
    is_nominal = len(spec.twin.cells) == 1 and identified == trained.parameters.get("identified")
    if trained.engine == spec.twin.engine and is_nominal and not is_identified:
        other = "newton" if trained.engine == "mujoco" else "mujoco"
        what = f"the policy was trained in {trained.engine} with these parameters: the twin would repeat its evaluation"
        hint = f'write twin.engine = "{other}", or add parameters, such as twin.mass = [0.8, 1.2]'
        raise UserError(what, where="twin.engine", hint=hint)


def cell_setup(spec: RunSpec, policy: PolicyDescription, parameters: Mapping[str, float]) -> SimulationSetup:
    """The simulation of a cell: with its parameters, and without noise, pushes and other randomisation."""
    ranges = {name: (value, value) for name, value in parameters.items() if name != "timestep"}
    randomise = RandomiseConfig.model_validate(ranges | {"inertia": ranges["mass"]})
    setup = setup_with(policy, spec.robot, randomise=randomise, engine=spec.twin.engine)
    return msgspec.structs.replace(setup, timestep=parameters["timestep"])


async def _play_cells(
    spec: RunSpec, policy: StoredPolicy, folder: Path, progress: Callable[[str], None], stop: StopRequest
) -> list[dict[str, Any] | None]:
    """The results of all cells; None for those that were not played after a request to stop."""
    cells = spec.twin.cells
    setups = [cell_setup(spec, policy.description, cell) for cell in cells]
    digest = policy_digest(Path(str(spec.twin.policy)))
    steps = open_task(spec.robot.task).steps_per_episode()
    places = asyncio.Semaphore(AT_ONCE)
    async with open_chunks(spec, setups, run=None, recorder=None, clock=LoopClock()) as chunks:
        await chunks.publish(PolicyVersion(number=0, digest=digest), pack(policy.weights))

        async def play(number: int) -> dict[str, Any] | None:
            varied = [f"{name}={value:g}" for name, value in cells[number].items() if value != cells[0][name]]
            name = ",".join(varied) or NOMINAL
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


def _figures(played: PlayedEpisodes) -> dict[str, Any]:
    figures: dict[str, Any] = {"episodes": len(played)}
    for name, counted_figure in (("success", "success"), ("falls", "fell")):
        share = played.count(counted_figure) / len(played)
        figures |= {name: share, f"{name}_interval": list(wilson_interval(share, len(played)))}
    prefix = "figure/"
    own = {name.removeprefix(prefix): played.mean(name) for name in played.figures if name.startswith(prefix)}
    return figures | {"return_mean": played.mean("return"), "figures": own}


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
            points = [
                {"value": cell["parameters"][name]}
                | {key: value for key, value in cell.items() if key not in ("parameters", "reasons")}
                for cell in curve
            ]
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
