"""The base class of every configuration section, and types that several sections share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from tidemill.extensions.registry import PATH, Kind, installed


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


@dataclass(frozen=True, slots=True)
class Neutral:
    """Metadata of a key or section that does not affect the output of stages of these kinds; without kinds, of any.

    A missing mark repeats stages without need, and a wrong one keeps stale results. A run may be resumed with another
    value of what does not affect it.
    """

    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resumable:
    """Metadata of a key that affects a run, and may have another value when the run is resumed."""


@dataclass(frozen=True, slots=True)
class ActiveIf:
    """Metadata of a key that has an effect only under a condition."""

    holds: Callable[[Any], bool]  # of a RunSpec
    reason: str  # why it has none otherwise


NEUTRAL = Neutral()
TRAINING_ONLY = Neutral(("pairs", "eval"))
"""Of a key that affects only training, in a section that other kinds use, too."""
RESUMABLE = Resumable()
RUNS_AHEAD = ActiveIf(
    lambda spec: spec.schedule.max_policy_lag > 0, "schedule.max_policy_lag = 0 leaves no groups for another batch"
)
ELASTIC = ActiveIf(lambda spec: spec.is_elastic, "the pool has no preemptible workers")
ON_RAY = ActiveIf(lambda spec: spec.runtime == "ray", 'runtime is not "ray"')
HAS_REFERENCE = ActiveIf(lambda spec: spec.algorithm.kl_beta > 0, "algorithm.kl_beta = 0 needs no reference")
HAS_CRITIC = ActiveIf(lambda spec: spec.algorithm.needs_critic, 'there is no critic: algorithm.advantage is not "gae"')


@dataclass(frozen=True, slots=True)
class NameOrFunction:
    """Metadata of a text key: one of the built-in names, or a reference to a user function (`extensions.registry`)."""

    kind: Kind
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    @property
    def accepts(self) -> str:
        names = "".join(f'"{name}", ' for name in self.names if name)
        return f"{names and 'one of ' + names}{names and 'or '}path/file.py:function"

    def check(self, given: str) -> str:
        if given in self.names or PATH.fullmatch(given) or given in installed(self.kind):
            return given
        close = get_close_matches(given, self.names, 1, 0.6)
        hint = f"did you mean {close[0]}? or " if close else ""
        names = ", ".join(filter(None, self.names))
        known = f"neither one of {names} nor" if names else "not"
        raise ValueError(
            f"{given!r} is {known} a function; {hint}write package.module:function or path/file.py:function"
        )


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


def is_beyond_loopback(host: str) -> bool:
    """Whether other machines can reach an address that is listened on."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
