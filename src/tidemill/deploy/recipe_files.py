"""The files of this machine that a recipe names travel in a ConfigMap."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.config.addresses import HUB
from tidemill.config.functions import FUNCTION_KEYS
from tidemill.config.keys import ITEM, KeyPath
from tidemill.config.load import INPUT_PATHS, MODEL_SOURCES, PREFIX, STAGES, Tree
from tidemill.config.pipeline import REFERENCE_KEYS
from tidemill.core.errors import UserError
from tidemill.core.folders import similar_path
from tidemill.deploy.cluster_recipe import refuse_secrets
from tidemill.deploy.places import MODELS_FOLDER, Places

KIB = 1024
LIMIT = 512 * KIB
"""Bytes of a recipe and its files. A ConfigMap holds 1 MiB, of which base64 would take a third."""
RECIPE = "recipe.toml"
PATH_KEYS: set[KeyPath] = {
    path
    for path in (*INPUT_PATHS, *MODEL_SOURCES, *(tuple(p for p in key if p != ITEM) for key in REFERENCE_KEYS))
    if path[0] not in ("simulation", "pool")  # not read by training on a cluster
}
NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._-]")  # of a ConfigMap


@dataclass(slots=True)
class Travelling:
    """The files that are found in a recipe."""

    places: Places
    files: dict[str, bytes] = field(default_factory=dict)  # by name in the folder of the recipe
    names: dict[Path, str] = field(default_factory=dict)
    shared: list[Path] = field(default_factory=list)  # folders that the machines of the target see, too

    def add(self, path: Path, key: str) -> str:
        """Path of a file on the cluster. Raises UserError: no such file, a folder, or files that are too large."""
        where = f"{key} = {path}"
        if path in self.names:
            return f"{self.places.recipe}/{self.names[path]}"
        if self.places.shares_files and path.exists():
            self.shared.append((path if path.is_dir() else path.parent).absolute())
            return str(path.absolute())
        if path.is_dir():
            raise UserError("is a folder of this machine", where=where, hint=self._copy_hint(path))
        try:
            total = path.stat().st_size + sum(map(len, self.files.values()))
            if total > LIMIT:
                what = f"the recipe's files have {math.ceil(total / KIB)} KiB, and {LIMIT // KIB} KiB travel with it"
                raise UserError(what, where=where, hint=self._copy_hint(path))
            content = path.read_bytes()
        except OSError as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            storage = self.places.runs if self.places.keeps_runs else MODELS_FOLDER
            hint = similar_path(path, files=True) or f"name a file, or one of the storage as {storage}/..."
            raise UserError(what, where=where, hint=hint) from error
        if path.suffix == ".py":
            refuse_secrets(content.decode("utf-8", "replace"), where)
        self.names[path] = name = self._free_name(path)
        self.files[name] = content
        return f"{self.places.recipe}/{name}"

    @property
    def mounted(self) -> tuple[str, ...]:
        """How paths on the machines of the target begin."""
        return tuple(f"{folder}/" for folder in (self.places.runs, self.places.models, self.places.recipe))

    def _free_name(self, path: Path) -> str:
        """The file's name, with that of its folder if another file has it."""
        names = [path.name, *(f"{first}-{path.name}" for first in (path.parent.name, *range(2, 1000)))]
        keys = (NOT_IN_KEYS.sub("-", name) for name in names)
        return next(key for key in keys if key not in self.files and key != RECIPE)

    def _copy_hint(self, path: Path) -> str:
        if not self.places.keeps_runs:
            return f"copy it to the bucket of deploy.models and write {MODELS_FOLDER}/{path.name}"
        return (
            f"copy it to the claim of deploy.storage and write {self.places.runs}/{path.name}, or to that of "
            f"deploy.models and write {self.places.models}/{path.name}"
        )


def with_files_on_cluster(tree: Tree, places: Places) -> tuple[Tree, Travelling]:
    """A recipe that names its files as they lie on the cluster, and those files.

    Raises:
        UserError: a file is missing or a folder, or all have more than 512 KiB.
    """
    travelling = Travelling(places)
    return _moved(tree, (), "", travelling), travelling


def _moved(value: Any, path: KeyPath, key: str, travelling: Travelling) -> Any:
    if isinstance(value, dict):
        return {
            name: _moved(below, (*path, name), f"{key}.{name}".lstrip("."), travelling) for name, below in value.items()
        }
    if isinstance(value, list):
        at = () if path == (STAGES,) else path
        return [_moved(below, at, f"{key}[{index}]", travelling) for index, below in enumerate(value)]
    if not isinstance(value, str) or value.startswith((PREFIX, HUB, *travelling.mounted)):
        return value
    file, colon, function = value.rpartition(":")
    if path in FUNCTION_KEYS and colon and file.endswith(".py"):
        return f"{travelling.add(Path(file), key)}:{function}"
    is_local = path in PATH_KEYS and (value.startswith(("/", "./", "../")) or Path(value).exists())
    return travelling.add(Path(value), key) if is_local else value
