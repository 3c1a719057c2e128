"""Arguments shared by several verbs: configuration, checkpoint, dry run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.output import Result, note
from tidemill.config.explain import as_lines, derive, topics
from tidemill.config.issues import Purpose
from tidemill.config.load import Arguments, differences, load_spec, split_arguments
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask, FileTask, PythonTask, TaskConfig
from tidemill.config.toml import to_toml, write_value
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.models.model_source import ModelSource, is_run, open_model
from tidemill.telemetry.events import DATA, event_text
from tidemill.telemetry.metrics import HELD_OUT_NAME

Items = Annotated[
    str,
    Parameter(allow_leading_hyphen=True, show=True, help="`@recipe.toml` and `--section.key value`, repeatable."),
]
Checkpoint = Annotated[
    str | None,
    Parameter(
        name="--checkpoint",
        accepts_keys=False,
        help="A model: a run directory (its newest checkpoint), a checkpoint, a folder, a name or a hub id. Without a "
        "recipe, the config.toml of its run is used.",
    ),
]


def resumed_items(items: Sequence[str]) -> Sequence[str]:
    """The arguments of `train`; with a run directory but without a recipe, after the configuration stored there.

    Raises:
        UserError: there is neither a recipe nor a task, and no run in that directory, or only a pipeline.
    """
    given = split_arguments(items)
    directory = given_directory(given)
    if directory is None or given.recipes:
        return items
    stored, option = directory / "config.toml", f"--run.dir {directory}"
    if (directory / "pipeline.json").exists():
        hint = f"name its recipe: tidemill train @recipe.toml {option}"
        what = "the directory contains a pipeline, which is resumed with its recipe"
        raise UserError(what, where=str(directory), hint=hint)
    if stored.is_file():
        return [f"@{stored}", *items]
    if given.rest or any(path[0] == "task" for path, _ in given.assignments):
        return items
    start = f"to start one, name a recipe: tidemill train @recipe.toml {option}"
    if directory.exists():
        raise UserError("this directory has no config.toml, and no recipe is given", where=option, hint=start)
    raise UserError("there is no run, and no recipe is given", where=option, hint=similar_path(directory) or start)


def given_directory(given: Arguments) -> Path | None:
    """The last `--run.dir`."""
    named = next((text for path, text in reversed(given.assignments) if path == ("run", "dir")), None)
    return Path(named).expanduser() if named else None


def spec_for(items: Sequence[str], model: ModelSource | None, *, purpose: Purpose) -> RunSpec:
    """Load the configuration of `items`; without a recipe, that of the model's run if there is one.

    Raises:
        UserError: the directory of a run is named as if it were to be resumed, and no model.
    """
    given = split_arguments(items)
    directory = given_directory(given)
    if model is None and not given.recipes and directory is not None and is_run(directory):
        what, hint = "only train reads and writes this run", f"write --checkpoint {directory} to use its model"
        raise UserError(what, where=f"--run.dir {directory}", hint=hint)
    if model is not None and not given.recipes:
        if model.run is not None:
            items = [f"@{model.run / 'config.toml'}", *items]
        elif model.folder is not None:
            folder = model.folder.parent.parent if model.folder.parent.name == "checkpoints" else model.folder
            note(f"{folder} has no config.toml: settings without a recipe are defaults, including the task")
    return load_spec(items, purpose=purpose)


def given_model(given: str | None, *, option: str = "--checkpoint") -> AbstractContextManager[ModelSource | None]:
    """The model of an option, which no running process deletes until the block ends, or None.

    Raises:
        UserError: there is no such model.
    """
    return nullcontext() if given is None else open_model(given, where=option)


def dry_run(spec: RunSpec, *, purpose: Purpose = "train", notes: Sequence[str] = ()) -> Result:
    """The resolved configuration and its derived numbers; `notes` are added."""
    lines = [*topics(spec, purpose=purpose), *(("note", note) for note in notes)]
    data = {
        "config": spec.model_dump(mode="json"),
        "derived": asdict(derive(spec)),
        "words": [{"topic": topic, "text": words} for topic, words in lines],
    }
    changed = [f"#   {key} = {write_value(value)}" for key, value in changed_values(spec)]
    text = "\n".join(["# Changed from the defaults:", *(changed or ["#   nothing"]), "", to_toml(spec)])
    return Result(data=data, text=f"{text}\n{as_lines(lines)}")


def row_remarks(spec: RunSpec) -> list[str]:
    """The rows of the task and of `eval.sets`, as at the start of a run, except those that are too long, which only a
    tokenizer can tell."""
    paths = [each.path for each in spec.eval.sets]
    if isinstance(spec.task, FileTask):
        paths += [source.path for source in spec.task.all_sources]
        paths += [spec.task.held_out_path] if spec.task.held_out_path else []
    from tidemill.data.eval_sets import counted
    from tidemill.scoring.row_report import few_prompts, report_rows

    if away := [path for path in paths if not path.exists()]:
        few = few_prompts(spec, {})
        return [f"data: not read, because {away[0]} is not on this machine", *(f"warning: {text}" for text in few)]
    if not paths and not isinstance(spec.task, PythonTask):
        return [f"warning: {text}" for text in few_prompts(spec, planned_sizes(spec.task))]
    return event_text(DATA, report_rows(spec, counted(spec))).splitlines()


def planned_sizes(task: TaskConfig) -> dict[str, int]:
    """The number of held-out prompts of a task that is not in a file, as far as its settings tell."""
    if isinstance(task, ArithmeticTask):
        return {HELD_OUT_NAME: round(len(task.operators) * task.operands**2 * task.held_out_fraction)}
    size = getattr(task, "held_out_size", None)
    return {} if size is None else {HELD_OUT_NAME: size}


def changed_values(spec: RunSpec) -> list[tuple[str, Any]]:
    """(dotted key, value) of the keys that differ from their defaults, in the schema's order."""
    rewards = {"scoring.rewards": spec.scoring.rewards, "eval.rewards": spec.eval.rewards}
    short = {
        key: [{"kind": each.kind, **each.model_dump(mode="json", exclude_defaults=True)} for each in given]
        for key, given in rewards.items()
    }
    return [(key, short.get(key, value)) for key, _, value in differences(RunSpec(), spec) if value is not None]
