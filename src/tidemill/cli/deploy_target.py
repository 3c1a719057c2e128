"""`tidemill deploy diff | apply | status | logs | delete`: a rendered recipe on its target."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tidemill.cli.arguments import Items
from tidemill.cli.deploy_command import Admin, rendered_recipe
from tidemill.cli.output import Json, Result, note
from tidemill.deploy.targets import target_of

Context = Annotated[str, Parameter(name="--context", help="Context of kubectl's configuration. Default: its current.")]
Storage = Annotated[
    bool,
    Parameter(
        name="--storage", negative=(), help="Also delete the run directory, or the rendered claim with all runs on it."
    ),
]
Once = Annotated[bool, Parameter(name="--once", negative=(), help="Print what there is; do not follow.")]


def diff(*items: Items, context: Context = "", admin: Admin = False, json: Json = False) -> Result:
    """Show what `apply` would change in the cluster."""
    rendered = rendered_recipe(items, admin=admin)
    text = target_of(rendered.deploy, context=context).diff(rendered)
    return Result(data={"diff": text}, text=text.rstrip() or "no changes")


def apply(*items: Items, context: Context = "", admin: Admin = False, json: Json = False) -> Result:
    """Create the documents of a recipe in the cluster, or change them."""
    rendered = rendered_recipe(items, admin=admin)
    if not json:
        for line in rendered.notes:
            note(line)
    applied = target_of(rendered.deploy, context=context).apply(rendered)
    return Result(data={"applied": applied}, text="\n".join(applied))


def status(*items: Items, context: Context = "", json: Json = False) -> Result:
    """Show the job and its machines."""
    rendered = rendered_recipe(items)
    rows = target_of(rendered.deploy, context=context).status(rendered)
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{row['kind']:10}  {row['name']:{width}}  {row['state']}" for row in rows]
    nothing = f"there is no job {rendered.job}; `tidemill deploy apply` creates it"
    return Result(data={"job": rendered.job, "objects": rows}, text="\n".join(lines) or nothing)


def logs(*items: Items, context: Context = "", once: Once = False) -> Result:
    """Print what the run prints, until it has ended; also after a change of the head."""
    rendered = rendered_recipe(items)
    target_of(rendered.deploy, context=context).print_log(rendered, follow=not once)
    return Result()


def delete(*items: Items, context: Context = "", storage: Storage = False, json: Json = False) -> Result:
    """Delete what `render` made. The runs on the storage stay."""
    rendered = rendered_recipe(items)
    deleted = target_of(rendered.deploy, context=context).delete(rendered, storage=storage)
    return Result(data={"deleted": deleted}, text="\n".join(deleted) or "nothing to delete")
