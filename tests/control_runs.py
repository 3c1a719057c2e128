"""Small runs of control training: swing-up with 64 worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.control import train_control

STEPS = 8
SMALL: dict[str, dict[str, Any]] = {
    "robot": {"task": "swingup", "worlds": 64, "history": 2},
    "control": {"num_steps_per_env": 8, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,), "eval_episodes": 0},
    "trainer": {"steps": STEPS, "threads": 1},
    "checkpoint": {"every_steps": 2},
    "telemetry": {"live": False},
}


def spec_of(directory: Path, **sections: dict[str, Any]) -> RunSpec:
    base = SMALL | {"run": {"dir": directory, "name": "small"}}
    return RunSpec.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def session(directory: Path, *callbacks: Callback, **sections: dict[str, Any]) -> dict[str, Any]:
    with (directory.parent / "view.txt").open("a") as view:
        return train_control(spec_of(directory, **sections), telemetry_stream=view, callbacks=callbacks)
