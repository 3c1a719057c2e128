"""Builds the task of a configuration."""

from __future__ import annotations

from tidemill.config.task import ArithmeticTask, FileTask, ReasoningGymTask, TaskConfig
from tidemill.core.protocols import Codec
from tidemill.envs.text.arithmetic import build_arithmetic
from tidemill.envs.text.examples import read_split
from tidemill.envs.text.prompts import (
    ListedSource,
    Render,
    Task,
    common_columns,
    content_digest,
    longest_prompt,
    renderer,
)
from tidemill.envs.text.reasoning_gym import build_reasoning_gym
from tidemill.envs.text.rows import read_items


def build_files(config: FileTask, *, batch_prompts: int, seed: int, render: Render) -> Task:
    """The task of one file, or of a training and an evaluation file.

    Raises:
        UserError: a file cannot be read or has too few rows; names file and row.
    """
    sides = read_split(read_items, config.path, config.held_out_path, config.held_out_fraction, section="task")
    train, held_out = sides.train, sides.held_out
    return Task(
        source=ListedSource(train, held_out, batch_prompts=batch_prompts, seed=seed, render=render),
        default_stop_strings=(),
        check=None,
        train_size=len(train),
        held_out_size=len(held_out),
        longest=longest_prompt([*train, *held_out], render),
        digest=content_digest(train, held_out),
        columns=common_columns(train, held_out),
        description=f"{config.path.name}" + (f" (left out of training: {sides.left_out})" if sides.left_out else ""),
    )


def build_task(task: TaskConfig, *, codec: Codec, batch_prompts: int, seed: int, chat_template: bool) -> Task:
    """The task of a configuration.

    Training and held-out prompts are separated by content, so every `seed` is evaluated on the same prompts; `seed`
    orders the training prompts.

    Raises:
        UserError: the configuration or a file is invalid, or a package is missing.
    """
    render = renderer(codec, chat_template=chat_template)
    if isinstance(task, ArithmeticTask):
        return build_arithmetic(task, batch_prompts=batch_prompts, seed=seed, render=render)
    if isinstance(task, ReasoningGymTask):
        return build_reasoning_gym(task, batch_prompts=batch_prompts, seed=seed, render=render)
    return build_files(task, batch_prompts=batch_prompts, seed=seed, render=render)
