"""Options, tables and model shapes shared by the commands of `tidemill plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, Token
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tidemill.cli.output import Result
from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import quantity
from tidemill.hardware.completion_lengths import Lengths, lengths_of_run, log_normal_of_mean
from tidemill.hardware.figures import Figure
from tidemill.hardware.model_config import read_shape
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.hardware.process_memory import Models
from tidemill.models.model_source import locate
from tidemill.models.shapes import known_shape


def parse_integer(kind: type, tokens: Sequence[Token]) -> int:
    """Convert an option to an integer, without rounding.

    Raises:
        UserError: not an integer.
    """
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        hint = "write digits only"
        raise UserError(f"{token.value!r} is not an integer", where=str(token.keyword), hint=hint) from None


Whole = Annotated[int, Parameter(converter=parse_integer)]
Params = Annotated[str | None, Parameter(name="--params", help="Parameters of the model: 70e9 or 70b.")]
Model = Annotated[
    Path | None,
    Parameter(name="--model", help="A Hugging Face folder or config.json, instead of --params: no assumed shape."),
]
CatalogFile = Annotated[Path | None, Parameter(name="--catalog", help="Additional GPUs and machines, as TOML.")]
Explain = Annotated[
    bool, Parameter(name="--explain", negative=(), help="Print formula, inputs and source of every number.")
]

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def shape_of(params: str | None, model: Path | None) -> ModelShape:
    """The shape of the named model.

    Raises:
        UserError: neither or both options given, or not readable.
    """
    if (params is None) == (model is None):
        what = "no model given" if params is None else "both --params and --model are given"
        raise UserError(what, hint="give --params 70e9, or --model FOLDER with a config.json")
    return read_shape(model) if model is not None else shape_of_parameters(count(str(params), "--params"))


def counted_from_1(given: Mapping[str, float]) -> None:
    """Raises UserError: an option is below 1 or not finite."""
    for option, value in given.items():
        if not 1 <= value < math.inf:
            raise UserError(f"must be at least 1, is {value:g}", where=option, hint="give a positive number")


def lengths_given(run_dir: Path | None, mean: float | None, default: float, *, sigma: float, limit: int) -> Lengths:
    """Completion lengths: those of a run, or log-normal with a mean.

    Args:
        default: mean if none was given.

    Raises:
        UserError: the run has no samples, or mean, sigma and limit are inconsistent.
    """
    if run_dir is not None:
        return lengths_of_run(run_dir)
    tokens = default if mean is None else mean
    try:
        return log_normal_of_mean(tokens, sigma=sigma, limit=limit)
    except UserError as error:
        where = "--sigma" if 1 <= tokens <= limit else "--completion-tokens"
        what = f"its default: {error.what}" if where == "--completion-tokens" and mean is None else error.what
        raise UserError(what, where=where, hint=error.hint) from None


def count(text: str, option: str) -> float:
    """`70e9`, `70b`, `1.5B`, `70_000_000_000`.

    Raises:
        UserError: not a number of at least 1.
    """
    plain = text.strip().lower()
    factor = SUFFIXES.get(plain[-1:], 1.0)
    try:
        value = float(plain[:-1] if plain[-1:] in SUFFIXES else plain) * factor
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise UserError(f"{text!r} is not a number of parameters", where=option, hint="write 70e9 or 70b")
    return value


def result(
    data: dict[str, Any], parts: Iterable[RenderableType], figures: Sequence[Figure], *, explain: bool
) -> Result:
    """The plan, with the derivation of its figures if requested."""
    shown = list(parts)
    if explain:
        data = {**data, "explain": [msgspec.to_builtins(figure) for figure in figures]}
        shown += ["", *(escape(line) for figure in figures for line in derivation(figure))]
    return Result(data=data, text=Group(*shown))


def derivation(figure: Figure) -> list[str]:
    """Lines with value, formula, inputs and source."""
    inputs = ", ".join(f"{name} = {value:g}" for name, value in figure.inputs.items())
    lines = [f"{figure.name} = {quantity(figure.value, figure.unit)}", f"  = {figure.formula}"]
    return [*lines, *([f"  with {inputs}"] if inputs else []), f"  {figure.source}"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """A table with the first column left-aligned; cells wrap in narrow terminals."""
    shown = Table(box=None, pad_edge=False, title=escape(title) or None, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown


def plain(*lines: str) -> list[str]:
    """Escape brackets for rich."""
    return [escape(line) for line in lines]


def notes(lines: Iterable[str]) -> list[str]:
    return [escape(f"• {line}") for line in lines]


def shape_of_model(config: ModelConfig) -> ModelShape:
    """The shape of `[model]`.

    Raises:
        UserError: the model is not on this machine.
    """
    shape = known_shape(config)
    if shape is None:
        hint = f"download it (`tidemill model get {config.source}`), or give --params or --model"
        raise UserError(
            f"the shape of {config.source} is unknown: the model is not in the cache", where="model.source", hint=hint
        )
    return shape


def models_of(spec: RunSpec) -> Models:
    """Shapes of the policy, critic and reward models.

    Raises:
        UserError: a model is not on this machine.
    """
    source = spec.critic.source
    return Models(
        policy=shape_of_model(spec.model),
        critic=None if source is None else shape_of_model(ModelConfig(source=source, char=spec.model.char)),
        rewards=tuple(read_shape(locate(folder).folder or folder) for folder in spec.scoring.model_folders),
    )
