"""The catalogue of GPUs, machines and links, extended by a user's file of the same form."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import Record

OWN_FILE = Path(__file__).with_name("catalog.toml")
TABLES = ("gpus", "machines")
BITS = 8
# Anything beyond these is a slip of the pen.
Bytes = Annotated[float, msgspec.Meta(ge=1e8, le=1e15)]
BytesPerS = Annotated[float, msgspec.Meta(ge=1e6, le=1e15)]
FlopsPerS = Annotated[float, msgspec.Meta(ge=1e9, le=1e18)]
GbitPerS = Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
UsdPerHour = Annotated[float, msgspec.Meta(ge=1e-4, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
RowT = TypeVar("RowT", bound="Gpu | Machine")


class Gpu(Record, forbid_unknown_fields=True):
    """One accelerator. Rates are peaks; what of them is reached is a matter of the profiles."""

    name: str
    title: str
    memory_bytes: Bytes
    bandwidth_bytes_per_s: BytesPerS  # of its own memory
    flops_per_s: Annotated[dict[str, FlopsPerS], msgspec.Meta(min_length=1)]  # dense, by dtype
    interconnect: str  # in words
    link_bytes_per_s: BytesPerS  # to the other GPUs of its machine, in one direction
    gpus_per_machine: Count  # as usually built
    source: str
    aliases: tuple[str, ...] = ()

    def peak_flops(self, dtype: str) -> float:
        """Raises UserError: nothing is known of this dtype."""
        if dtype not in self.flops_per_s:
            hint = f"it has {', '.join(self.flops_per_s)}; or add flops_per_s.{dtype} to a row of your own"
            raise UserError(f"the catalogue has no {dtype} speed for it", where=self.name, hint=hint)
        return self.flops_per_s[dtype]


class Machine(Record, forbid_unknown_fields=True):
    """One machine as it is rented. A kind without a price can be planned with, but not costed."""

    name: str
    gpu: str
    gpus: Count
    network_gbit_per_s: GbitPerS  # in one direction, of the whole machine
    priced: str  # when
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
        """By name or alias, whatever the case.

        Args:
            where: it was named, for the error.

        Raises:
            UserError: there is none; the nearest is suggested.
        """
        aliases = {alias: gpu for gpu in self.gpus.values() for alias in (gpu.name, *gpu.aliases)}
        return _found(name, aliases, "GPU", where)

    def machine(self, name: str, *, where: str = "") -> Machine:
        """Raises UserError: there is none of that name; the nearest is suggested."""
        return _found(name, self.machines, "machine", where)


def load_catalog(extra: Path | None = None) -> Catalog:
    """Tidemill's own rows, under those of a user's file.

    Raises:
        UserError: naming file, row and field.
    """
    if extra is None:
        return _own()
    own, rows = _own(), _read(extra)
    merged = Catalog(gpus={**own.gpus, **rows.gpus}, machines={**own.machines, **rows.machines})
    _check_references(merged, extra, rows.machines.values())
    return merged


@cache
def _own() -> Catalog:
    return _read(OWN_FILE)


def _read(path: Path) -> Catalog:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "name a TOML file with [gpus.NAME] and [machines.NAME] tables"
        raise UserError(f"cannot read the catalogue: {error.strerror or error}", where=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid TOML: {error}", where=str(path), hint="correct that place") from error
    if strange := [table for table in tables if table not in TABLES]:
        what = f"unknown table {strange[0]!r}"
        raise UserError(what, where=str(path), hint="rows stand in [gpus.NAME] and [machines.NAME]")
    return Catalog(
        gpus={name: _row(Gpu, path, "gpus", name, row) for name, row in _rows(tables, path, "gpus").items()},
        machines={
            name: _row(Machine, path, "machines", name, row) for name, row in _rows(tables, path, "machines").items()
        },
    )


def _rows(tables: Mapping[str, Any], path: Path, table: str) -> dict[str, Any]:
    rows = tables.get(table, {})
    if not isinstance(rows, dict):
        raise UserError("is no table of rows", where=f"{path}: {table}", hint=f"write [{table}.NAME]")
    return rows


def _row(kind: type[RowT], path: Path, table: str, name: str, row: Any) -> RowT:
    where = f"{path}: {table}.{name}"
    if not isinstance(row, dict):
        raise UserError("is no row", where=where, hint=f"write [{table}.{name}] and its fields below")
    try:
        return msgspec.convert({**row, "name": name}, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = re.match(r"\.?([\w.\[\]-]*)", place)
        where += f".{field[1]}" if field and field[1] else ""
        fields = ", ".join(each for each in kind.__struct_fields__ if each != "name")
        raise UserError(what[:1].lower() + what[1:], where=where, hint=f"fields: {fields}") from error


def _check_references(catalog: Catalog, path: Path, machines: Iterable[Machine]) -> None:
    for machine in machines:
        try:
            catalog.gpu(machine.gpu)
        except UserError as error:
            raise UserError(error.what, where=f"{path}: machines.{machine.name}.gpu", hint=error.hint) from error


def _found(name: str, rows: Mapping[str, RowT], noun: str, where: str) -> RowT:
    if row := rows.get(name) or rows.get(name.lower()):
        return row
    close = difflib.get_close_matches(name.lower(), rows, 1, 0.4)
    known = ", ".join(dict.fromkeys(row.name for row in rows.values()))
    hint = f"did you mean {close[0]}? " if close else ""
    hint += f"known: {known}; add others with --catalog FILE"
    raise UserError(f"the catalogue has no {noun} {name!r}", where=where, hint=hint)


ETHERNET_LATENCY_S = 50e-6
"""Of one message between two machines of a data centre; assumed."""


class Link(Record):
    """One direction of a connection."""

    bytes_per_s: float
    latency_s: float = ETHERNET_LATENCY_S

    def seconds(self, size_bytes: float, *, sharers: int = 1) -> float:
        """Of one transfer among `sharers` that go on all the while and get equal parts."""
        return self.latency_s + size_bytes * sharers / self.bytes_per_s


def fan_out_s(size_bytes: float, *, source: Link, sink: Link, receivers: int) -> float:
    """One sender, every receiver its own copy: the sender's link is shared, no receiver is faster than its own."""
    return max(source.seconds(size_bytes, sharers=receivers), sink.seconds(size_bytes))


def broadcast_s(size_bytes: float, *, slowest: Link, receivers: int) -> float:
    """Passed on from receiver to receiver in pieces, as NCCL's rings do: the size does not multiply with the receivers,
    only the latency does."""
    return size_bytes / slowest.bytes_per_s + slowest.latency_s * receivers


def all_reduce_s(size_bytes: float, *, members: int, link: Link) -> float:
    """Of a ring: each member sends 2 (n - 1) / n of the size (Thakur et al. 2005, section 4)."""
    if members == 1:
        return 0.0
    steps = 2 * (members - 1)
    return steps / members * size_bytes / link.bytes_per_s + link.latency_s * math.log2(members)


def gather_s(size_bytes: float, *, members: int, link: Link) -> float:
    """All-gather or reduce-scatter of `size_bytes` in all: half of an all-reduce."""
    return (members - 1) / members * size_bytes / link.bytes_per_s if members > 1 else 0.0
