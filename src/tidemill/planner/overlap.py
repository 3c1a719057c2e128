"""`plan overlap`: the trainer's utilisation when generation and training alternate, overlap, or divide the GPUs."""

from __future__ import annotations

import math

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation, Figure

TYPICAL = (0.90, 0.95)
"""Range of the trainer's utilisation with balanced sides, as reported by others; the rest is lost to stragglers,
publishing and the rounding to whole machines. Plan with the lower one."""


class OverlapPlan(Record):
    in_sequence: float  # utilisation of the trainer, a fraction
    overlapped: float
    rollout_share: float  # fraction of the machines that generate when both sides take equally long
    resized: float | None  # utilisation with whole GPUs on each side; None if no number of GPUs is given
    rollout_gpus: int | None
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
    sheet = Derivation()
    in_sequence = sheet.compute(
        "utilisation_in_sequence",
        "of the time",
        formula="training / (rollout + training)",
        source="one after the other on the same machines",
        rollout=rollout,
        training=training,
    )
    overlapped = sheet.compute(
        "utilisation_overlapped",
        "of the time",
        formula="training / max(rollout, training)",
        source="at the same time, each side as fast as before: the longer one determines the step",
        rollout=rollout,
        training=training,
    )
    share = sheet.compute(
        "rollout_share",
        "of the machines",
        formula="rollout / (rollout + training)",
        source="time is inversely proportional to the number of machines; both sides take equally long",
        rollout=rollout,
        training=training,
    )
    resized = rollout_gpus = None
    if gpus is not None:
        rollout_gpus = min(range(1, gpus), key=lambda given: max(rollout / given, training / (gpus - given)))
        resized = sheet.compute(
            "utilisation_resized",
            "of the time",
            formula="(training / training_gpus) / max(rollout / rollout_gpus, training / training_gpus)",
            source="whole GPUs on each side, the split with the shortest step; no other losses",
            rollout=rollout,
            training=training,
            rollout_gpus=rollout_gpus,
            training_gpus=gpus - rollout_gpus,
        )
    return OverlapPlan(
        in_sequence=in_sequence,
        overlapped=overlapped,
        rollout_share=share,
        resized=resized,
        rollout_gpus=rollout_gpus,
        figures=tuple(sheet.figures),
    )
