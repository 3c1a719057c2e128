"""`plan weights`: time to send a version to the workers by each path, and whether a step hides it."""

from __future__ import annotations

import math

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import CODED_PER_CORE_S, DELTA_ELEMENT_BYTES
from tidemill.hardware.figures import Derivation, Figure
from tidemill.hardware.gpu_catalog import BITS, ETHERNET_LATENCY_S
from tidemill.hardware.model_shape import DTYPE_BYTES

GIGABIT = 1e9 / BITS
"""Bytes per second of 1 Gbit/s."""

PCIE_5_X16 = 63e9
"""Bytes per second and direction: 32 GT/s × 16 lanes × 128/130. MoonshotAI's checkpoint-engine (README, H800 and H20
with 8 to 256 GPUs, 107 to 1,026 billion parameters) updates vLLM at 59 to 76e9."""


class TransferQuestion(Record):
    """Rates in bytes per second and one direction, times in seconds."""

    parameters: float
    link: float  # network of the trainer's machine
    dtype: str = "bf16"
    worker_link: float | None = None  # network of a worker's machine; None: as the trainer's
    store: float | None = None  # total rate of the object store; None: no limit
    file: float = 2e9  # total rate of the shared file system
    load: float = PCIE_5_X16  # from a worker's host memory to all GPUs of its engine
    workers: int = 1
    changed: float = 0.03  # fraction of the elements that differ from the previous version
    cores: int = 16  # that encode a delta
    step_s: float | None = None  # duration of a step, which the transfer may overlap


class PathTime(Record):
    """Time and size of one path."""

    path: str
    size: float  # bytes that one worker receives
    seconds: float
    slack_s: float | None  # step minus transfer; negative: the step does not hide it; None: no step is given

    @property
    def hides(self) -> bool | None:
        return None if self.slack_s is None else self.slack_s >= 0


class TransferPlan(Record):
    seconds: float  # of the broadcast
    size: float  # bytes of a full version
    paths: tuple[PathTime, ...]  # fastest first
    double_buffer: float  # bytes of the served and the arriving version, on one worker's engine
    figures: tuple[Figure, ...]


def plan_transfer(question: TransferQuestion) -> TransferPlan:
    """Estimate the transfer by broadcast, object store, file system and deltas.

    Raises:
        UserError: a rate, count or fraction is out of range.
    """
    _check(question)
    sheet = Derivation()
    size = sheet.compute(
        "bytes",
        "bytes",
        formula="parameters * element_bytes",
        source="a full version",
        parameters=question.parameters,
        element_bytes=DTYPE_BYTES[question.dtype],
    )
    delta = sheet.compute(
        "delta.bytes",
        "bytes",
        formula="parameters * changed * bytes_each",
        source="changed elements with their positions; measured on a small model (benchmarks/results/weights.json)",
        parameters=question.parameters,
        changed=question.changed,
        bytes_each=DELTA_ELEMENT_BYTES,
    )
    timed = {
        "broadcast": (size, _broadcast(question, size, sheet)),
        "store": (size, _pulled(question, "store", size, question.store or question.link * question.workers, sheet)),
        "file": (size, _pulled(question, "file", size, question.file, sheet)),
        "delta": (delta, _delta(question, delta, sheet)),
    }
    paths = [
        PathTime(path=path, size=each, seconds=took, slack_s=_slack(question, path, took, sheet))
        for path, (each, took) in timed.items()
    ]
    buffers = sheet.compute(
        "double_buffer_bytes",
        "bytes",
        formula="2 * bytes",
        source="old version serves while new one arrives",
        bytes=size,
    )
    return TransferPlan(
        seconds=timed["broadcast"][1],
        size=size,
        paths=tuple(sorted(paths, key=lambda each: each.seconds)),
        double_buffer=buffers,
        figures=tuple(sheet.figures),
    )


def _check(question: TransferQuestion) -> None:
    given = {"--link-gbps": question.link, "--worker-link-gbps": question.worker_link}
    given |= {"--store-gbps": question.store, "--file-gbps": question.file, "--load-gbps": question.load}
    rates = {option: None if rate is None else rate / GIGABIT for option, rate in given.items()}
    counts = {"--workers": question.workers, "--cores": question.cores}
    for option, value in {**rates, **counts, "--step-s": question.step_s}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"needs a number above 0, was given {value:g}", where=option, hint="correct it")
    if not 0 <= question.changed <= 1:
        what = f"needs a share from 0 to 1, was given {question.changed:g}"
        raise UserError(what, where="--changed", hint="0.03 is 3 % of the elements")


def _broadcast(question: TransferQuestion, size: float, sheet: Derivation) -> float:
    return sheet.compute(
        "broadcast.seconds",
        "s",
        formula="bytes / min(link, worker_link, load)",
        source="broadcast in pieces, each loaded while the next arrives; all receivers must be present",
        bytes=size,
        link=question.link,
        worker_link=question.worker_link or question.link,
        load=question.load,
    )


def _pulled(question: TransferQuestion, path: str, size: float, shared: float, sheet: Derivation) -> float:
    """Seconds through a store: a worker verifies the whole version before it loads it."""
    moved = _moved(question, f"{path}.moved_s", size, shared, sheet)
    return sheet.compute(
        f"{path}.seconds",
        "s",
        formula="moved + bytes / load",
        source="loaded after the checksum of the whole version is verified",
        moved=moved,
        bytes=size,
        load=question.load,
    )


def _moved(question: TransferQuestion, name: str, size: float, shared: float, sheet: Derivation) -> float:
    """Seconds to write a version to a store and for all workers to read it."""
    return sheet.compute(
        name,
        "s",
        formula="bytes / min(link, shared) + max(bytes * workers / shared, bytes / worker_link) + 2 * latency",
        source="written completely, then read by all workers at once; latency assumed",
        bytes=size,
        link=question.link,
        shared=shared,
        workers=question.workers,
        worker_link=question.worker_link or question.link,
        latency=ETHERNET_LATENCY_S,
    )


def _delta(question: TransferQuestion, delta: float, sheet: Derivation) -> float:
    moved = _moved(question, "delta.moved_s", delta, question.store or question.link * question.workers, sheet)
    size = question.parameters * DTYPE_BYTES[question.dtype]
    return sheet.compute(
        "delta.seconds",
        "s",
        formula="2 * parameters / (per_core * cores) + moved + bytes / load",
        source="encoded, moved through the store, applied at the speed of encoding (measured on one CPU core), loaded",
        parameters=question.parameters,
        per_core=CODED_PER_CORE_S,
        cores=question.cores,
        moved=moved,
        bytes=size,
        load=question.load,
    )


def _slack(question: TransferQuestion, path: str, seconds: float, sheet: Derivation) -> float | None:
    if question.step_s is None:
        return None
    return sheet.compute(
        f"{path}.slack_s",
        "s",
        formula="step - transfer",
        source="hidden if the next batch is generated meanwhile (lag 1 or more); at lag 0 workers wait for it",
        step=question.step_s,
        transfer=seconds,
    )
