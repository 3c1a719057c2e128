"""The prompts of a trained model: formatted as in the run that trained it, unless a configuration says otherwise."""

from __future__ import annotations

import tomllib
from collections.abc import Callable

from tidemill.config.schema import RunSpec
from tidemill.config.task import FileTask, ReasoningGymTask
from tidemill.config.toml import to_toml
from tidemill.models.model_source import ModelSource
from tidemill.telemetry.run_dir import SUPERVISED, PromptFormat, RunDirectory


def prompt_format(spec: RunSpec, model: ModelSource) -> PromptFormat:
    """How texts become prompts of a model: as in the run that trained it, unless the configuration says otherwise."""
    stored = RunDirectory(model.run).read_settings().get("task", {}) if model.run else {}
    system = str(getattr(spec.task, "system_prompt", ""))
    # An empty one in the run's own configuration is a default; on top of it, it means none.
    given = "system_prompt" in spec.task.model_fields_set and stored.get("system_prompt") != ""
    return PromptFormat(
        chat=spec.model.chat_template or model.prompts.chat,
        system_prompt=system if system or given else model.prompts.system_prompt,
    )


def formatted_as_trained(spec: RunSpec, model: ModelSource, *, note: Callable[[str], None]) -> RunSpec:
    """The configuration with the `prompt_format` of a model, for an evaluation without a recipe.

    The task on which the model was trained with RL, and its sets, stay as they were evaluated in that run.

    Args:
        note: gets a warning if the prompts of the task cannot have the system prompt.
    """
    if model.run is not None:
        run = RunDirectory(model.run)
        trained_on = None if run.read_manifest().get("kind") in SUPERVISED else run.read_settings().get("task")
        if trained_on == tomllib.loads(to_toml(spec)).get("task"):
            return spec
    wanted, task, sets = prompt_format(spec, model), spec.task, spec.eval.sets
    if isinstance(task, FileTask | ReasoningGymTask):
        task = task.model_copy(update={"system_prompt": wanted.system_prompt})
    elif wanted.system_prompt:
        note(
            f'warning: the model was trained after a system prompt, and prompts of task.kind = "{task.kind}" have none'
        )
    if not isinstance(task, FileTask):  # whose system prompt is the default of sets
        default = {"system_prompt": wanted.system_prompt}
        sets = tuple(each if each.system_prompt is not None else each.model_copy(update=default) for each in sets)
    sections = {
        "task": task,
        "model": spec.model.model_copy(update={"chat_template": wanted.chat}),
        "eval": spec.eval.model_copy(update={"sets": sets}),
    }
    return spec.model_copy(update=sections)
