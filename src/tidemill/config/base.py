"""The base class of every configuration section, and types that several sections share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator


class Config(BaseModel):
    """Frozen; unknown keys are refused; the docstring below a field is the key's documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def issues(self) -> Iterator[str]:
        """Contradictions between the section's keys, each as "what; hint"."""
        yield from ()

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if issues := list(self.issues()):
            raise ValueError("\n".join(issues))
        return self


def _folder_name(name: str) -> str:
    if name in (".", "..") or "/" in name:
        raise ValueError(f"{name!r} is not a folder name; use letters, digits, - and _ (a path belongs in run.dir)")
    return name


def _output_folder(path: str | Path | None) -> str | Path | None:
    if path == "":  # usually an unset shell variable; Path("") would be the working directory
        raise ValueError('is empty; name a folder ("." is the working directory), or leave it out')
    return path


Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]  # the range of torch's and the ledger's seeds
Probability = Annotated[float, Field(ge=0, le=1)]
FolderName = Annotated[str, Field(min_length=1), AfterValidator(_folder_name)]
OutputFolder = Annotated[Path | None, BeforeValidator(_output_folder)]
