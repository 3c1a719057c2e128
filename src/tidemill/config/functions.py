"""The keys that name user functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidemill.config.agent import BUILT_IN
from tidemill.config.algorithm import ADVANTAGE_NAMES, LOSS_NAMES
from tidemill.config.keys import KeyPath
from tidemill.config.robot import CONTROL_TASKS
from tidemill.config.schema import RunSpec
from tidemill.extensions.registry import Kind

FUNCTION_KEYS: tuple[KeyPath, ...] = (
    ("scoring", "rewards", "function"),
    ("eval", "rewards", "function"),
    ("algorithm", "advantage"),
    ("algorithm", "loss"),
    ("algorithm", "loss_terms", "function"),
    ("task", "function"),
    ("env", "name"),
    ("batch", "sampler"),
    ("robot", "task"),
    ("robot", "environment"),
    ("telemetry", "callbacks"),
)
"""Keys, without positions in arrays. `path/file.py:function` in a recipe starts at the recipe's folder."""


class FunctionReference(NamedTuple):
    """One key that names a user function."""

    location: tuple[str | int, ...]
    kind: Kind
    ref: str

    @property
    def key(self) -> str:
        """The dotted key without positions in arrays."""
        return ".".join(part for part in self.location if isinstance(part, str))


def function_references(spec: RunSpec) -> Iterator[FunctionReference]:
    """The user functions of a configuration, without its callbacks."""
    for section, rewards in (("scoring", spec.scoring.rewards), ("eval", spec.eval.rewards)):
        for index, reward in enumerate(rewards):
            if reward.kind == "python":
                yield FunctionReference((section, "rewards", index, "function"), "reward", reward.function)
    algorithm = spec.algorithm
    if algorithm.advantage not in ADVANTAGE_NAMES:
        yield FunctionReference(("algorithm", "advantage"), "advantage", algorithm.advantage)
    if algorithm.loss not in LOSS_NAMES:
        yield FunctionReference(("algorithm", "loss"), "loss", algorithm.loss)
    for index, term in enumerate(algorithm.loss_terms):
        yield FunctionReference(("algorithm", "loss_terms", index, "function"), "loss_term", term.function)
    if spec.task.kind == "python":
        yield FunctionReference(("task", "function"), "task", spec.task.function)
    if spec.env.enabled and spec.env.name not in BUILT_IN:
        yield FunctionReference(("env", "name"), "environment", spec.env.name)
    if spec.robot.task not in CONTROL_TASKS:
        yield FunctionReference(("robot", "task"), "control_task", spec.robot.task)
    if spec.robot.environment and not spec.robot.python:  # else another interpreter imports it
        yield FunctionReference(("robot", "environment"), "vector_env", spec.robot.environment)
    if spec.batch.sampler:
        yield FunctionReference(("batch", "sampler"), "prompt_sampler", spec.batch.sampler)
