"""A trained policy on disk: `policy.json` describes it by names, `policy.safetensors` has the weights of its actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.robots.policy_arrays import Weights

DESCRIPTION, ACTORS = "policy.json", "policy.safetensors"


class PolicyDescription(Record):
    """What a policy reads and moves, by name: weights alone would act on whatever has the same number of columns."""

    task: str  # as robot.task, or the environment
    engine: str  # in which it was trained
    control_s: float
    joints: tuple[str, ...]  # of the task, in the order of its actions
    policies: dict[str, tuple[str, ...]]  # the joints that each policy moves
    obs_groups: dict[str, tuple[str, ...]]  # the groups that each policy and "critic" read
    layout: dict[str, tuple[tuple[str, int], ...]]  # terms and widths of each group, in order
    history: int
    activation: str
    parameters: dict[str, Any] = {}  # of the training: robot.randomise, identified parameters
    returns: float | None = None  # mean return of its evaluation

    def inputs(self, policy: str) -> int:
        """Width of what a policy reads."""
        return self.history * sum(width for group in self.obs_groups[policy] for _, width in self.layout[group])


class StoredPolicy(Record):
    """A policy that was read."""

    description: PolicyDescription
    weights: dict[str, npt.NDArray[np.float32]]


def write_policy(folder: Path, description: PolicyDescription, weights: Weights) -> None:
    """Write both files into an existing folder. Raises OSError: the disk is full."""
    (folder / DESCRIPTION).write_bytes(msgspec.json.format(msgspec.json.encode(description)) + b"\n")
    save_file({name: np.ascontiguousarray(each) for name, each in weights.items()}, folder / ACTORS)


def read_policy(folder: Path, *, where: str) -> StoredPolicy:
    """Read what `write_policy` wrote.

    Raises:
        UserError: `folder`, at the key `where`, holds no policy.
    """
    try:
        description = msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=PolicyDescription)
        return StoredPolicy(description=description, weights=load_file(folder / ACTORS))
    except (OSError, msgspec.DecodeError, ValueError) as error:
        what, hint = f"{folder} holds no trained policy ({error})", "name the output of a control or clone stage"
        raise UserError(what, where=where, hint=hint) from error
