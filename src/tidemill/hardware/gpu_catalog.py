"""The catalogue of GPUs and machines, extensible by a user's file, and transfer times over links."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.sky_catalog import read_offers

BUILT_IN_FILE = Path(__file__).with_name("catalog.toml")
TABLES = ("gpus", "machines")
BITS = 8
# Values outside these bounds are typing errors.
Bytes = Annotated[float, msgspec.Meta(ge=1e8, le=1e15)]
BytesPerS = Annotated[float, msgspec.Meta(ge=1e6, le=1e15)]
FlopsPerS = Annotated[float, msgspec.Meta(ge=1e9, le=1e18)]
GbitPerS = Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
UsdPerHour = Annotated[float, msgspec.Meta(ge=1e-4, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
RowT = TypeVar("RowT", bound="Gpu | Machine")


class Gpu(Record, forbid_unknown_fields=True):
    """One accelerator. Rates are peaks; the profiles apply efficiencies."""

    name: str
    title: str
    memory_bytes: Bytes
    bandwidth_bytes_per_s: BytesPerS  # of GPU memory
    flops_per_s: Annotated[dict[str, FlopsPerS], msgspec.Meta(min_length=1)]  # dense, by dtype
    interconnect: str  # name
    link_bytes_per_s: BytesPerS  # to the other GPUs of its machine, in one direction
    gpus_per_machine: Count  # usual
    source: str
    aliases: tuple[str, ...] = ()

    def peak_flops(self, dtype: str) -> float:
        """Raises UserError: the catalogue has no rate for this dtype."""
        if dtype not in self.flops_per_s:
            hint = f"known dtypes: {', '.join(self.flops_per_s)}; add flops_per_s.{dtype} with --catalog FILE"
            raise UserError(f"the catalogue has no {dtype} FLOP/s", where=self.name, hint=hint)
        return self.flops_per_s[dtype]


class Machine(Record, forbid_unknown_fields=True):
    """One rentable machine type. A plan with a machine without a price has no cost."""

    name: str
    gpu: str
    gpus: Count
    network_gbit_per_s: GbitPerS  # per machine, in one direction
    priced: str  # date
    price_source: str
    usd_per_hour: UsdPerHour | None = None
    preemptible_usd_per_hour: UsdPerHour | None = None
    host_memory_bytes: Bytes | None = None

    @property
    def network_bytes_per_s(self) -> float:
        return self.network_gbit_per_s * 1e9 / BITS


class Catalog(Record):
    """Rows by name."""

    gpus: dict[str, Gpu]
    machines: dict[str, Machine]

    def gpu(self, name: str, *, where: str = "") -> Gpu:
        """Return a GPU by name or alias, ignoring case.

        Args:
            where: place of the name, for the error.

        Raises:
            UserError: unknown name; suggests the closest.
        """
        aliases = {alias: gpu for gpu in self.gpus.values() for alias in (gpu.name, *gpu.aliases)}
        return _found(name, aliases, "GPU", where)

    def machine(self, name: str, *, where: str = "") -> Machine:
        """Raises UserError: unknown name; suggests the closest."""
        return _found(name, self.machines, "machine", where)


def load_catalog(extra: Path | None = None) -> Catalog:
    """Load the built-in rows, overridden by those of a user's file, or with the prices of SkyPilot's (a vms.csv).

    Raises:
        UserError: names file, row and field.
    """
    if extra is None:
        return _built_in()
    if extra.suffix == ".csv":
        return _with_prices(_built_in(), extra.expanduser())
    base, rows = _built_in(), _read(extra)
    merged = Catalog(gpus={**base.gpus, **rows.gpus}, machines={**base.machines, **rows.machines})
    for machine in rows.machines.values():
        try:
            merged.gpu(machine.gpu)
        except UserError as error:
            raise UserError(error.what, where=f"{extra}: machines.{machine.name}.gpu", hint=error.hint) from error
    return merged


def _with_prices(catalog: Catalog, file: Path) -> Catalog:
    """The catalogue with the lowest prices of any region, for machines that are named CLOUD-TYPE as in the file."""
    cloud, machines = file.parent.name, dict(catalog.machines)
    offers = [offer for offer in read_offers(file) if f"{cloud}-{offer.machine}" in machines]
    about = {
        "priced": str(datetime.fromtimestamp(file.stat().st_mtime, UTC).date()),
        "price_source": "SkyPilot's catalogue, the lowest",
    }
    for name in {f"{cloud}-{offer.machine}" for offer in offers}:
        own = [offer for offer in offers if f"{cloud}-{offer.machine}" == name]
        prices = {
            key: min((price for offer in own if (price := getattr(offer, key)) is not None), default=None)
            for key in ("usd_per_hour", "preemptible_usd_per_hour")
        }
        machines[name] = msgspec.structs.replace(machines[name], **prices, **about)
    return Catalog(gpus=catalog.gpus, machines=machines)


@cache
def _built_in() -> Catalog:
    return _read(BUILT_IN_FILE)


def _read(path: Path) -> Catalog:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "name a TOML file with [gpus.NAME] and [machines.NAME] tables"
        raise UserError(f"cannot read the catalogue: {error.strerror or error}", where=str(path), hint=hint) from error
    except ValueError as error:
        raise UserError(f"not valid TOML: {error}", where=str(path), hint="fix the syntax there") from error
    if unknown := [table for table in tables if table not in TABLES]:
        what = f"unknown table {unknown[0]!r}"
        raise UserError(what, where=str(path), hint="use [gpus.NAME] and [machines.NAME]")
    return Catalog(
        gpus=_rows(Gpu, path, "gpus", tables.get("gpus", {})),
        machines=_rows(Machine, path, "machines", tables.get("machines", {})),
    )


def _rows(kind: type[RowT], path: Path, table: str, rows: Any) -> dict[str, RowT]:
    if not isinstance(rows, dict):
        raise UserError("is not a table", where=f"{path}: {table}", hint=f"write [{table}.NAME]")
    return {name: _row(kind, path, table, name, row) for name, row in rows.items()}


def _row(kind: type[RowT], path: Path, table: str, name: str, row: Any) -> RowT:
    where = f"{path}: {table}.{name}"
    if not isinstance(row, dict):
        raise UserError("is not a table", where=where, hint=f"write [{table}.{name}] with its fields below")
    try:
        return msgspec.convert({**row, "name": name}, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = re.match(r"\.?([\w.\[\]-]*)", place)
        where += f".{field[1]}" if field and field[1] else ""
        fields = ", ".join(each for each in kind.__struct_fields__ if each != "name")
        raise UserError(what[:1].lower() + what[1:], where=where, hint=f"fields: {fields}") from error


def _found(name: str, rows: Mapping[str, RowT], noun: str, where: str) -> RowT:
    if row := rows.get(name) or rows.get(name.lower()):
        return row
    close = difflib.get_close_matches(name.lower(), rows, 1, 0.4)
    known = ", ".join(dict.fromkeys(row.name for row in rows.values()))
    hint = f"did you mean {close[0]}? " if close else ""
    hint += f"known: {known}; add more with --catalog FILE"
    raise UserError(f"the catalogue has no {noun} {name!r}", where=where, hint=hint)


ETHERNET_LATENCY_S = 50e-6
"""Latency of a message between two machines of a data centre; assumed."""


class Link(Record):
    """One direction of a connection."""

    bytes_per_s: float
    latency_s: float = ETHERNET_LATENCY_S


def all_reduce_s(size_bytes: float, *, members: int, link: Link) -> float:
    """Time of a ring all-reduce: each member sends 2 (n - 1) / n of the size (Thakur et al. 2005, section 4)."""
    if members == 1:
        return 0.0
    steps = 2 * (members - 1)
    return steps / members * size_bytes / link.bytes_per_s + link.latency_s * math.log2(members)


def gather_s(size_bytes: float, *, members: int, link: Link) -> float:
    """Time of an all-gather or reduce-scatter of `size_bytes` in total: half of an all-reduce."""
    return (members - 1) / members * size_bytes / link.bytes_per_s if members > 1 else 0.0
