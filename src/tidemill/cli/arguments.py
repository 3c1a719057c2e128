"""Arguments shared by several verbs: configuration, checkpoint, dry run."""

from __future__ import annotations

import re
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
from tidemill.config.task import FileTask, PythonTask
from tidemill.config.toml import to_toml, write_value
from tidemill.core.errors import UserError
from tidemill.hardware.model_config import CONFIG
from tidemill.models.checkpoint_manifest import pinned
from tidemill.models.folder import ADAPTER_CONFIG
from tidemill.telemetry.events import DATA, event_text

Items = Annotated[
    str,
    Parameter(allow_leading_hyphen=True, show=True, help="`@recipe.toml` and `--section.key value`, repeatable."),
]
Checkpoint = Annotated[
    Path | None,
    Parameter(
        name="--checkpoint",
        accepts_keys=False,
        help="A checkpoint or a run directory (newest checkpoint). Without a recipe, the run's config.toml is used.",
    ),
]
STEP_FOLDER = re.compile(r"step_(\d+)")
_ATTEMPTS = 100  # to pin the newest checkpoint before it is deleted


def resumed_items(items: Sequence[str]) -> Sequence[str]:
    """The arguments of `train`; with a run directory but without a recipe, after the configuration stored there."""
    given = split_arguments(items)
    directory = next((text for path, text in reversed(given.assignments) if path == ("run", "dir")), None)
    stored = Path(directory).expanduser() / "config.toml" if directory and not given.recipes else None
    single = stored is not None and stored.is_file() and not stored.with_name("pipeline.json").exists()
    return [f"@{stored}", *items] if single else items


def spec_for(items: Sequence[str], checkpoint: Path | None, *, purpose: Purpose) -> RunSpec:
    """Load the configuration of `items`; without a recipe, that of the checkpoint's run if there is one."""
    if checkpoint is not None and not split_arguments(items).recipes:
        stored = next((each / "config.toml" for each in (checkpoint, *checkpoint.resolve().parents[:2])
                    if (each / "config.toml").is_file()), None)  # fmt: skip
        if stored is None:
            note(f"{checkpoint} has no config.toml: settings without a recipe are defaults, including the task")
        items = [f"@{stored}", *items] if stored else items
    return load_spec(items, purpose=purpose)


@contextmanager
def model_folder(checkpoint: Path | None, *, option: str = "--checkpoint") -> Iterator[Path | None]:
    """Yield the folder with the weights: the checkpoint, or the newest one of a run directory.

    The folder is pinned against deletion by a running process until the block ends.

    Args:
        option: name of the option, for errors.

    Raises:
        UserError: no checkpoint found.
    """
    if checkpoint is None:
        yield None
        return
    where = f"{option} {checkpoint}"
    for _ in range(_ATTEMPTS):
        folder = _newest(checkpoint, where)
        with pinned(folder) as found:
            if found:
                yield folder
                return
    raise UserError(
        "every checkpoint was deleted while it was opened", where=where, hint="raise checkpoint.keep_last of its run"
    )


def _newest(checkpoint: Path, where: str) -> Path:
    if any((checkpoint / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return checkpoint
    if not checkpoint.is_dir():
        raise UserError("no such folder", where=where, hint="name a run directory or runs/<name>/checkpoints/step_N")
    folder = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    steps = {int(match[1]): each for each in folder.iterdir() if (match := STEP_FOLDER.fullmatch(each.name))}
    if not steps:
        raise UserError("contains no checkpoint", where=where, hint="a checkpoint is a folder with a config.json")
    return steps[max(steps)]


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
    if away := [path for path in paths if not path.exists()]:
        return [f"data: not read, because {away[0]} is not on this machine"]
    if not paths and not isinstance(spec.task, PythonTask):
        return []
    from tidemill.envs.text.eval_sets import counted
    from tidemill.envs.text.row_report import report_rows

    return event_text(DATA, report_rows(spec, counted(spec))).splitlines()


def changed_values(spec: RunSpec) -> list[tuple[str, Any]]:
    """(dotted key, value) of the keys that differ from their defaults, in the schema's order."""
    rewards = {"scoring.rewards": spec.scoring.rewards, "eval.rewards": spec.eval.rewards}
    short = {
        key: [{"kind": each.kind, **each.model_dump(mode="json", exclude_defaults=True)} for each in given]
        for key, given in rewards.items()
    }
    return [(key, short.get(key, value)) for key, _, value in differences(RunSpec(), spec) if value is not None]
