"""From a task's configuration to a task."""

from __future__ import annotations

from tidemill.config.task import ArithmeticTask, ReasoningGymTask, TaskConfig
from tidemill.core.protocols import Codec
from tidemill.envs.text.arithmetic import build_arithmetic
from tidemill.envs.text.content import renderer
from tidemill.envs.text.files import build_files
from tidemill.envs.text.reasoning_gym import build_reasoning_gym
from tidemill.envs.text.task import Task


def build_task(task: TaskConfig, *, codec: Codec, batch_prompts: int, seed: int, chat_template: bool) -> Task:
    """The task a configuration names.

    Training and held-out prompts are told apart by content, so every `seed` is evaluated on the same ones; `seed`
    orders the training prompts.

    Raises:
        UserError: when the configuration, a file or a missing package keeps the task from being built.
    """
    render = renderer(codec, chat_template=chat_template)
    if isinstance(task, ArithmeticTask):
        return build_arithmetic(task, batch_prompts=batch_prompts, seed=seed, render=render)
    if isinstance(task, ReasoningGymTask):
        return build_reasoning_gym(task, batch_prompts=batch_prompts, seed=seed, render=render)
    return build_files(task, batch_prompts=batch_prompts, seed=seed, render=render)
