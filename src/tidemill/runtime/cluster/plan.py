"""What the driver tells actors when they start, and what they answer."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.schema import RunSpec
from tidemill.core.buffers import TokenBuffer
from tidemill.core.records import PolicyVersion, Record, StepMetrics


class WorkerPlan(Record):
    """How a worker generates, wherever it runs."""

    spec: str  # a RunSpec as JSON
    prompt_tokens: int  # the longest prompt
    dtype: str  # of the published weights
    threads: int  # inside one operation
    cloud_notices: bool  # ask the cloud's metadata service whether this machine is about to go
    orphan_s: float = 60.0  # a worker that nobody has asked for anything for so long ends itself


class TrainerPlan(Record):
    """What is trained and where it is kept."""

    spec: str  # a RunSpec as JSON
    checkpoints: str  # a folder
    prompt_tokens: int  # the longest prompt
    probe_ids: TokenBuffer  # int32 [N], published with every version; empty where nobody pulls any


class CriticPlan(Record):
    """What a critic in a process of its own learns with."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    seen: str  # a file that the trainer has just made where checkpoints are written


class ReaderPlan(Record):
    """What a reward model or the reference reads with, in a process of its own."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    reward_model: str = ""  # its folder; empty for the reference


class Started(Record):
    """What a trainer said when it was ready."""

    version: PolicyVersion
    device: str
    threads: int
    autocast: str
    dtype: str  # of published weights
    critic_device: str  # of a critic in a process of its own, else empty


class Committed(Record):
    """A batch was learned from."""

    metrics: StepMetrics
    version: PolicyVersion


class Restored(Record):
    """Which checkpoint the trainer goes on from; 0 for none."""

    step: int
    version: PolicyVersion
    warnings: tuple[str, ...]


def spec_to_send(spec: RunSpec, folder: Path) -> str:
    """The configuration for a process that runs in another folder.

    Args:
        folder: the model's, as found here.
    """
    model, critic = spec.model, spec.critic
    if Path(model.source).expanduser().exists():
        model = model.model_copy(update={"source": str(folder.resolve())})
    if critic.source is not None and (given := Path(critic.source).expanduser()).exists():
        critic = critic.model_copy(update={"source": str(given.resolve())})
    return spec.model_copy(update={"model": model, "critic": critic}).model_dump_json()
