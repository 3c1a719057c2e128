"""Tidemill: reinforcement-learning post-training on compute that comes and goes.

The public names are those in `__all__`; everything else is private. They are imported when they are first used, so that
`import tidemill` loads no tensor library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.agents.environment import Environment, Step, ToolEnvironment, tool
    from tidemill.api import rewards
    from tidemill.api.decorators import advantage, loss, loss_term, prompt_sampler, reward, task
    from tidemill.api.evaluation import evaluate, export, generate
    from tidemill.api.run import Run
    from tidemill.api.stages import demonstrations, dpo, pairs, reward_model, sft
    from tidemill.api.train import load_config, train, train_async
    from tidemill.api.watch import watch
    from tidemill.core.errors import TidemillError
    from tidemill.jobs.callbacks import Callback
    from tidemill.telemetry.sample_files import Sample

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Environment",
    "Run",
    "Sample",
    "Step",
    "TidemillError",
    "ToolEnvironment",
    "advantage",
    "demonstrations",
    "dpo",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "loss",
    "loss_term",
    "pairs",
    "prompt_sampler",
    "reward",
    "reward_model",
    "rewards",
    "sft",
    "task",
    "tool",
    "train",
    "train_async",
    "watch",
]
_MODULES = {
    "tidemill.api.decorators": ("advantage", "loss", "loss_term", "prompt_sampler", "reward", "task", "tool"),
    "tidemill.api.evaluation": ("evaluate", "export", "generate"),
    "tidemill.api.run": ("Run",),
    "tidemill.api.stages": ("demonstrations", "dpo", "pairs", "reward_model", "sft"),
    "tidemill.api.train": ("load_config", "train", "train_async"),
    "tidemill.api.watch": ("watch",),
    "tidemill.core.errors": ("TidemillError",),
    "tidemill.agents.environment": ("Environment", "Step", "ToolEnvironment"),
    "tidemill.jobs.callbacks": ("Callback",),
    "tidemill.telemetry.sample_files": ("Sample",),
}
_TRAINERS = {
    "GRPOTrainer": "train",
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "RewardTrainer": "reward_model",
    "grpo": "train",
    "ppo": "train",
    "rl": "train",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "rewards":
        return import_module("tidemill.api.rewards")
    if name not in _HOME:
        hint = f"; use tidemill.{_TRAINERS[name]}" if name in _TRAINERS else ""
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}{hint}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
