"""`tidemill plan`: the group of verbs, and the short ones: catalog, overlap, staleness, weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import RenderableType

from tidemill.cli import plan_options
from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import CatalogFile, Explain, Model, Params, Whole, shape_of
from tidemill.core.errors import UserError
from tidemill.core.formatting import decimal, dollars, percent, size
from tidemill.hardware.gpu_catalog import Catalog, load_catalog
from tidemill.planner.overlap import TYPICAL, OverlapPlan, plan_overlap
from tidemill.planner.staleness import StalenessPlan, measure_runs, plan_staleness, read_table
from tidemill.planner.transfer import GIGABIT, PCIE_5_X16, TransferPlan, TransferQuestion, plan_transfer

PLANS = {
    "memory": ("tidemill.cli.plan_memory:memory", "Bytes per role and per GPU; how many GPUs, and why not fewer."),
    "weights": (
        "tidemill.cli.plan_commands:weights",
        "How long new weights travel, and whether it hides behind a step.",
    ),
    "overlap": ("tidemill.cli.plan_commands:overlap", "How busy the trainer is: in sequence, overlapped, resized."),
    "placement": (
        "tidemill.cli.plan_placement:placement",
        "Where to train and to generate, for the least money or time.",
    ),
    "staleness": (
        "tidemill.cli.plan_commands:staleness",
        "The best lag by progress per wall-clock time, from a table or from runs.",
    ),
    "run": ("tidemill.cli.plan_recipe:run", "How long a recipe takes, what it costs and what memory it needs."),
    "catalog": ("tidemill.cli.plan_commands:catalog", "The GPUs and machines that can be planned with."),
}

app = App(
    name="plan",
    help="What a run needs and costs, before it is paid for. --explain derives every number.",
    help_epilogue="",
)
for order, (name, (target, words)) in enumerate(PLANS.items()):
    app.command(target, name=name, help=words, sort_key=order, help_epilogue="")


def catalog(*, catalog: CatalogFile = None, json: Json = False) -> Result:
    """The GPUs and machines that can be planned with, and where their figures are from."""
    known = load_catalog(catalog)
    data = {
        "gpus": {name: msgspec.to_builtins(gpu) for name, gpu in known.gpus.items()},
        "machines": {name: msgspec.to_builtins(machine) for name, machine in known.machines.items()},
    }
    return plan_options.result(data, catalog_text(known), (), explain=False)


def catalog_text(known: Catalog) -> Iterator[RenderableType]:
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
    yield plan_options.table(("GPU", "memory", "bandwidth", "dense bf16", "link"), gpus)
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
    yield plan_options.table(("machine", "GPUs", "network", "$/h", "preemptible"), machines)
    yield ""
    for machine in known.machines.values():
        yield from plan_options.plain(f"{machine.name} ({machine.priced}): {machine.price_source}")


def _price(usd: float | None) -> str:
    return "-" if usd is None else dollars(usd)


def overlap(
    *,
    rollout: float,
    training: float,
    gpus: Whole | None = None,
    explain: Explain = False,
    json: Json = False,
) -> Result:
    """How busy the trainer is: in sequence, overlapped, and with the machines divided so that both sides take as long.

    Parameters
    ----------
    rollout
        How long generating a batch takes, in any unit: 60 for 60 %.
    training
        How long learning from it takes, in the same unit.
    gpus
        GPUs to divide.
    """
    plan = plan_overlap(rollout, training, gpus=gpus)
    data = {
        "utilisation_in_sequence": plan.in_sequence,
        "utilisation_overlapped": plan.overlapped,
        "utilisation_resized": plan.resized,
        "utilisation_resized_typical": list(TYPICAL),
        "rollout_share": plan.rollout_share,
        "rollout_gpus": plan.rollout_gpus,
        "training_gpus": None if gpus is None or plan.rollout_gpus is None else gpus - plan.rollout_gpus,
    }
    return plan_options.result(data, overlap_text(plan, gpus), plan.figures, explain=explain)


def overlap_text(plan: OverlapPlan, gpus: int | None) -> Iterator[RenderableType]:
    """A line a way."""
    typical = f"{TYPICAL[0]:.0%} to {TYPICAL[1]:.0%}".replace("%", " %")
    yield f"one after the other: the trainer works {percent(plan.in_sequence)} of the time"
    yield f"overlapped, same machines on each side: {percent(plan.overlapped)}"
    text = f"resized, {percent(plan.rollout_share)} of the machines generating: {typical} is usual"
    if gpus is not None and plan.rollout_gpus is not None:
        text += (
            f"; of {gpus} GPUs {plan.rollout_gpus} to generate and {gpus - plan.rollout_gpus} to train: at best "
            f"{percent(plan.resized)}"
        )
    yield text


Table = Annotated[
    Path | None,
    Parameter(
        help="CSV or JSON rows of lag, reward per step, utilisation (0.35 or 35%) and, if known, the reward's standard "
        "error; rows of one lag are repeats."
    ),
]


Runs = Annotated[
    tuple[Path, ...],
    Parameter(negative=(), help="Run directories at several lags, in place of a table; runs of one lag are repeats."),
]


def staleness(*, table: Table = None, runs: Runs = (), explain: Explain = False, json: Json = False) -> Result:
    """The best lag by progress per wall-clock time: staleness costs reward per step and buys steps per hour."""
    if (table is None) == (not runs):
        raise UserError("rows are from a table or from runs", hint="give --table FILE, or --runs DIR for each run")
    plan = plan_staleness(measure_runs(runs) if table is None else read_table(table))
    return plan_options.result(staleness_data(plan), staleness_text(plan), plan.figures, explain=explain)


def staleness_data(plan: StalenessPlan) -> dict[str, Any]:
    return {
        "best_lag": _whole(plan.best_lag),
        "contenders": [_whole(lag) for lag in plan.contenders],
        "uncertainty": plan.uncertainty,
        "lags": [{**msgspec.to_builtins(each), "lag": _whole(each.lag)} for each in plan.lags],
    }


def staleness_text(plan: StalenessPlan) -> Iterator[RenderableType]:
    """A line a lag, and the answer."""
    rows = [
        [
            f"{each.lag:g}",
            decimal(each.reward_per_step),
            percent(each.utilisation),
            decimal(each.progress),
            "" if each.low is None or each.high is None else f"{decimal(each.low)} to {decimal(each.high)}",
            "" if each.chance_best is None else percent(each.chance_best),
        ]
        for each in plan.lags
    ]
    headings = ("lag", "reward per step", "utilisation", "progress", "95 % interval", "best in")
    yield plan_options.table(headings, rows)
    yield ""
    yield f"best lag: {plan.best_lag:g}"
    if others := [f"{lag:g}" for lag in plan.contenders if lag != plan.best_lag]:
        yield f"not ruled out: {', '.join(others)}"
    yield f"uncertainty: {plan.uncertainty}"


def _whole(lag: float) -> float | int:
    return int(lag) if lag == int(lag) else lag


def weights(
    *,
    params: Params = None,
    model: Model = None,
    dtype: Literal["fp32", "bf16", "fp16", "fp8", "int8"] = "bf16",
    link_gbps: Annotated[float, Parameter(name="--link-gbps")] = 400.0,
    worker_link_gbps: Annotated[float | None, Parameter(name="--worker-link-gbps")] = None,
    store_gbps: Annotated[float | None, Parameter(name="--store-gbps")] = None,
    file_gbps: Annotated[float, Parameter(name="--file-gbps")] = 16.0,
    load_gbps: Annotated[float, Parameter(name="--load-gbps")] = PCIE_5_X16 / GIGABIT,
    workers: Whole = 1,
    changed: float = 0.03,
    cores: Whole = 16,
    step_s: Annotated[float | None, Parameter(name="--step-s")] = None,
    explain: Explain = False,
    json: Json = False,
) -> Result:
    """How long a new version of the weights travels by each path, and whether that hides behind a step.

    Parameters
    ----------
    dtype
        What is sent.
    link_gbps
        The trainer's network, in Gbit/s and one direction.
    worker_link_gbps
        A worker's network, where it is another.
    store_gbps
        The object store in all; otherwise as fast as is asked of it.
    file_gbps
        A shared file system in all.
    load_gbps
        Rate at which a worker loads weights from host memory into its engine; the default is PCIe 5.0 x16.
    workers
        How many pull at once.
    changed
        Share of the elements a step changes; 0.005 to 0.05 is usual.
    cores
        CPU cores that encode and apply a delta.
    step_s
        A step to hide behind, in seconds.
    """
    question = TransferQuestion(
        parameters=shape_of(params, model).parameters,
        dtype=dtype,
        link=link_gbps * GIGABIT,
        worker_link=None if worker_link_gbps is None else worker_link_gbps * GIGABIT,
        store=None if store_gbps is None else store_gbps * GIGABIT,
        file=file_gbps * GIGABIT,
        load=load_gbps * GIGABIT,
        workers=workers,
        changed=changed,
        cores=cores,
        step_s=step_s,
    )
    plan = plan_transfer(question)
    return plan_options.result(transfer_data(plan), transfer_text(plan), plan.figures, explain=explain)


def transfer_data(plan: TransferPlan) -> dict[str, Any]:
    """`seconds`, `slack_s` and `hides` are the broadcast's."""
    broadcast = next(path for path in plan.paths if path.path == "broadcast")
    return {
        "seconds": plan.seconds,
        "bytes": plan.size,
        "slack_s": broadcast.slack_s,
        "hides": broadcast.hides,
        "fastest": plan.paths[0].path,
        "double_buffer_bytes": plan.double_buffer,
        "paths": {
            path.path: {"seconds": path.seconds, "bytes": path.size, "slack_s": path.slack_s, "hides": path.hides}
            for path in plan.paths
        },
    }


def transfer_text(plan: TransferPlan) -> Iterator[RenderableType]:
    """A line a path."""
    rows = [[path.path, size(path.size), f"{path.seconds:.3g} s", _hidden(path.slack_s)] for path in plan.paths]
    yield plan_options.table(("path", "a worker receives", "takes", ""), rows)
    yield ""
    yield f"old and new version on a worker: {size(plan.double_buffer)}"


def _hidden(slack_s: float | None) -> str:
    if slack_s is None:
        return ""
    return f"hides, {slack_s:.3g} s to spare" if slack_s >= 0 else f"{-slack_s:.3g} s longer than the step"
