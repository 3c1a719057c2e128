"""A trained policy on disk: a folder, or an ONNX file.

In a folder `policy.json` describes the policy by names, and `policy.safetensors` has the weights of its actors. The
metadata of an ONNX file has keys that exporters of Isaac Lab and mjlab write, lists with commas: `joint_names` is
needed, `observation_names` gives the order of terms. Tidemill's own files also have `tidemill`, a description as JSON.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.robots.engine import known_name
from tidemill.robots.policy_arrays import Singles, Weights

if TYPE_CHECKING:
    import onnxruntime

DESCRIPTION, ACTORS = "policy.json", "policy.safetensors"
DESCRIBED, JOINTS, TERMS = "tidemill", "joint_names", "observation_names"  # metadata of ONNX files


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


def onnx_action(weights: Weights, policy: str, observations: Singles) -> Singles:
    """`policy_arrays.mean_action` of a policy that is an ONNX file. Its `columns` and `rows` are where its inputs and
    actions are among those of the task."""
    session = _session(weights[f"{policy}.onnx"].tobytes())
    inputs = np.ascontiguousarray(observations[:, np.asarray(weights[f"{policy}.columns"])])
    given = session.get_inputs()[0]
    batches = inputs[:, None] if given.shape[0] == 1 else [inputs]  # exported for a batch of one
    actions = np.concatenate([session.run(None, {given.name: batch})[0] for batch in batches])
    return np.asarray(actions[:, np.asarray(weights[f"{policy}.rows"])], dtype=np.float32)


def read_onnx(path: Path, task: PolicyDescription, *, where: str) -> StoredPolicy:
    """A policy whose file names its joints; what it does not say is as the task has it.

    Raises:
        UserError: it is no ONNX file, or does not fit the task.
    """
    if len(task.policies) > 1:
        what = f"{path} has one policy, the task needs {' and '.join(task.policies)}"
        raise UserError(what, where=where, hint="name the folder of the trained policies")
    try:
        content = path.read_bytes()
        session = _session(content)
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error}", where=where, hint="name an ONNX file") from error
    metadata = session.get_modelmeta().custom_metadata_map
    joints, terms = (metadata_lists(path).get(key, ()) for key in (JOINTS, TERMS))
    if not joints:
        hint = f'write them into its metadata: {JOINTS} = "{",".join(task.joints)}"'
        raise UserError(f"{path} does not name its joints", where=where, hint=hint)
    (name,) = task.policies
    description = msgspec.structs.replace(task, engine="", joints=joints, policies={name: joints})
    if DESCRIBED in metadata:
        own = msgspec.json.decode(metadata[DESCRIBED], type=PolicyDescription)
        description = msgspec.structs.replace(own, joints=joints, policies={name: joints})
    elif terms and len(groups := task.obs_groups[name]) == 1:
        widths = dict(task.layout[groups[0]])
        order = tuple((term, widths.get(term, 0)) for term in terms)
        description = msgspec.structs.replace(description, layout=task.layout | {groups[0]: order})
        for term in terms:
            known_name(term, widths, "term of observations", where=where)
    width, wanted = session.get_inputs()[0].shape[-1], description.inputs(name)
    if width != wanted:
        what = f"{path} reads {width} numbers, the observations of {wanted // description.history} in the task"
        hint = f"are {wanted} with robot.history = {description.history}: correct the history or the groups"
        raise UserError(what, where=where, hint=hint)
    arrays: dict[str, Any] = {"onnx": np.frombuffer(content, np.uint8), "log_std": np.zeros(len(joints), np.float32)}
    return StoredPolicy(description=description, weights={f"{name}.{part}": each for part, each in arrays.items()})


def metadata_lists(path: Path) -> dict[str, tuple[str, ...]]:
    """The metadata of an ONNX file, as lists."""
    metadata = _session(path.read_bytes()).get_modelmeta().custom_metadata_map
    return {key: tuple(filter(None, map(str.strip, text.split(",")))) for key, text in metadata.items()}


@lru_cache(maxsize=4)
def _session(content: bytes) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
