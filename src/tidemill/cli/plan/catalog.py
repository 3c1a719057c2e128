"""`tidemill plan catalog`: the GPUs and machines that can be planned with, and where their figures are from."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import RenderableType

from tidemill.cli.plan import shown
from tidemill.cli.plan.options import CatalogFile
from tidemill.cli.result import Json, Result
from tidemill.planner.words import size
from tidemill.sim.profiles.catalog import Catalog, load_catalog
from tidemill.telemetry.numerals import dollars


def catalog(*, catalog: CatalogFile = None, json: Json = False) -> Result:
    """The GPUs and machines that can be planned with, and where their figures are from."""
    known = load_catalog(catalog)
    data = {
        "gpus": {name: msgspec.to_builtins(gpu) for name, gpu in known.gpus.items()},
        "machines": {name: msgspec.to_builtins(machine) for name, machine in known.machines.items()},
    }
    return shown.result(data, as_text(known), (), explain=False)


def as_text(known: Catalog) -> Iterator[RenderableType]:
    """A line a GPU, a line a machine, and where each price is from."""
    gpus = [
        [
            gpu.name,
            size(gpu.memory_bytes),
            f"{gpu.bandwidth_bytes_per_s / 1e12:.2f} TB/s",
            f"{gpu.flops_per_s['bf16'] / 1e12:,.0f} TFLOP/s" if "bf16" in gpu.flops_per_s else "-",
            f"{gpu.link_bytes_per_s / 1e9:,.0f} GB/s",
        ]
        for gpu in known.gpus.values()
    ]
    yield shown.table(("GPU", "memory", "bandwidth", "dense bf16", "link"), gpus)
    yield ""
    machines = [
        [
            machine.name,
            f"{machine.gpus} × {machine.gpu}",
            f"{machine.network_gbit_per_s:,.0f} Gbit/s",
            _price(machine.usd_per_hour),
            _price(machine.preemptible_usd_per_hour),
        ]
        for machine in known.machines.values()
    ]
    yield shown.table(("machine", "GPUs", "network", "$/h", "preemptible"), machines)
    yield ""
    for machine in known.machines.values():
        yield from shown.plain(f"{machine.name} ({machine.priced}): {machine.price_source}")


def _price(usd: float | None) -> str:
    return "-" if usd is None else dollars(usd)
