"""`tidemill recipe list`, `show NAME` and `copy NAME FILE`."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape
from rich.table import Table

from tidemill.cli.output import Json, Result
from tidemill.config.keys import did_you_mean
from tidemill.config.load import built_in_recipes
from tidemill.core.errors import UserError
from tidemill.telemetry.jsonl import disk_error

app = App(name="recipe", help="List, show and copy the built-in recipes.", help_epilogue="")
Name = Annotated[str, Parameter(name="NAME")]


@app.command(name="list")
def list_recipes(*, json: Json = False) -> Result:
    """List the built-in recipes; `tidemill train @NAME` runs one."""
    rows = [{"name": name, "about": about(path), "path": str(path)} for name, path in built_in_recipes().items()]
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "about"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(escape(row["name"]), escape(row["about"]))
    return Result(data={"recipes": rows}, text=table)


@app.command(name="show")
def show(name: Name, /, *, json: Json = False) -> Result:
    """Print a recipe.

    Parameters
    ----------
    name
        As in `tidemill recipe list`.
    """
    text = found(name).read_text(encoding="utf-8")
    return Result(data={"name": name, "recipe": tomllib.loads(text)}, text=text.rstrip())


@app.command(name="copy")
def copy(name: Name, target: Annotated[Path, Parameter(name="FILE")], /, *, json: Json = False) -> Result:
    """Copy a recipe and the files that it names, to change it.

    Parameters
    ----------
    name
        As in `tidemill recipe list`.
    target
        A new file, for example mine.toml, or a folder.
    """
    recipe = found(name)
    target = target / recipe.name if target.is_dir() else target
    text = recipe.read_text(encoding="utf-8")
    named = [each for each in sorted((recipe.parent / "data").iterdir()) if f"data/{each.name}" in text]
    copies = {recipe: target, **{each: target.parent / "data" / each.name for each in named}}
    if taken := [each for each in copies.values() if each.exists()]:
        raise UserError("the file exists", where=str(taken[0]), hint="name another file, or remove it")
    try:
        for source, each in copies.items():
            each.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, each)
    except OSError as error:
        raise disk_error(error, target) from error
    files = [str(each) for each in copies.values()]
    return Result(data={"files": files}, text="\n".join([*files, f"run it with: tidemill train @{target}"]))


def found(name: str) -> Path:
    """Raises UserError: there is no recipe of that name."""
    recipes = built_in_recipes()
    plain = name.removeprefix("@").removesuffix(".toml")
    if plain not in recipes:
        hint = did_you_mean(plain, recipes) or f"recipes: {', '.join(recipes)}"
        raise UserError("no such recipe", where=name, hint=hint)
    return recipes[plain]


def about(path: Path) -> str:
    """The first sentence of the comment that a recipe starts with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).split(". ")[0].rstrip(".")
