"""`tidemill deploy`: a recipe as a job on a cluster or in clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tidemill.cli.arguments import Items
from tidemill.cli.output import Json, Result, note
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.render import render
from tidemill.hardware.process_memory import Models
from tidemill.telemetry.jsonl import disk_error

app = App(
    name="deploy",
    help="Run a recipe on Kubernetes, Slurm, SkyPilot or OSMO, as its section [deploy] says.",
    help_epilogue="",
)
VERBS = {  # loaded when one is used
    "check": ("tidemill.cli.deploy_check:check_command", "Check the files of a recipe, or Kubernetes documents."),
    "diff": ("tidemill.cli.deploy_target:diff", "Show what apply would change."),
    "apply": ("tidemill.cli.deploy_target:apply", "Start the job of a recipe, or change it."),
    "status": ("tidemill.cli.deploy_target:status", "Show the job and its machines."),
    "logs": ("tidemill.cli.deploy_target:logs", "Print what the run prints, until it has ended."),
    "delete": ("tidemill.cli.deploy_target:delete", "Delete what render made; the runs on the storage stay."),
}
for _verb, (_function, _words) in VERBS.items():
    app.command(_function, name=_verb, help=_words, help_epilogue="")
Admin = Annotated[
    bool,
    Parameter(name="--admin", negative=(), help="The administrator's part instead: queues, quotas, monitoring."),
]


@app.command(name="render")
def render_command(
    *items: Items,
    out: Annotated[Path | None, Parameter(name="--out", help="Write the files into this folder.")] = None,
    admin: Admin = False,
    json: Json = False,
) -> Result:
    """Print the files of a recipe; what changes in the recipe goes to standard error."""
    result = rendered_recipe(items, admin=admin)
    if not json:
        for line in result.notes:
            note(line)
    written = [] if out is None else write_files(result, out)
    data = {"files": result.files, "notes": result.notes, "written": written}
    return Result(data=data, text="\n".join(written) if out else result.text.rstrip())


def rendered_recipe(items: tuple[str, ...], *, admin: bool = False) -> Rendered:
    """The documents of the recipe that a command line names, whose first word may lack the @.

    Raises:
        UserError: no recipe, or one that cannot be rendered.
    """
    if not items:
        raise UserError("expected a recipe", hint="write `tidemill deploy render recipe.toml`")
    first = items[0] if items[0].startswith(("@", "-")) else f"@{items[0]}"
    return render([first, *items[1:]], admin=admin, models_of=models_of)


def models_of(spec: RunSpec) -> Models | None:
    from tidemill.runtime.memory_check import known_models

    return known_models(spec, None, fetch=False)


def write_files(result: Rendered, folder: Path) -> list[str]:
    """Write the documents; returns their paths. Raises UserError: the folder has other files, or the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        documents = {each.name for each in folder.iterdir() if each.suffix in (".yaml", ".sbatch")}
        if others := sorted(documents - result.files.keys()):
            what = f"has documents of another rendering, such as {others[0]}"
            raise UserError(what, where=str(folder), hint="name an empty folder, or remove them")
        for name, text in result.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, folder) from error
    return [str(folder / name) for name in result.files]
