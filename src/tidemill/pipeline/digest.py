"""A stage's address: a digest of all that decides what it gives. Pure; the contents of files are handed in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.keys import dotted
from tidemill.config.layers import PREFIX
from tidemill.config.load import flattened
from tidemill.config.model import BUILT_IN_MODELS
from tidemill.config.pipeline import KINDS, NEUTRAL, StageSpec, asked_for
from tidemill.envs.text.import_path import source_file
from tidemill.models.catalog import is_local

FORMAT = 2
"""Raised when stages of equal configuration begin to give something else."""
SHORT_CHARS = 10
NAMED = ("source", "compare_with")
"""Keys that take the name of a model as well as its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """A file or folder that a stage reads, other than another stage's product."""

    location: tuple[str | int, ...]
    path: Path

    @property
    def key(self) -> str:
        return dotted(self.location)


def file_inputs(stage: StageSpec) -> list[FileInput]:
    """Every file and folder it reads: data, models named by a path, and the files that hold reward
    functions. What such a file imports in turn is not looked at."""
    found = []
    for location, value in asked_for(stage.spec, stage.kind):
        is_name = location[-1] in NAMED and (value in BUILT_IN_MODELS or not is_local(value))
        if not value.startswith(PREFIX) and not is_name:
            found.append(FileInput(location=location, path=Path(value).expanduser()))
    if "scoring" in KINDS[stage.kind].sections:
        for index, reward in enumerate(stage.spec.scoring.rewards):
            if reward.function and (file := source_file(reward.function)):
                found.append(FileInput(location=("scoring", "rewards", index, "function"), path=file))
    return found


def effective(stage: StageSpec, *, upstream: Mapping[str, str], contents: Mapping[str, str]) -> dict[str, Any]:
    """What decides what the stage gives: values by dotted key, files as their contents, stages as their digests.

    Args:
        upstream: digests of the stages it takes from, by name.
        contents: digests of the files it reads, by the dotted key that names them.
    """
    sections: dict[str, Any] = stage.sections()
    for reference in stage.references:
        _put(sections, reference.key, {"stage": upstream[reference.stage]})
    for file in file_inputs(stage):
        name = file.location[-1]
        # Where a file lies is of no consequence; which function in it is.
        rest = (
            stage.spec.scoring.rewards[int(file.location[2])].function.rpartition(":")[2] if name == "function" else ""
        )
        _put(sections, file.location, {"content": contents[file.key], "name": rest})
    if stage.spec.model.source != "char":
        sections["model"].pop("char")  # how a model is built that is not asked for
    if "supervised" in sections and stage.spec.supervised.epochs:
        sections["trainer"].pop("steps")  # epochs decide
    neutral = (*NEUTRAL, *KINDS[stage.kind].neutral)
    return {key: value for key, value in flattened(sections).items() if not key.startswith(neutral)}


def stage_digest(stage: StageSpec, values: Mapping[str, Any]) -> str:
    """32 hex digits of kind and `effective` values, whatever their order."""
    document = msgspec.json.encode([FORMAT, stage.kind, dict(values)], order="deterministic")
    return hashlib.blake2b(document, digest_size=16).hexdigest()


def folder_name(stage: StageSpec, digest: str) -> str:
    """`sft-3f0c9a71b2`: its folder below `stages`."""
    return f"{stage.name}-{digest[:SHORT_CHARS]}"


def _put(sections: dict[str, Any], location: tuple[str | int, ...], value: Any) -> None:
    node: Any = sections
    for part in location[:-1]:
        node = node[part]
    node[location[-1]] = value
