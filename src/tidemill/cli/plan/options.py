"""Options that several plans have, and what they are read as."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from tidemill.core.errors import UserError
from tidemill.sim.profiles.lengths import Lengths, lengths_of_run, log_normal_of_mean
from tidemill.sim.profiles.model_config import read_shape
from tidemill.sim.profiles.model_shape import ModelShape, shape_of_parameters


def whole(kind: type, tokens: Sequence[Token]) -> int:
    """An option's value; by itself the command line would round one.

    Raises:
        UserError: it is no whole number.
    """
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        cure = "write it without a point, an exponent or a unit"
        raise UserError(f"{token.value!r} is no whole number", where=str(token.keyword), cure=cure) from None


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
        raise UserError(what, cure="give --params 70e9, or --model FOLDER with a config.json")
    return read_shape(model) if model is not None else shape_of_parameters(count(str(params), "--params"))


def counted_from_1(given: Mapping[str, float]) -> None:
    """Raises UserError: the value of an option is below 1, or not finite."""
    for option, value in given.items():
        if not 1 <= value < math.inf:
            raise UserError(f"needs 1 or more, was given {value:g}", where=option, cure="correct it")


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
        raise UserError(what, where=where, cure=error.cure) from None


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
        raise UserError(f"{text!r} is not a number of parameters", where=option, cure="write 70e9 or 70b")
    return value
