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


class Started(Record):
    """What a trainer said when it was ready."""

    version: PolicyVersion
    device: str
    threads: int
    autocast: str
    dtype: str  # of published weights


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
    model = spec.model
    if Path(model.source).expanduser().exists():
        model = model.model_copy(update={"source": str(folder.resolve())})
    return spec.model_copy(update={"model": model}).model_dump_json()
