"""`tidemill deploy diff | apply | status | logs | delete`: a rendered recipe in the cluster of the user's kubectl."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tidemill.cli.arguments import Items
from tidemill.cli.deploy_command import Admin, rendered_recipe
from tidemill.cli.output import Json, Result, note
from tidemill.deploy.job_state import job_state
from tidemill.deploy.kubectl import Kubectl, job_of

Context = Annotated[str, Parameter(name="--context", help="Context of kubectl's configuration. Default: its current.")]
Storage = Annotated[
    bool, Parameter(name="--storage", negative=(), help="Also delete the rendered claim, with all runs on it.")
]
Once = Annotated[bool, Parameter(name="--once", negative=(), help="Print what there is; do not follow.")]


def diff(*items: Items, context: Context = "", admin: Admin = False, json: Json = False) -> Result:
    """Show what `apply` would change in the cluster."""
    text = Kubectl(context=context).diff(rendered_recipe(items, admin=admin))
    return Result(data={"diff": text}, text=text.rstrip() or "no changes")


def apply(*items: Items, context: Context = "", admin: Admin = False, json: Json = False) -> Result:
    """Create the documents of a recipe in the cluster, or change them."""
    rendered = rendered_recipe(items, admin=admin)
    if not json:
        for line in rendered.notes:
            note(line)
    applied = Kubectl(context=context).apply(rendered)
    return Result(data={"applied": applied}, text="\n".join(applied))


def status(*items: Items, context: Context = "", json: Json = False) -> Result:
    """Show the job, its Ray cluster and its pods."""
    job = job_of(rendered_recipe(items))
    rows = job_state(Kubectl(context=context), job)
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{row['kind']:10}  {row['name']:{width}}  {row['state']}" for row in rows]
    nothing = f"there is no {job.name} in the namespace {job.namespace}; `tidemill deploy apply` creates it"
    return Result(data={"job": job.name, "namespace": job.namespace, "objects": rows}, text="\n".join(lines) or nothing)


def logs(*items: Items, context: Context = "", once: Once = False) -> Result:
    """Print what the run prints, until it has ended; also after a change of the head."""
    Kubectl(context=context).print_log(job_of(rendered_recipe(items)), follow=not once)
    return Result()


def delete(*items: Items, context: Context = "", storage: Storage = False, json: Json = False) -> Result:
    """Delete what `render` made. The runs on the storage stay."""
    deleted = Kubectl(context=context).delete(job_of(rendered_recipe(items)), storage=storage)
    return Result(data={"deleted": deleted}, text="\n".join(deleted) or "nothing to delete")
