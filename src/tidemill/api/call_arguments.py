"""Arguments that several functions share: the recipe, overrides, the run directory and callbacks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.api.inputs import DATA_SUFFIXES, INPUTS, ROW_HINT, Inputs, refuse_conflicts
from tidemill.config.addresses import address_hint
from tidemill.config.issues import value_at
from tidemill.config.load import Tree, merge, override_tree, recipe_path
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pipeline import KINDS, StageKind, load_directory
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.telemetry.run_dir import RunDirectory

Recipe: TypeAlias = str | Path | RunSpec | None
Overrides: TypeAlias = Mapping[str, Any]
Function: TypeAlias = Callable[..., Any]
MODEL_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""OWNER/NAME on the hub."""


def checked_recipe(recipe: Any, *, of_runs: str = "run_dir") -> Recipe:
    """
    Args:
        of_runs: the argument that takes the directory of a run.

    Raises:
        UserError: it is no recipe, but a model or data.
    """
    hint = "a recipe is a TOML file or the name of a built-in one (`tidemill recipe list`)"
    if recipe is None or isinstance(recipe, RunSpec):
        return recipe
    if not isinstance(recipe, (str, os.PathLike)):
        what = f"needs a TOML file or a name, was given {type(recipe).__name__}"
        meant = "model" if callable(recipe) or hasattr(recipe, "save_pretrained") else "data"
        raise UserError(what, where="recipe", hint=f"did you mean {meant}=...? {hint}")
    if str(recipe) in BUILT_IN_MODELS:
        raise UserError("is a model, not a recipe", where=str(recipe), hint=f'did you mean model="{recipe}"? {hint}')
    if meant := address_hint(str(recipe)):
        what = "is a web address, not a recipe"
        raise UserError(what, where=str(recipe), hint=f"{meant}, as model=... or data=...; {hint}")
    path = recipe_path(str(recipe))
    if path.suffix in DATA_SUFFIXES:
        raise UserError("is a data file, not a recipe", where=str(recipe), hint=f'did you mean data="{recipe}"?')
    if path.is_dir() or (not path.is_file() and MODEL_NAME.fullmatch(str(recipe))):
        meant = of_runs if (path / "config.toml").is_file() else "model"
        what = "is a folder, not a recipe" if path.is_dir() else "there is no such recipe"
        raise UserError(what, where=str(recipe), hint=f'did you mean {meant}="{recipe}"? {hint}')
    return Path(recipe)


def checked_overrides(overrides: Any, run_dir: Any = None) -> Tree:
    """Overrides as nested tables, with the run directory.

    Raises:
        UserError: they are something else, or name different directories.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        what = f"needs a dict of values by key, was given {type(overrides).__name__}"
        raise UserError(what, where="overrides", hint='for example overrides={"trainer.steps": 100}')
    given = override_tree(overrides or {})
    if run_dir is None:
        return given
    if not isinstance(run_dir, (str, os.PathLike)):
        raise UserError(f"needs a path, was given {run_dir!r:.60}", where="run_dir", hint='for example "runs/mine"')
    own = override_tree({"run.dir": str(run_dir)})
    refuse_conflicts(own, given)
    return merge(own, given)


def layered(
    recipe: Recipe, given: Tree, *, sections: Container[str] | None = None, replaced: Iterable[str] = ()
) -> tuple[str | Path | None, Tree]:
    """A recipe and overrides; a configuration given as an object becomes overrides of the defaults.

    Args:
        sections: those of its sections that count; None for all.
        replaced: dotted keys and sections of which nothing is kept.
    """
    if not isinstance(recipe, RunSpec):
        return recipe, given
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    for key in replaced:
        section, _, name = key.rpartition(".")
        table = tree
        for part in section.split(".") if section else ():
            table = table.get(part, {})
        table.pop(name, None)
    return None, merge({name: table for name, table in tree.items() if sections is None or name in sections}, given)


def stored_config(given: Tree, *, named: bool) -> Path | None:
    """The configuration of the run in `run.dir`, if there is one.

    Args:
        named: the call names data or a task; if the run has not begun, it is a correction of the call that failed.
    """
    directory = value_at(given, ("run", "dir"))
    if not directory or not isinstance(directory, (str, Path)):
        return None
    run = RunDirectory(Path(directory))
    return run.config if run.exists and (has_begun(run.path) or not named) else None


def has_begun(directory: Path) -> bool:
    """Whether a run has read its model, so that what its call saved must not change."""
    return "model_digest" in RunDirectory(directory).read_manifest()


def collected(
    recipe: Any = None,
    *,
    overrides: Any = None,
    run_dir: Any = None,
    kind: StageKind | None = None,
    shape: str = ROW_HINT,
    **objects: Any,
) -> tuple[Recipe, Inputs, Tree]:
    """The recipe, the other arguments, and the overrides of a call; saves objects in the run directory.

    Args:
        kind: of the one stage that is run; None: a whole recipe.
        shape: an example of a row.
        objects: as for `Inputs.add`.

    Raises:
        UserError: an argument is invalid.
    """
    given = checked_overrides(overrides, run_dir)
    named = any(objects.get(name) is not None for name in ("data", "task", "environment"))
    base = checked_recipe(recipe) or stored_config(given, named=named)
    if base is None and kind is not None:
        given = merge({"run": {"name": kind}}, given)
    directory = load_directory(*layered(base, given, sections=KINDS[kind].sections if kind else None))
    inputs = Inputs(folder=directory / INPUTS, kept=has_begun(directory), shape=shape)
    inputs.add(**objects)
    return base, inputs, given


def checked_callbacks(callbacks: Any) -> list[Any]:
    from tidemill.jobs.callbacks import check_callback

    given = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    return [check_callback(each) for each in given]
