"""Imitation, identification and gradients of robots, against their aims.

    python -m benchmarks.robot_learning [--seeds 3] [--cases 20]

- *clone*: 200 episodes that a trained policy records, cloned: return relative to the teacher's in the same episodes.
- *distillation*: a teacher that reads velocities teaches students that read positions only, of three observations.
- *identification*: mass, length and damping of the cart-pole from a noisy log of 5 s, for other true values in every
  case: largest relative error, and whether the 95 % intervals hold.
- *gradient*: of 60 control steps through Newton's physics, against finite differences, at several actions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import numpy as np

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from tidemill.config.schema import RunSpec
from tidemill.jobs.clone import clone_policy
from tidemill.jobs.control import train_control
from tidemill.robots.engine import check_model, open_engine
from tidemill.robots.identification import Log, LogFit, identify
from tidemill.robots.parameters import apply_parameters, model_spec, nominal_value
from tidemill.robots.task import Terms, Worlds
from tidemill.robots.tasks import open_task
from tidemill.robots.tasks.swingup import Swingup

SHARE, GRADIENT_ERROR, WITHIN, CASES_WITHIN, INTERVALS_HOLD = 0.9, 0.005, 0.02, 18 / 20, 52 / 60
"""Aims."""
TEACHER_ITERATIONS, STUDENT_ITERATIONS, GRADIENT_STEPS = 150, 100, 60
NAMES = ("mass:pole", "length:pole", "damping:hinge")
JOINTS, NOISE = ("slide", "hinge"), np.array([0.002, 0.005])  # m, rad
LOG_ROWS, SPREAD = 250, 0.4  # of the logarithms of true values


class Blind(Swingup):
    """Velocities are privileged."""

    obs_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("policy",), "critic": ("policy", "privileged")}

    def observe(self, worlds: Worlds) -> Mapping[str, Terms]:
        terms = dict(super().observe(worlds)["policy"])
        return {"privileged": {"velocities": terms.pop("velocities")}, "policy": terms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="students of each teacher")
    parser.add_argument("--cases", type=int, default=20, help="cart-poles that are identified")
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        imitation = imitations(Path(folder), options.seeds)
    cases = [identified(seed) for seed in range(options.cases)]
    gradient = gradients(options.seeds)
    within, hold = sum(each["error"] <= WITHIN for each in cases), sum(each["hold"] for each in cases)
    content = {
        "imitation": imitation,
        "identification": {"cases": cases, "within": within, "intervals_hold": hold},
        "gradient": gradient,
        "reached": min(each["share"] for each in imitation) >= SHARE
        and within >= CASES_WITHIN * len(cases)
        and hold >= INTERVALS_HOLD * len(cases) * len(NAMES)
        and gradient["error"] <= GRADIENT_ERROR,
    }
    print(f"identification: {within} of {len(cases)} within 2 %, {hold} of {len(cases) * len(NAMES)} intervals hold")
    print(f"gradient: greatest error {gradient['error']:.3%} over {GRADIENT_STEPS} steps")
    write_result("robot_learning", content)
    return exit_code(content)


def imitations(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Students of both methods."""
    blind = f"{Path(__file__).resolve()}:Blind"
    both = {"obs_groups": {"policy": ["policy", "privileged"]}}
    methods: dict[str, dict[str, dict[str, Any]]] = {
        "clone": {"teacher": {}, "student": {"clone": {"episodes": 200}}},
        "distillation": {
            "teacher": {"robot": {"task": blind}, "control": both},
            "student": {"robot": {"task": blind, "history": 3}, "clone": {"on_policy": True}},
        },
    }
    found = []
    for method, settings in methods.items():
        teacher = train_control(spec_of(folder / method, 0, TEACHER_ITERATIONS, settings["teacher"]))
        for seed in range(seeds):
            student = settings["student"] | {"clone": settings["student"]["clone"] | {"teacher": teacher["policy"]}}
            started_s = time.process_time()
            summary = clone_policy(spec_of(folder / f"{method}-{seed}", seed, STUDENT_ITERATIONS, student))
            figures, cpu_s = summary["figures"], time.process_time() - started_s
            row = {"method": method, "seed": seed, "share": figures["share_of_teacher"], "cpu_s": cpu_s}
            row |= {"return": figures["return_mean"], "teacher_return": figures["teacher_return"]}
            found.append(row | {"success": figures["success"]})
            print(f"{method}, seed {seed}: {row['share']:.3f} of the teacher's return in {cpu_s:.0f} CPU-s", flush=True)
    return found


def spec_of(directory: Path, seed: int, steps: int, sections: Mapping[str, dict[str, Any]]) -> RunSpec:
    base = {"run": {"dir": directory, "seed": seed}, "trainer": {"steps": steps, "threads": 1}}
    return RunSpec.model_validate(base | {"telemetry": {"live": False}} | dict(sections))


def identified(seed: int) -> dict[str, Any]:
    """One cart-pole of other parameters, which hangs and is shaken by a force of rising frequency."""
    task = open_task("swingup")
    model, source, random = check_model(task), str(task.model), np.random.default_rng(seed)
    factors = np.exp(random.uniform(-SPREAD, SPREAD, len(NAMES)))
    times = task.control_s * np.arange(LOG_ROWS)
    force = 8 * np.sin(2 * np.pi * times * (0.3 + 0.25 * times))[:, None]
    true = {name: nominal_value(model, name) * factor for name, factor in zip(NAMES, factors, strict=True)}
    robot = apply_parameters(model_spec(source), model, true)
    data = mujoco.MjData(robot)
    data.qpos[1] = np.pi
    positions = []
    for each in force:
        positions.append(data.qpos + random.standard_normal(2) * NOISE)
        data.ctrl[:] = each
        mujoco.mj_step(robot, data, 2)
    fit = LogFit(source, model, NAMES, JOINTS, [Log(positions=np.array(positions), controls=force)], 2)
    started_s = time.process_time()
    found = identify(fit, within=(0.5, 2.0), confidence=0.95, seed=0, joints=JOINTS)
    estimates = found.parameters
    return {
        "error": max(float(abs(estimates[name].value / value - 1)) for name, value in true.items()),
        "hold": sum(bool(estimates[name].low < value < estimates[name].high) for name, value in true.items()),
        "starts": found.starts,
        "cpu_s": time.process_time() - started_s,
    }


def gradients(seeds: int) -> dict[str, Any]:
    """Errors at random actions of three sizes."""
    from tidemill.robots.trajectory import NewtonPhysics, TrajectoryCost, gradient_errors

    task, spec = open_task("swingup"), RunSpec()
    engine = open_engine(spec.robot, task, 1)
    physics = NewtonPhysics(str(task.model), engine.model, task.joints, steps=GRADIENT_STEPS, substeps=2)
    errors = []
    for seed in range(seeds):
        cost = TrajectoryCost(task, engine, physics, seed=seed)
        noise = np.random.default_rng(seed).standard_normal((GRADIENT_STEPS, 1))
        for size in (0.0, 0.1, 0.3):
            errors += gradient_errors(cost, size * noise, directions=4, seed=seed)
    return {"error": max(errors), "errors": errors}


if __name__ == "__main__":
    raise SystemExit(main())
