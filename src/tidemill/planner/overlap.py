"""`plan overlap`: how busy the trainer is when generating and training alternate, overlap, or share machines evenly."""

from __future__ import annotations

import math

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.planner.figures import Derivation, Figure

TYPICAL = (0.90, 0.95)
"""Of the trainer once both sides are sized to take equally long: what is left over goes to stragglers, publishes and
whole machines. As reported by others; plan with the lower one."""


class OverlapPlan(Record):
    in_sequence: float  # the trainer's utilisation, a share
    overlapped: float
    rollout_share: float  # of the machines, so that both sides take equally long
    resized: float | None  # utilisation with a whole number of GPUs on each side; None without a number of GPUs
    rollout_gpus: int | None
    figures: tuple[Figure, ...]


def plan_overlap(rollout: float, training: float, *, gpus: int | None = None) -> OverlapPlan:
    """What the trainer's utilisation is.

    Args:
        rollout: how long generating a batch takes with all machines, in any unit.
        training: how long learning from it takes, in the same unit.

    Raises:
        UserError: what cannot be asked.
    """
    if not (0 < rollout < math.inf and 0 < training < math.inf):
        what = f"rollout {rollout:g} and training {training:g}: both take some time"
        raise UserError(what, where="--rollout, --training", hint="give both in one unit, for example 60 and 40")
    if gpus is not None and gpus < 2:
        raise UserError(f"{gpus} GPUs cannot be divided", where="--gpus", hint="give 2 or more")
    sheet = Derivation()
    in_sequence = sheet.note(
        "utilisation_in_sequence",
        training / (rollout + training),
        "of the time",
        formula="training / (rollout + training)",
        source="one after the other on the same machines",
        rollout=rollout,
        training=training,
    )
    overlapped = sheet.note(
        "utilisation_overlapped",
        training / max(rollout, training),
        "of the time",
        formula="training / max(rollout, training)",
        source="at once, each side as fast as before: the longer one sets the step",
        rollout=rollout,
        training=training,
    )
    share = sheet.note(
        "rollout_share",
        rollout / (rollout + training),
        "of the machines",
        formula="rollout / (rollout + training)",
        source="time falls with the number of machines, so that these many make both sides equally long",
        rollout=rollout,
        training=training,
    )
    resized = rollout_gpus = None
    if gpus is not None:
        rollout_gpus = _best_split(rollout, training, gpus)
        resized = sheet.note(
            "utilisation_resized",
            _utilisation(rollout, training, rollout_gpus, gpus),
            "of the time",
            formula="(training / training_gpus) / max(rollout / rollout_gpus, training / training_gpus)",
            source="whole GPUs on either side, of all splits the one with the shortest step; nothing else is lost",
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


def _best_split(rollout: float, training: float, gpus: int) -> int:
    return min(range(1, gpus), key=lambda given: max(rollout / given, training / (gpus - given)))


def _utilisation(rollout: float, training: float, given: int, gpus: int) -> float:
    learning = training / (gpus - given)
    return learning / max(rollout / given, learning)
