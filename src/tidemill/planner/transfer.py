"""`plan weights`: how long a version travels to the workers by each path, and whether that hides behind a step."""

from __future__ import annotations

import math

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import CODED_PER_CORE_S, DELTA_ELEMENT_BYTES
from tidemill.hardware.gpu_catalog import BITS, ETHERNET_LATENCY_S, Link, broadcast_s, fan_out_s
from tidemill.hardware.model_shape import DTYPE_BYTES
from tidemill.planner.figures import Derivation, Figure

GIGABIT = 1e9 / BITS
"""In bytes."""

PCIE_5_X16 = 63e9
"""Bytes per second and direction: 32 GT/s × 16 lanes × 128/130. MoonshotAI's checkpoint-engine (README, H800 and H20
with 8 to 256 GPUs, 107 to 1,026 billion parameters) updates vLLM at 59 to 76e9."""


class TransferQuestion(Record):
    """Rates in bytes per second and one direction, times in seconds."""

    parameters: float
    link: float  # of the trainer's machine
    dtype: str = "bf16"
    worker_link: float | None = None  # None: like the trainer's
    store: float | None = None  # of the object store in all; None: as fast as is asked of it
    file: float = 2e9  # of the shared file system in all
    load: float = PCIE_5_X16  # from a worker's host memory into its engine, all of its GPUs together
    workers: int = 1
    changed: float = 0.03  # share of the elements that differ from the version before
    cores: int = 16  # that encode a delta
    step_s: float | None = None  # that the transfer may hide behind


class PathTime(Record):
    """One way for the weights to take."""

    path: str
    size: float  # bytes that one worker receives
    seconds: float
    slack_s: float | None  # left of the step; negative where the transfer does not hide; None without a step

    @property
    def hides(self) -> bool | None:
        return None if self.slack_s is None else self.slack_s >= 0


class TransferPlan(Record):
    seconds: float  # of the broadcast
    size: float  # bytes of a full version
    paths: tuple[PathTime, ...]  # fastest first
    double_buffer: float  # bytes of the version served and the one that arrives, on one worker's engine
    figures: tuple[Figure, ...]


def plan_transfer(question: TransferQuestion) -> TransferPlan:
    """Raises UserError: what cannot be asked."""
    _check(question)
    sheet = Derivation()
    size = sheet.note(
        "bytes",
        question.parameters * DTYPE_BYTES[question.dtype],
        "bytes",
        formula="parameters * element_bytes",
        source="a full version",
        parameters=question.parameters,
        element_bytes=DTYPE_BYTES[question.dtype],
    )
    delta = sheet.note(
        "delta.bytes",
        question.parameters * question.changed * DELTA_ELEMENT_BYTES,
        "bytes",
        formula="parameters * changed * bytes_each",
        source="changed elements with their places; bytes measured on a small model (benchmarks/results/weights.json)",
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
    buffers = sheet.note(
        "double_buffer_bytes", 2 * size, "bytes", formula="2 * bytes", source="old served while new arrives", bytes=size
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
    slowest = min(question.link, question.worker_link or question.link, question.load)
    return sheet.note(
        "broadcast.seconds",
        broadcast_s(size, slowest=Link(bytes_per_s=slowest, latency_s=0.0), receivers=question.workers),
        "s",
        formula="bytes / min(link, worker_link, load)",
        source="broadcast in pieces, loaded while the next piece arrives; every receiver must be there",
        bytes=size,
        link=question.link,
        worker_link=question.worker_link or question.link,
        load=question.load,
    )


def _pulled(question: TransferQuestion, path: str, size: float, shared: float, sheet: Derivation) -> float:
    """Moved through a store, then loaded: a worker checks a version as a whole before it loads it."""
    moved = _moved(question, f"{path}.moved_s", size, shared, sheet)
    return sheet.note(
        f"{path}.seconds",
        moved + size / question.load,
        "s",
        formula="moved + bytes / load",
        source="loaded after the checksum of the whole version is verified",
        moved=moved,
        bytes=size,
        load=question.load,
    )


def _moved(question: TransferQuestion, name: str, size: float, shared: float, sheet: Derivation) -> float:
    """Written whole, then read by every worker at once."""
    store, sink = Link(bytes_per_s=shared, latency_s=0.0), question.worker_link or question.link
    up = min(question.link, shared)
    down = fan_out_s(size, source=store, sink=Link(bytes_per_s=sink, latency_s=0.0), receivers=question.workers)
    return sheet.note(
        name,
        size / up + down + 2 * ETHERNET_LATENCY_S,
        "s",
        formula="bytes / min(link, shared) + max(bytes * workers / shared, bytes / worker_link) + 2 * latency",
        source="written whole, then read by all workers at once; latency assumed",
        bytes=size,
        link=question.link,
        shared=shared,
        workers=question.workers,
        worker_link=sink,
        latency=ETHERNET_LATENCY_S,
    )


def _delta(question: TransferQuestion, delta: float, sheet: Derivation) -> float:
    moved = _moved(question, "delta.moved_s", delta, question.store or question.link * question.workers, sheet)
    size = question.parameters * DTYPE_BYTES[question.dtype]
    return sheet.note(
        "delta.seconds",
        2 * question.parameters / (CODED_PER_CORE_S * question.cores) + moved + size / question.load,
        "s",
        formula="2 * parameters / (per_core * cores) + moved + bytes / load",
        source="encoded, moved through the store, applied as slowly as encoded (one CPU core measured), loaded whole",
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
    return sheet.note(
        f"{path}.slack_s",
        question.step_s - seconds,
        "s",
        formula="step - transfer",
        source="hides where the next batch is generated meanwhile (lag 1 or more); at lag 0 workers wait for it",
        step=question.step_s,
        transfer=seconds,
    )
