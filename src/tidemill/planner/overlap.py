"""`plan overlap`: the trainer's utilisation when generation and training alternate, overlap, or divide the GPUs."""

from __future__ import annotations

import math

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation, Figure

TYPICAL = (0.90, 0.95)
"""Range of the trainer's utilisation with balanced sides, as reported by others; the rest is lost to stragglers,
publishing and the rounding to whole machines. Plan with the lower one."""
SHARES = {
    "utilisation_in_sequence": (
        "of the time",
        "training / (rollout + training)",
        "one after the other on the same machines",
    ),
    "utilisation_overlapped": (
        "of the time",
        "training / max(rollout, training)",
        "at the same time, each side as fast as before: the longer one determines the step",
    ),
    "rollout_share": (
        "of the machines",
        "rollout / (rollout + training)",
        "time is inversely proportional to the number of machines; both sides take equally long",
    ),
}
RESIZED = (
    "of the time",
    "(training / training_gpus) / max(rollout / rollout_gpus, training / training_gpus)",
    "whole GPUs on each side, the split with the shortest step; no other losses",
)


class OverlapPlan(Record):
    in_sequence: float  # utilisation of the trainer, a fraction
    overlapped: float
    rollout_share: float  # fraction of the machines that generate when both sides take equally long
    resized: float | None  # utilisation with whole GPUs on each side; None if no number of GPUs is given
    rollout_gpus: int | None
    training_gpus: int | None
    figures: tuple[Figure, ...]


def plan_overlap(rollout: float, training: float, *, gpus: int | None = None) -> OverlapPlan:
    """Compare the ways to combine generation and training.

    Args:
        rollout: time to generate a batch on all machines, in any unit.
        training: time to train on it on all machines, in the same unit.

    Raises:
        UserError: a time is not positive, or fewer than 2 GPUs.
    """
    if not (0 < rollout < math.inf and 0 < training < math.inf):
        what = f"both times need to be above 0, rollout is {rollout:g} and training is {training:g}"
        raise UserError(what, where="--rollout, --training", hint="give both in one unit, for example 60 and 40")
    if gpus is not None and gpus < 2:
        raise UserError(f"{gpus} GPUs cannot be divided", where="--gpus", hint="give 2 or more")
    given, formulas = {"rollout": rollout, "training": training}, dict(SHARES)
    if gpus is not None:
        given["rollout_gpus"] = min(range(1, gpus), key=lambda count: max(rollout / count, training / (gpus - count)))
        given["training_gpus"] = gpus - given["rollout_gpus"]
        formulas["utilisation_resized"] = RESIZED
    sheet = Derivation()
    shares = sheet.evaluate(formulas, label="{}", **given)
    return OverlapPlan(
        in_sequence=shares["utilisation_in_sequence"],
        overlapped=shares["utilisation_overlapped"],
        rollout_share=shares["rollout_share"],
        resized=shares.get("utilisation_resized"),
        rollout_gpus=None if gpus is None else int(given["rollout_gpus"]),
        training_gpus=None if gpus is None else int(given["training_gpus"]),
        figures=tuple(sheet.figures),
    )
