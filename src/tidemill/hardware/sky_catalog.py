"""Machines and prices of SkyPilot's catalogue, from the CSV files that SkyPilot keeps. Nothing is downloaded."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from tidemill.core.errors import UserError
from tidemill.core.records import Record

FOLDER = Path("~/.sky/catalogs")
FILE = "vms.csv"


class Offer(Record):
    """A machine type in one region. On Google Cloud, GPUs are rows without a type, priced apart from their machine."""

    machine: str
    accelerator: str
    accelerators: int
    region: str
    usd_per_hour: float | None
    preemptible_usd_per_hour: float | None


def catalog_file(cloud: str) -> Path | None:
    """The newest catalogue of a cloud (`aws`) on this machine; None if SkyPilot has not fetched one."""
    files = FOLDER.expanduser().glob(f"v*/{cloud}/{FILE}")
    return max(files, key=lambda file: int(file.parts[-3][1:]), default=None)


def read_offers(file: Path) -> Iterator[Offer]:
    """Raises UserError: the file cannot be read, or is not a catalogue."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                yield Offer(
                    machine=row["InstanceType"],
                    accelerator=row["AcceleratorName"],
                    accelerators=int(float(row["AcceleratorCount"] or 0)),
                    region=row["Region"],
                    usd_per_hour=float(row["Price"]) if row["Price"] else None,
                    preemptible_usd_per_hour=float(row["SpotPrice"]) if row["SpotPrice"] else None,
                )
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        hint = f"name a {FILE} below {FOLDER}, which `sky gpus list` fetches"
        raise UserError("is not a catalogue of SkyPilot", where=str(file), hint=hint) from error
