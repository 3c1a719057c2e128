"""`tidemill plan overlap`: how busy the trainer is in sequence, overlapped, and with machines divided evenly."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from tidemill.cli.plan import shown
from tidemill.cli.plan.options import Explain, Whole
from tidemill.cli.result import Json, Result
from tidemill.planner.overlap import TYPICAL, OverlapPlan, plan_overlap
from tidemill.telemetry.numerals import percent


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
    return shown.result(data, as_text(plan, gpus), plan.figures, explain=explain)


def as_text(plan: OverlapPlan, gpus: int | None) -> Iterator[RenderableType]:
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
