"""Arguments shared by several verbs: configuration, checkpoint, dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.output import Result, note
from tidemill.config.explain import as_lines, derive, topics
from tidemill.config.issues import Purpose
from tidemill.config.load import differences, load_spec, split_arguments
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask, FileTask, PythonTask, TaskConfig
from tidemill.config.toml import to_toml, write_value
from tidemill.models.model_source import ModelSource, open_model
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
    """The arguments of `train`; with a run directory but without a recipe, after the configuration stored there."""
    given = split_arguments(items)
    directory = next((text for path, text in reversed(given.assignments) if path == ("run", "dir")), None)
    stored = Path(directory).expanduser() / "config.toml" if directory and not given.recipes else None
    single = stored is not None and stored.is_file() and not stored.with_name("pipeline.json").exists()
    return [f"@{stored}", *items] if single else items


def spec_for(items: Sequence[str], model: ModelSource | None, *, purpose: Purpose) -> RunSpec:
    """Load the configuration of `items`; without a recipe, that of the model's run if there is one."""
    if model is not None and not split_arguments(items).recipes:
        if model.run is not None:
            items = [f"@{model.run / 'config.toml'}", *items]
        elif model.folder is not None:
            folder = model.folder.parent.parent if model.folder.parent.name == "checkpoints" else model.folder
            note(f"{folder} has no config.toml: settings without a recipe are defaults, including the task")
    return load_spec(items, purpose=purpose)


@contextmanager
def given_model(given: str | None, *, option: str = "--checkpoint") -> Iterator[ModelSource | None]:
    """Yield the model of an option, which no running process deletes until the block ends.

    Raises:
        UserError: there is no such model.
    """
    if given is None:
        yield None
        return
    with open_model(given, where=option) as found:
        yield found


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
    from tidemill.envs.text.eval_sets import counted
    from tidemill.envs.text.row_report import few_prompts, report_rows

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
