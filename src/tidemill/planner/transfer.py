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


SIZES = {
    "bytes": ("bytes", "parameters * element_bytes", "a full version"),
    "delta.bytes": (
        "bytes",
        "parameters * changed * bytes_each",
        "changed elements with their positions; measured on a small model (benchmarks/results/weights.json)",
    ),
}
BROADCAST = {
    "seconds": (
        "s",
        "bytes / min(link, worker_link, load)",
        "broadcast in pieces, each loaded while the next arrives; all receivers must be present",
    )
}
MOVED = (
    "s",
    "bytes / min(link, shared) + max(bytes * workers / shared, bytes / worker_link) + 2 * latency",
    "written completely, then read by all workers at once; latency assumed",
)
LOADED = ("s", "moved_s + bytes / load", "loaded after the checksum of the whole version is verified")
APPLIED = (
    "s",
    "2 * parameters / (per_core * cores) + moved_s + full_bytes / load",
    "encoded, moved through the store, applied at the speed of encoding (measured on one CPU core), loaded",
)
SLACK = (
    "s",
    "step - seconds",
    "hidden if the next batch is generated meanwhile (lag 1 or more); at lag 0 workers wait for it",
)
BUFFERS = ("bytes", "2 * bytes", "old version serves while new one arrives")


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
    sheet, worker_link = Derivation(), question.worker_link or question.link
    sizes = sheet.evaluate(
        SIZES,
        parameters=question.parameters,
        element_bytes=DTYPE_BYTES[question.dtype],
        changed=question.changed,
        bytes_each=DELTA_ELEMENT_BYTES,
    )
    full, delta, store = sizes["bytes"], sizes["delta.bytes"], question.store or question.link * question.workers
    ways = {
        "broadcast": (full, math.inf, BROADCAST),
        "store": (full, store, {"moved_s": MOVED, "seconds": LOADED}),
        "file": (full, question.file, {"moved_s": MOVED, "seconds": LOADED}),
        "delta": (delta, store, {"moved_s": MOVED, "seconds": APPLIED}),
    }
    paths = []
    for path, (size, shared, formulas) in ways.items():
        times = sheet.evaluate(
            formulas if question.step_s is None else {**formulas, "slack_s": SLACK},
            label=f"{path}.{{}}",
            bytes=size,
            full_bytes=full,
            parameters=question.parameters,
            link=question.link,
            worker_link=worker_link,
            load=question.load,
            shared=shared,
            workers=question.workers,
            latency=ETHERNET_LATENCY_S,
            per_core=CODED_PER_CORE_S,
            cores=question.cores,
            step=question.step_s or 0.0,
        )
        paths.append(PathTime(path=path, size=size, seconds=times["seconds"], slack_s=times.get("slack_s")))
    return TransferPlan(
        seconds=paths[0].seconds,
        size=full,
        paths=tuple(sorted(paths, key=lambda path: path.seconds)),
        double_buffer=sheet.evaluate({"double_buffer_bytes": BUFFERS}, bytes=full)["double_buffer_bytes"],
        figures=tuple(sheet.figures),
    )
