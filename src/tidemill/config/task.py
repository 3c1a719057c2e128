"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse
from tidemill.config.data import DataFormat


class ArithmeticTask(Config):
    kind: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Any of + - * ; one is drawn per prompt."""
    digits: int = Field(1, ge=1, le=6)
    """Largest number of digits of an operand."""
    largest: int | None = Field(None, ge=9, le=99)
    """Largest operand, for a difficulty between one and two digits; none takes all numbers of so many digits."""
    shots: int = Field(2, ge=0, le=16)
    """Worked examples before the question, the same for every prompt."""
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of the problems kept for evaluation; a + b and b + a always fall on the same side."""

    @model_validator(mode="after")
    def _possible(self) -> ArithmeticTask:
        faults = []
        if not self.operators:
            faults.append('operators is empty; name at least one of + - *, for example "+"')
        if unknown := "".join(sorted(set(self.operators) - set("+-*"))):
            faults.append(
                f"operators = {self.operators!r} holds {unknown!r}; only + - * are known, written without spaces"
            )
        if self.largest is not None and len(str(self.largest)) != self.digits:
            faults.append(
                f"largest = {self.largest} is not a number of digits = {self.digits} digits; set digits = "
                f"{len(str(self.largest))}"
            )
        return refuse(faults, self)

    @property
    def operands(self) -> int:
        """How many numbers an operand may be, from 0 on."""
        return 10**self.digits if self.largest is None else self.largest + 1


class ReasoningGymTask(Config):
    kind: Literal["reasoning_gym"]
    name: str
    """A reasoning-gym generator, for example `simple_equations`."""
    params: dict[str, bool | int | float | str] = {}
    """Passed to the generator."""
    train_size: int = Field(1000, ge=1)
    """Training prompts per epoch."""
    held_out_size: int = Field(100, ge=1)
    """Evaluation prompts, none of which is a training prompt."""
    system_prompt: str = ""
    """Put before every question."""


class PromptFiles(Config):
    kind: str
    path: Path
    """Prompts with their answers, one a row: `prompt` or `messages` (role and content each), and `answer`; the rest is
    metadata."""
    held_out_path: Path | None = None
    """Evaluation prompts; by default a share of `path`, chosen by content hash."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Share kept for evaluation when there is no held_out_path."""


class FileTask(PromptFiles):
    kind: Literal["file"]
    format: DataFormat = "auto"
    """auto: a folder is one that `datasets` saved (save_to_disk), *.parquet is Parquet, any other file JSON lines."""


class JsonlTask(PromptFiles):
    """`file` for JSON lines, whatever the file's name ends with."""

    kind: Literal["jsonl"]

    @property
    def format(self) -> DataFormat:
        return "jsonl"


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | FileTask | JsonlTask, Field(discriminator="kind")]
