"""`tidemill model list`, `get`, `merge`, and `tidemill export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from rich.markup import escape
from rich.table import Table

from tidemill.cli.doctor import size
from tidemill.cli.output import Json, Result, note
from tidemill.config.load import load_spec
from tidemill.config.model import EXPORT_DTYPE, dtype_name
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.models.catalog import listing, resolve
from tidemill.models.model_source import open_model, write_prompts

app = App(name="model", help="List models; download one into the cache; merge an adapter.", help_epilogue="")


@app.command(name="list")
def list_models(*, json: Json = False) -> Result:
    """List built-in and cached models. model.source also accepts a local folder or a hub id."""
    models = [msgspec.to_builtins(entry) for entry in listing()]
    return Result(data={"models": models}, text=model_table(models))


@app.command(name="get")
def get(
    name: Annotated[str, Parameter(name="NAME")],
    /,
    *items: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="`--model.revision TEXT`, `--model.char.layers N`, ...")
    ],
    json: Json = False,
) -> Result:
    """Prepare a model: build, convert or download it into the cache, or check a local folder.

    Parameters
    ----------
    name
        As model.source: smollm2-135m, char, a folder, or a hub id.
    """
    if name.startswith(("-", "@")):
        raise UserError("expected the model's name first", where=name, hint="write tidemill model get NAME")
    spec = load_spec([*items, f"--model.source={name}"], purpose="read")
    folder = resolve(spec.model, progress=note)
    return Result(data={"name": name, "path": str(folder)}, text=str(folder))


@app.command(name="merge")
def merge(
    checkpoint: Annotated[str, Parameter(name="CHECKPOINT")],
    directory: Annotated[Path, Parameter(name="DIRECTORY")],
    /,
    *,
    json: Json = False,
) -> Result:
    """Write the model of a LoRA run as a plain Hugging Face folder in fp32, with the adapter merged into the base.

    Parameters
    ----------
    checkpoint
        A checkpoint with an adapter, or a run directory (its newest checkpoint).
    directory
        A new or empty output folder, usable as model.source.
    """
    with open_model(checkpoint, where="CHECKPOINT") as found:
        from tidemill.models.saving import export_merged

        if found.folder is None:
            hint = similar_path(Path(checkpoint)) or "name a run directory, or a checkpoint of it"
            raise UserError("there is no such folder", where=f"CHECKPOINT {checkpoint}", hint=hint)
        export_merged(found.folder, directory, resolve_base=lambda model: resolve(model, progress=note))
        write_prompts(found.prompts, directory)
    return Result(data={"checkpoint": found.source, "path": str(directory)}, text=str(directory))


def export(
    checkpoint: Annotated[str, Parameter(name="MODEL")],
    directory: Annotated[Path, Parameter(name="DIRECTORY")],
    /,
    *,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"],
        Parameter(name="--dtype", help="Type of the weights; fp32 is that of checkpoints and exact."),
    ] = EXPORT_DTYPE,
    push: Annotated[
        str | None, Parameter(name="--push", help="Also upload the folder to this hub repository, `owner/name`.")
    ] = None,
    json: Json = False,
) -> Result:
    """Write a model as a plain Hugging Face folder with a model card; an adapter is merged into its base.

    Parameters
    ----------
    checkpoint
        A run directory (its newest checkpoint), a checkpoint, a folder, a name or a hub id.
    directory
        A new folder, or an earlier export, which is replaced.
    """
    with open_model(checkpoint, where="MODEL") as found:
        from tidemill.jobs.export import export_source

        exported = export_source(found, to=directory, dtype=dtype_name(dtype), progress=note)
    text = f"{directory}: {exported.parameters / 1e6:.1f} M parameters, {size(exported.bytes)}"
    if push:
        from tidemill.models.hub import push_folder

        text += f"\nuploaded to {push_folder(directory, push, progress=note)}"
    data = {"checkpoint": found.source, "path": str(directory), "pushed": push, **msgspec.to_builtins(exported)}
    return Result(data=data, text=text)


def model_table(models: Sequence[dict[str, Any]]) -> Table:
    """One row per model: name, parameters, size on disk, origin."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("model", "parameters", "cached", "from"):
        shown.add_column(heading, overflow="fold")
    for model in models:
        parameters = f"{model['parameters'] / 1e6:.1f} M" if model["parameters"] else "unknown"
        cached = size(model["size_bytes"]) if model["cached"] else "no"
        shown.add_row(escape(model["name"]), parameters, cached, escape(model["origin"]))
    return shown
