"""Options, tables and model shapes shared by the commands of `tidemill plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
from tidemill.hardware.gpu_catalog import Catalog
from tidemill.hardware.model_config import read_shape
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.hardware.process_memory import Models
from tidemill.models.model_source import locate
from tidemill.models.shapes import known_shape
from tidemill.planner.memory.states import Holding
from tidemill.planner.placement.training import Offer


def parse_integer(kind: type, tokens: Sequence[Token]) -> int:
    """Convert an option to an integer, without rounding. Raises UserError: not an integer."""
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        what = f"{token.value!r} is not an integer"
        raise UserError(what, where=str(token.keyword), hint="write digits only") from None


Whole = Annotated[int, Parameter(converter=parse_integer)]
Repeated = Annotated[tuple[str, ...], Parameter(negative=())]
CatalogFile = Annotated[
    Path | None,
    Parameter(name="--catalog", help="Additional GPUs and machines, as TOML, or SkyPilot's prices: a vms.csv."),
]
Explain = Annotated[
    bool, Parameter(name="--explain", negative=(), help="Print formula, inputs and source of every number.")
]

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    params: str | None = None
    """Parameters of the model: 70e9 or 70b."""
    model: Path | None = None
    """A Hugging Face folder or config.json, instead of --params: no assumed shape."""

    def shape(self) -> ModelShape:
        """The shape of the model.

        Raises:
            UserError: neither or both options given, or not readable.
        """
        if self.model is not None and self.params is None:
            return read_shape(self.model)
        if self.model is None and self.params is not None:
            return shape_of_parameters(count(self.params, "--params"))
        what = "no model given" if self.params is None else "both --params and --model are given"
        raise UserError(what, hint="give --params 70e9, or --model FOLDER with a config.json")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HoldingOptions:
    """What a trained model keeps, and where."""

    lora_rank: Whole = 0
    """Train adapters of this rank; 0 trains the whole model."""
    optimizer: Literal["adam", "adam-8bit"] = "adam"
    """adam: moments in fp32; adam-8bit: in 8 bits."""
    offload: Annotated[bool, Parameter(negative=())] = False
    """Keep moments and master weights in host memory."""

    def holding(self) -> Holding:
        return Holding(**asdict(self))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machines of a cluster and their prices."""

    machines: Repeated = ()
    """Reserved machines, NAME:COUNT; repeatable."""
    preemptible: Repeated = ()
    """Preemptible machines, NAME:MAXIMUM; repeatable."""
    price: Repeated = ()
    """NAME=USD or preemptible:NAME=USD, per hour and machine; repeatable."""

    def offers(self, catalog: Catalog, *, availability: float = 1.0) -> tuple[Offer, ...]:
        """The machines with their prices.

        Args:
            availability: mean share of preemptible machines that are available.

        Raises:
            UserError: unknown machine, or invalid count or price.
        """
        known = with_prices(catalog, self.price)
        return (
            *(offer_of(text, known, "--machines") for text in self.machines),
            *(offer_of(text, known, "--preemptible", availability=availability) for text in self.preemptible),
        )


def offer_of(text: str, catalog: Catalog, option: str, *, availability: float = 1.0) -> Offer:
    """Parse `rlboost-2xh100:6`; the default count is 1. Raises UserError: unknown machine or invalid count."""
    name, colon, count = text.partition(":")
    where = f"{option} {text}"
    if colon and not count.isdecimal():
        raise UserError(f"{count!r} is not a number of machines", where=where, hint="write NAME:COUNT")
    machine = catalog.machine(name, where=where)
    return Offer(
        machine=machine,
        gpu=catalog.gpu(machine.gpu),
        count=int(count or 1),
        preemptible=option == "--preemptible",
        availability=availability,
    )


def with_prices(catalog: Catalog, prices: Sequence[str]) -> Catalog:
    """The catalogue with the given prices. Raises UserError: unknown machine or invalid price."""
    machines = dict(catalog.machines)
    for text in prices:
        given, _, amount = text.partition("=")
        name = given.removeprefix("preemptible:")
        try:
            usd = float(amount)
        except ValueError:
            usd = math.nan
        if not 0 < usd < math.inf:
            raise UserError(f"{amount!r} is not a price", where=f"--price {text}", hint="write NAME=USD, per hour")
        field = "usd_per_hour" if given == name else "preemptible_usd_per_hour"
        row = catalog.machine(name, where=f"--price {text}")
        changes: dict[str, Any] = {field: usd, "price_source": "given by --price", "priced": "now"}
        machines[row.name] = msgspec.structs.replace(machines[row.name], **changes)
    return Catalog(gpus=catalog.gpus, machines=machines)


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
    """Parse `70e9`, `70b`, `1.5B` or `70_000_000_000`. Raises UserError: not a number of at least 1."""
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
        shown.append("")
        for figure in figures:
            shown += plain(f"{figure.name} = {quantity(figure.value, figure.unit)}", f"  = {figure.formula}")
            if inputs := ", ".join(f"{name} = {value:g}" for name, value in figure.inputs.items()):
                shown += plain(f"  with {inputs}")
            shown += plain(f"  {figure.source}")
    return Result(data=data, text=Group(*shown))


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
        what = f"the shape of {config.source} is unknown: the model is not in the cache"
        hint = f"download it (`tidemill model get {config.source}`), or give --params or --model"
        raise UserError(what, where="model.source", hint=hint)
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
