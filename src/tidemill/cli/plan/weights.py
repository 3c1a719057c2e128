"""`tidemill plan weights`: how long a version travels by each path, and whether that hides behind a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli.plan import shown
from tidemill.cli.plan.options import Explain, Model, Params, Whole, shape_of
from tidemill.cli.result import Json, Result
from tidemill.planner.transfer import GIGABIT, PCIE_5_X16, TransferPlan, TransferQuestion, plan_transfer
from tidemill.planner.words import size


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
    return shown.result(as_data(plan), as_text(plan), plan.figures, explain=explain)


def as_data(plan: TransferPlan) -> dict[str, Any]:
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


def as_text(plan: TransferPlan) -> Iterator[RenderableType]:
    """A line a path."""
    rows = [[path.path, size(path.size), f"{path.seconds:.3g} s", _hidden(path.slack_s)] for path in plan.paths]
    yield shown.table(("path", "a worker receives", "takes", ""), rows)
    yield ""
    yield f"old and new version on a worker: {size(plan.double_buffer)}"


def _hidden(slack_s: float | None) -> str:
    if slack_s is None:
        return ""
    return f"hides, {slack_s:.3g} s to spare" if slack_s >= 0 else f"{-slack_s:.3g} s longer than the step"
