"""`tidemill eval`: greedy accuracy on held-out prompts."""

from __future__ import annotations

from typing import Any

from tidemill.cli.arguments import Checkpoint, Items, model_folder, spec_for
from tidemill.cli.arguments import dry_run as show_dry_run
from tidemill.cli.output import note
from tidemill.cli.result import DryRun, Json, Result


def evaluate(*items: Items, checkpoint: Checkpoint = None, dry_run: DryRun = False, json: Json = False) -> Result:
    """Measure greedy accuracy on the task's held-out prompts, of the model or of a checkpoint."""
    spec = spec_for(items, checkpoint, purpose="eval")
    folder = model_folder(checkpoint)
    if dry_run:
        return show_dry_run(spec, purpose="eval")
    from tidemill.runtime.evaluate import evaluate as run

    found = run(spec, model_folder=folder, progress=note)
    return Result(data=found, text=figures(found))


def figures(found: dict[str, Any]) -> str:
    """One scalar a line; lists and tables are left to `--json`."""
    scalars = {name: value for name, value in found.items() if isinstance(value, (str, int, float))}
    width = max(map(len, scalars), default=0)
    return "\n".join(
        f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}"
        for name, value in scalars.items()
    )
