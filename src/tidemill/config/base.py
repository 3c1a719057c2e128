"""The base of every configuration section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _named(path: str | Path | None) -> str | Path | None:
    if path == "":  # the variable that should have held it was not set; Path("") would be the working directory
        raise ValueError('is empty; name a folder ("." is the working directory), or leave it out')
    return path


def _one_folder(name: str) -> str:
    if name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > LONGEST_NAME_BYTES:
        shown = repr(name) if len(name) <= 60 else f"a name of {len(name.encode())} bytes"
        raise ValueError(f"{shown} cannot name a folder; use letters, digits, - and _ (a path belongs in run.dir)")
    return name


LONGEST_NAME_BYTES = 255  # of one part of a path, on Linux and macOS
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]  # what the ledger and torch can hold
Probability = Annotated[float, Field(ge=0, le=1)]
FolderName = Annotated[str, Field(min_length=1), AfterValidator(_one_folder)]
"""Names one folder below another: the run's below runs/, a stage's below its run's."""
OutputFolder = Annotated[Path | None, BeforeValidator(_named)]


class Config(BaseModel):
    """Frozen; unknown keys are refused; the string under a field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


ConfigT = TypeVar("ConfigT", bound=Config)


def refuse(faults: list[str], config: ConfigT) -> ConfigT:
    """`config` itself where nothing is wrong; else a ValueError with one fault and its hint a line."""
    if faults:
        raise ValueError("\n".join(faults))
    return config
