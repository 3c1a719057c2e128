"""A made-up run of a robot's policy, and a twin of it: what its stages write, without simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from tidemill.robots.playback import write_playback
from tidemill.telemetry.events import event_line
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory
from tidemill.telemetry.statistics import wilson_interval

CONFIG = '[robot]\ntask = "swingup"\nworlds = 128\n[control]\nnum_steps_per_env = 16\n[trainer]\nsteps = 3\n'
PENDULUM = """
<mujoco>
  <worldbody>
    <geom type="plane" size="0 0 1"/>
    <body pos="0 0 1">
      <joint axis="0 1 0"/>
      <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.6"/>
      <geom type="box" size="0.1 0.1 0.1" pos="0 0 -0.7"/>
    </body>
  </worldbody>
</mujoco>
"""


def evaluation(when: str, step: int, success: float) -> dict[str, Any]:
    return {
        "when": when, "step": step, "episodes": 64, "return_mean": 10 * success - 1, "success": success,
        "success_interval": list(wilson_interval(success, 64)), "falls": (1 - success) / 2,
        "figures": {"height": success}, "terms": {"upright": 12 * success, "effort": -1.0},
    }  # fmt: skip


def robot_run(path: Path, *, evaluated: tuple[str, ...] = ("before", "after"), episodes: bool = True) -> RunDirectory:
    """A finished run of 3 iterations; episodes of 2 s before and 4 s after training."""
    run = _directory(path, kind="control")
    events = [
        event_line(name, fields, unix_s=1e9, session=1, elapsed_s=elapsed_s)
        for name, fields, elapsed_s in (
            ("session_start", {"pid": 1, "host": "x"}, 0.0),
            *(("robot_evaluation", evaluation(when, *EVALUATED[when]), 1.0) for when in evaluated),
            ("session_end", {"outcome": "finished"}, 5.0),
        )
    ]
    run.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in map(metrics_of, range(1, 4))))
    model = mujoco.MjModel.from_xml_string(PENDULUM)
    for when, frames in (("before", 51), ("after", 101)) if episodes else ():
        poses = np.linspace(0, np.pi, frames, dtype=np.float32)[None, :, None].repeat(2, axis=0)
        ended_at = np.array([frames, frames])
        write_playback(path, when, model, poses, control_s=0.04, ended_at=ended_at, label=f"{when} <label>")
    return run


EVALUATED = {"before": (0, 0.0), "after": (3, 0.75)}


def metrics_of(step: int) -> dict[str, Any]:
    header = {"step": step, "policy_version": step, "weights_digest": "d", "optimizer_steps": 20}
    time = {"time": "2026-01-01T00:00:00Z", "session": 1, "elapsed_s": float(step)}
    values = {
        "robot/return_mean": float(step), "robot/success": step / 4, "robot/falls": 0.5,
        "robot/term/upright": 2.0 * step,
        "robot/figure/height": 0.1 * step, "robot/steps_per_cpu_s": 15_000.0, "robot/simulation_cpu_s": 2.0,
        "robot/repeated_chunks": 1.0, "robot/invalid": 0.0, "entropy": 3.0 - step, "time_step_s": 1.0,
    }  # fmt: skip
    return header | time | values


def twin_run(path: Path) -> RunDirectory:
    """A twin that has not passed: success falls with the delay."""
    run = _directory(path, kind="twin")
    cells = [_cell("nominal", 0.0, 1.0), _cell("delay_s=0.02", 0.02, 0.75)]
    points = [{"value": cell["parameters"]["delay_s"], **cell} for cell in cells]
    report = {
        "engine": "newton", "trained_in": "mujoco", "passed": False, "reasons": ["delay_s=0.02: success <0.750>"],
        "thresholds": {"min_success": 0.9, "max_falls": 0.1, "required": "all"}, "cells": cells,
        "sensitivity": {"delay_s": points},
    }  # fmt: skip
    (path / "twin.json").write_text(json.dumps(report))
    return run


def _cell(name: str, delay_s: float, success: float) -> dict[str, Any]:
    falls = 1 - success
    return {
        "name": name, "parameters": {"delay_s": delay_s}, "episodes": 64, "return_mean": 5.0, "success": success,
        "success_interval": list(wilson_interval(success, 64)), "falls": falls,
        "falls_interval": list(wilson_interval(falls, 64)), "required": True, "passed": success > 0.9, "reasons": [],
    }  # fmt: skip


def _directory(path: Path, *, kind: str) -> RunDirectory:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.config.write_text(CONFIG)
    manifest = {"format": RUN_FORMAT, "run": "walk", "kind": kind, "model": "swingup", "seed": 0}
    run.manifest.write_text(json.dumps(manifest))
    return run
