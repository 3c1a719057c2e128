"""`tidemill plan`: the command group, and its short commands catalog, overlap, staleness and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import RenderableType

from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import CatalogFile, Explain, ModelOptions, Whole, plain, result, table
from tidemill.core.errors import UserError
from tidemill.core.formatting import decimal, dollars, percent, size
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.planner.overlap import TYPICAL, plan_overlap
from tidemill.planner.staleness import StalenessPlan, measure_runs, plan_staleness, read_table
from tidemill.planner.transfer import GIGABIT, PCIE_5_X16, TransferQuestion, plan_transfer

PLANS = {
    "memory": ("plan_memory", "Bytes per role and GPU, the fewest GPUs, and why fewer do not suffice."),
    "weights": ("plan_commands", "Transfer time of new weights, and whether a step hides it."),
    "overlap": ("plan_commands", "Trainer utilisation: sequential, overlapped, resized."),
    "placement": ("plan_placement", "Machines for training and generation at the least cost or time."),
    "staleness": ("plan_commands", "The policy lag with the most progress per wall-clock time."),
    "run": ("plan_recipe", "Time, cost and memory of a recipe."),
    "catalog": ("plan_commands", "The catalogue of GPUs and machines."),
}
"""The module of each command, and its help."""
SUMMARY = "Forecast memory, time and cost of a run. --explain derives every number."

app = App(name="plan", help=SUMMARY, help_epilogue="")
for order, (name, (module, words)) in enumerate(PLANS.items()):
    app.command(f"tidemill.cli.{module}:{name}", name=name, help=words, sort_key=order, help_epilogue="")


def catalog(*, catalog: CatalogFile = None, json: Json = False) -> Result:
    """List the catalogue of GPUs and machines with the sources of its prices."""
    known = load_catalog(catalog)
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
    sources = (f"{machine.name} ({machine.priced}): {machine.price_source}" for machine in known.machines.values())
    text: list[RenderableType] = [
        table(("GPU", "memory", "bandwidth", "dense bf16", "link"), gpus),
        "",
        table(("machine", "GPUs", "network", "$/h", "preemptible"), machines),
        "",
        *plain(*sources),
    ]
    return result(msgspec.to_builtins(known), text, (), explain=False)


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
    """Trainer utilisation: sequential, overlapped, and with machines divided so that both sides take equal time.

    Parameters
    ----------
    rollout
        Time to generate a batch, in any unit.
    training
        Time to train on it, in the same unit.
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
        "training_gpus": plan.training_gpus,
    }
    typical = f"{TYPICAL[0]:.0%} to {TYPICAL[1]:.0%}".replace("%", " %")
    resized = f"resized, {percent(plan.rollout_share)} of the machines generating: {typical} is usual"
    if gpus is not None:
        resized += f"; of {gpus} GPUs {plan.rollout_gpus} to generate and {plan.training_gpus} to train: at best "
        resized += percent(plan.resized)
    lines = (
        f"sequential: the trainer is busy {percent(plan.in_sequence)} of the time",
        f"overlapped, equal machines on each side: {percent(plan.overlapped)}",
        resized,
    )
    return result(data, lines, plan.figures, explain=explain)


Table = Annotated[
    Path | None,
    Parameter(
        help="CSV or JSON rows of lag, reward per step, utilisation (0.35 or 35%) and, if known, the reward's standard "
        "error; rows with equal lag are repeats."
    ),
]


Runs = Annotated[
    tuple[Path, ...],
    Parameter(
        negative=(), help="Run directories at several lags, instead of a table; runs with equal lag are repeats."
    ),
]


def staleness(*, table: Table = None, runs: Runs = (), explain: Explain = False, json: Json = False) -> Result:
    """The best lag by progress per wall-clock time: lag lowers reward per step and raises steps per hour."""
    if (table is None) == (not runs):
        raise UserError("give either a table or runs", hint="use --table FILE, or --runs DIR for each run")
    plan = plan_staleness(measure_runs(runs) if table is None else read_table(table))
    data = {
        "best_lag": _whole(plan.best_lag),
        "contenders": [_whole(lag) for lag in plan.contenders],
        "uncertainty": plan.uncertainty,
        "lags": [{**msgspec.to_builtins(each), "lag": _whole(each.lag)} for each in plan.lags],
    }
    return result(data, staleness_text(plan), plan.figures, explain=explain)


def staleness_text(plan: StalenessPlan) -> Iterator[RenderableType]:
    """One row per lag, and the best one."""
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
    yield table(headings, rows)
    yield ""
    yield f"best lag: {plan.best_lag:g}"
    if others := [f"{lag:g}" for lag in plan.contenders if lag != plan.best_lag]:
        yield f"not ruled out: {', '.join(others)}"
    yield f"uncertainty: {plan.uncertainty}"


def _whole(lag: float) -> float | int:
    return int(lag) if lag == int(lag) else lag


def weights(
    *,
    model: ModelOptions = ModelOptions(),
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
    """Transfer time of a new version by each path, and whether a step hides it.

    Parameters
    ----------
    dtype
        Data type of the sent weights.
    link_gbps
        The trainer's network, in Gbit/s and one direction.
    worker_link_gbps
        A worker's network, if different.
    store_gbps
        Total rate of the object store; unlimited by default.
    file_gbps
        Total rate of a shared file system.
    load_gbps
        Rate at which a worker loads weights from host memory into its engine; the default is PCIe 5.0 x16.
    workers
        Concurrent pulls.
    changed
        Share of elements changed per step; usually 0.005 to 0.05.
    cores
        CPU cores that encode and apply a delta.
    step_s
        Duration of a step in seconds, to hide the transfer.
    """
    question = TransferQuestion(
        parameters=model.shape().parameters,
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
    broadcast = next(path for path in plan.paths if path.path == "broadcast")
    data = {
        "seconds": plan.seconds,  # as slack_s and hides, of the broadcast
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
    rows = [[path.path, size(path.size), f"{path.seconds:.3g} s", _hidden(path.slack_s)] for path in plan.paths]
    buffers = f"old and new version on a worker: {size(plan.double_buffer)}"
    text = (table(("path", "a worker receives", "takes", ""), rows), "", buffers)
    return result(data, text, plan.figures, explain=explain)


def _hidden(slack_s: float | None) -> str:
    if slack_s is None:
        return ""
    return f"hidden, {slack_s:.3g} s to spare" if slack_s >= 0 else f"{-slack_s:.3g} s longer than the step"
