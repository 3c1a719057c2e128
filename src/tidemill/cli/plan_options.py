"""Options and tables that several verbs of `tidemill plan` share."""

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
from tidemill.config.model import CharModelConfig, ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import quantity
from tidemill.hardware.completion_lengths import Lengths, lengths_of_run, log_normal_of_mean
from tidemill.hardware.model_config import read_shape
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.models import catalog
from tidemill.models.catalog import is_local, listing
from tidemill.planner.figures import Figure
from tidemill.planner.forecast.forecast import Models


def whole(kind: type, tokens: Sequence[Token]) -> int:
    """An option's value; by itself the command line would round one.

    Raises:
        UserError: it is no whole number.
    """
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        hint = "write it without a point, an exponent or a unit"
        raise UserError(f"{token.value!r} is no whole number", where=str(token.keyword), hint=hint) from None


Whole = Annotated[int, Parameter(converter=whole)]
Params = Annotated[str | None, Parameter(name="--params", help="Parameters of the model: 70e9 or 70b.")]
Model = Annotated[
    Path | None,
    Parameter(name="--model", help="A Hugging Face folder or config.json, in place of --params: nothing is assumed."),
]
CatalogFile = Annotated[Path | None, Parameter(name="--catalog", help="GPUs and machines of your own, as TOML.")]
Explain = Annotated[bool, Parameter(name="--explain", negative=(), help="Every number's formula, inputs and source.")]

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def shape_of(params: str | None, model: Path | None) -> ModelShape:
    """The model that was named.

    Raises:
        UserError: neither or both, or not readable.
    """
    if (params is None) == (model is None):
        what = "no model given" if params is None else "--params and --model are both given"
        raise UserError(what, hint="give --params 70e9, or --model FOLDER with a config.json")
    return read_shape(model) if model is not None else shape_of_parameters(count(str(params), "--params"))


def counted_from_1(given: Mapping[str, float]) -> None:
    """Raises UserError: the value of an option is below 1, or not finite."""
    for option, value in given.items():
        if not 1 <= value < math.inf:
            raise UserError(f"needs 1 or more, was given {value:g}", where=option, hint="correct it")


def lengths_given(run_dir: Path | None, mean: float | None, default: float, *, sigma: float, limit: int) -> Lengths:
    """Of completions: a run's, or log-normal with a mean.

    Args:
        default: mean, where none was given.

    Raises:
        UserError: the run has none, or mean, sigma and limit do not go together.
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
        UserError: it is no number of at least 1.
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
    """The plan, with the derivation of its figures where it was asked for."""
    shown = list(parts)
    if explain:
        data = {**data, "explain": [msgspec.to_builtins(figure) for figure in figures]}
        shown += ["", *(escape(line) for figure in figures for line in derivation(figure))]
    return Result(data=data, text=Group(*shown))


def derivation(figure: Figure) -> list[str]:
    """Value, formula, inputs and source, a line each."""
    inputs = ", ".join(f"{name} = {value:g}" for name, value in figure.inputs.items())
    lines = [f"{figure.name} = {quantity(figure.value, figure.unit)}", f"  = {figure.formula}"]
    return [*lines, *([f"  with {inputs}"] if inputs else []), f"  {figure.source}"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """The first column to the left, the others to the right. Where the terminal is too narrow, cells take more lines:
    nothing is left out."""
    shown = Table(box=None, pad_edge=False, title=escape(title) or None, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown


def plain(*lines: str) -> list[str]:
    """Text that happens to have brackets in it."""
    return [escape(line) for line in lines]


def notes(lines: Iterable[str]) -> list[str]:
    return [escape(f"• {line}") for line in lines]


def shape_of_model(config: ModelConfig) -> ModelShape:
    """
    Raises:
        UserError: it is not on this machine.
    """
    if config.source == "char":
        return _char(config.char)
    if is_local(config.source):
        return read_shape(Path(config.source).expanduser())
    entry = next((entry for entry in listing() if entry.name == config.source and entry.cached), None)
    if entry is None:
        hint = f"fetch it (`tidemill model get {config.source}`), or give --params or --model"
        raise UserError(f"the shape of {config.source} is not known here", where="model.source", hint=hint)
    return read_shape(Path(entry.path))


def models_of(spec: RunSpec) -> Models:
    """The policy, and what stands beside it.

    Raises:
        UserError: one of them is not on this machine.
    """
    source = spec.critic.source
    return Models(
        policy=shape_of_model(spec.model),
        critic=None if source is None else shape_of_model(ModelConfig(source=source, char=spec.model.char)),
        rewards=tuple(read_shape(folder) for folder in spec.scoring.model_folders),
    )


def _char(config: CharModelConfig) -> ModelShape:
    return ModelShape(
        parameters=catalog.parameter_count(config),
        layers=config.layers,
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        intermediate=catalog.intermediate_size(config.hidden_size),
        vocab=len(config.alphabet) + len(catalog.SPECIAL_TOKENS),
        tied=True,
    )
