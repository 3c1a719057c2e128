"""The base of every configuration section."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]


class Config(BaseModel):
    """Frozen; unknown keys are refused; the string under a field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


ConfigT = TypeVar("ConfigT", bound=Config)


def refuse(faults: list[str], config: ConfigT) -> ConfigT:
    """`config` itself where nothing is wrong; else a ValueError with one fault and its cure a line."""
    if faults:
        raise ValueError("\n".join(faults))
    return config
