"""`tidemill env list`, `show NAME` and `install NAME`: the environments that can be trained on."""

from __future__ import annotations

import inspect
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape
from rich.table import Table

from tidemill.agents.adapters.environments import ADAPTERS
from tidemill.agents.adapters.install import NAMES, install_adapter, is_installed
from tidemill.agents.builtin import BUILT_IN
from tidemill.cli.output import Json, Result
from tidemill.config.keys import did_you_mean
from tidemill.core.errors import UserError

app = App(name="env", help="List environments; install those of other packages.", help_epilogue="")


@app.command(name="list")
def list_environments(*, json: Json = False) -> Result:
    """List the environments that `env.name` can name, besides your own."""
    rows = [
        {"name": name, "installed": name in BUILT_IN or is_installed(name), "about": _first_sentence(environment)}
        for name, environment in (BUILT_IN | ADAPTERS).items()
    ]
    table = Table(box=None, pad_edge=False)
    for heading in ("environment", "installed", "about"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(str(row["name"]), "yes" if row["installed"] else "no", escape(str(row["about"])))
    return Result(data={"environments": rows}, text=table)


@app.command(name="show")
def show(name: Annotated[str, Parameter(name="NAME")], /, *, json: Json = False) -> Result:
    """Describe an environment and its parameters (`env.params`).

    Parameters
    ----------
    name
        As in `tidemill env list`.
    """
    environments = BUILT_IN | ADAPTERS
    if name not in environments:
        hint = did_you_mean(name, environments) or "`tidemill env list` lists them"
        raise UserError(f"there is no environment {name!r}", where="NAME", hint=hint)
    about = inspect.getdoc(environments[name]) or ""
    defaults = {
        parameter.name: None if parameter.default is parameter.empty else parameter.default
        for parameter in inspect.signature(environments[name]).parameters.values()
    }
    lines = [f"  {key} = {'(required)' if value is None else repr(value)}" for key, value in defaults.items()]
    text = "\n".join([about, "", "env.params, with their defaults:", *(lines or ["  none"])])
    return Result(data={"name": name, "about": about, "params": defaults}, text=escape(text))


@app.command(name="install")
def install(name: Annotated[str, Parameter(name="NAME")], /, *, json: Json = False) -> Result:
    """Install the package of an environment, with pinned versions, in a Python environment of its own.

    Parameters
    ----------
    name
        As in `tidemill env list`.
    """
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or f"one of {', '.join(NAMES)}"
        raise UserError(f"there is nothing to install for {name!r}", where="NAME", hint=hint)
    folder = install_adapter(name)
    return Result(data={"name": name, "folder": str(folder)}, text=f"{name}: {folder}")


def _first_sentence(environment: type) -> str:
    text = " ".join((inspect.getdoc(environment) or "").split("\n\n")[0].split())
    return text.split(". ")[0].removesuffix(".") + "."
