"""Optimise a trajectory of actions by gradients through Newton's physics: the stage `optimise`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from tidemill.config.robot import OptimiseConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.robots.engine import check_model, check_warp, model_source, open_engine
from tidemill.robots.parameters import mjcf_with
from tidemill.robots.task import Floats
from tidemill.robots.tasks import open_task
from tidemill.telemetry.jsonl import write_json

if TYPE_CHECKING:
    from tidemill.robots.trajectory import TrajectoryCost

RESULT = "trajectory.json"
FIRST_ACTION = 0.01  # scale of the first actions: at an equilibrium the gradient is zero
CHECK_ACTION = 0.3  # scale of the actions at which the gradient is checked
BETAS = (0.9, 0.99)  # of Adam
LINES = 20  # of progress
FAR = 1e3  # m
ONE_POSITION = (2, 3)  # types of joints: slide and hinge


def check_optimise(spec: RunSpec) -> None:
    """Raises UserError: the trajectory cannot be optimised by gradients."""
    check_warp()
    model = check_model(open_task(spec.robot.task), spec.robot.parameters)
    model.geom_margin[:] = FAR  # with which MuJoCo reports all geoms that can ever touch
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    if data.ncon:
        names = " and ".join(model.geom(geom).name or f"number {geom}" for geom in data.contact.geom[0])
        what = f"the geoms {names} can touch; Newton's Featherstone solver diverges with contacts"
        hint = 'set contype="0" conaffinity="0" in the MJCF, or train a policy with a control stage'
        raise UserError(what, where="robot.task", hint=hint)
    if others := [model.joint(at).name for at, kind in enumerate(model.jnt_type) if kind not in ONE_POSITION]:
        what = f"{others[0]} is neither a hinge nor a slide joint"
        raise UserError(what, where="robot.task", hint="train a policy with a control stage")


def optimise_trajectory(spec: RunSpec, *, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Minimise the cost of `optimise.steps` control steps and write the best trajectory to `trajectory.json`.

    Returns:
        `product`, the path of the file; `headline`; `figures`.

    Raises:
        UserError: the model has contacts, or the gradient disagrees with finite differences.
    """
    from tidemill.robots.trajectory import NewtonPhysics, TrajectoryCost, gradient_errors

    check_optimise(spec)
    settings, task = spec.optimise, open_task(spec.robot.task)
    engine = open_engine(spec.robot.model_copy(update={"engine": "mujoco"}), task, 1)
    substeps = round(task.control_s / engine.model.opt.timestep)
    source = mjcf_with(model_source(task), spec.robot.parameters)
    physics = NewtonPhysics(source, engine.model, task.joints, steps=settings.steps, substeps=substeps)
    cost = TrajectoryCost(task, engine, physics, seed=spec.run.seed)
    noise = np.random.default_rng(spec.run.seed).standard_normal((settings.steps, len(task.joints)))
    progress("comparing the gradient with finite differences")
    errors = gradient_errors(cost, CHECK_ACTION * noise, directions=settings.check_directions, seed=spec.run.seed)
    if not max(errors) <= settings.check_tolerance:
        allowed = f"(at most {100 * settings.check_tolerance:.2g} %)"
        what = f"the gradient differs from finite differences by {100 * max(errors):.2g} % {allowed}"
        hint = "shorten optimise.steps, or lower the model's timestep: the physics may be chaotic or stiff"
        raise UserError(what, where="optimise.check_tolerance", hint=hint)
    actions, costs = _descend(cost, FIRST_ACTION * noise, settings, progress)
    _, _, states = cost.gradient(actions)
    replay = cost.replay(actions)
    product = spec.directory / RESULT
    product.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "cost at the start": costs[0],
        "cost": min(costs),
        "cost in C MuJoCo": cost.of(replay, actions),
        "greatest difference of positions in C MuJoCo": float(np.abs(replay.qpos - states.qpos).max()),
        "gradient error": max(errors),
    }
    document = {
        "task": spec.robot.task,
        "joints": task.joints,
        "control_s": task.control_s,
        "start": {"qpos": cost.qpos.tolist(), "qvel": cost.qvel.tolist()},
        "actions": actions.tolist(),
        "controls": cost.controls(actions).tolist(),
        "positions": states.qpos.tolist(),
        "costs": costs,
        "gradient_errors": errors,
        "figures": figures,
    }
    write_json(product, document)
    headline = (
        f"cost {costs[0]:.4g} to {min(costs):.4g} in {settings.iterations} steps, {figures['cost in C MuJoCo']:.4g} in "
        f"C MuJoCo; gradient within {100 * max(errors):.1g} % of finite differences"
    )
    return {"product": product, "headline": headline, "figures": figures}


def _descend(
    cost: TrajectoryCost, actions: Floats, settings: OptimiseConfig, progress: Callable[[str], None]
) -> tuple[Floats, list[float]]:
    """Adam; returns the best actions and the cost before every step and after the last."""
    mean, square = np.zeros_like(actions), np.zeros_like(actions)
    best, costs = actions, list[float]()
    for step in range(1, settings.iterations + 1):
        value, gradient, _ = cost.gradient(actions)
        if not np.isfinite(gradient).all():
            what, hint = f"the gradient is not finite at step {step}", "lower optimise.learning_rate or optimise.steps"
            raise UserError(what, where="optimise", hint=hint)
        costs.append(value)
        best = actions if value <= min(costs) else best
        if (step - 1) % max(1, settings.iterations // LINES) == 0:
            progress(f"step {step} of {settings.iterations}: cost {value:.4g}")
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        change = (mean / (1 - BETAS[0] ** step)) / (np.sqrt(square / (1 - BETAS[1] ** step)) + 1e-8)
        moved = actions - settings.learning_rate * change
        stuck = (cost.control_slopes(moved) == 0).all(axis=1)  # beyond the range of a control nothing pulls it back
        actions = np.where(stuck, actions, moved)
    costs.append(cost(actions))
    return (actions if costs[-1] <= min(costs) else best), costs
