"""Efficiencies of a GPU from rows that benchmarks/gpu/train_step.py and benchmarks/gpu/engine.py measured on it.

An efficiency is chosen such that the cost model predicts the measured seconds of its row. Where a user gives no rows,
those of `KEPT` are used, for models of about the measured size: an engine that waits for Python with a small model is
no evidence about a large one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from tidemill.core.errors import UserError
from tidemill.core.formatting import percent
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import EngineEfficiency, Rollout, engine_profile, generation_s
from tidemill.hardware.gpu_catalog import Catalog, Count, Gpu
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.model_shape import ModelShape
from tidemill.hardware.trainer_profile import TrainerEfficiency, learning_passes, trainer_profile

ENGINES = ("vllm", "embedded")
"""Engines of rows, the preferred one first."""
SIZE, FORMS = re.compile(r"\d+gb"), {"pcie", "nvl"}
"""Words in device names: memory, and forms with other peaks than the usual one."""
KEPT = Path(__file__).with_name("measured_gpus.json")
"""Rows of GPUs that the project measured; `python -m benchmarks.gpu.kept_rows` writes them."""
ALIKE = 4.0
"""Largest ratio of parameters of a model and of a row of `KEPT` that is used for it."""
HINT = "give results of benchmarks.gpu.train_step and benchmarks.gpu.engine, made with this release on a GPU"


class Efficiencies(Record):
    """Shares of one GPU's peaks."""

    trainer: TrainerEfficiency = TrainerEfficiency()
    engine: EngineEfficiency = EngineEfficiency()

    def described(self, gpu: str) -> Sequence[str]:
        compute, engine = percent(self.trainer.compute), self.engine
        shares = f"{percent(engine.bandwidth)} of bandwidth, {percent(engine.compute)} of peak FLOP/s"
        return (
            f"{gpu}: training at {compute} of peak FLOP/s, {self.trainer.source}",
            f"{gpu}: engines at {shares}, {1e3 * engine.step_s:.2g} ms per step, {engine.source}",
        )


ASSUMED = Efficiencies()


class Row(Record):
    """Fields of a row, named as in the scripts: bf16 on one GPU, all samples equally long."""

    model: str
    config: dict[str, Any]  # as in a Hugging Face config.json
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    samples: Count
    group_size: Count
    prompt_tokens: Count
    completion_tokens: Count


class TrainStepRow(Row, tag_field="row", tag="train_step"):
    way: str
    microbatch_tokens: Count
    recomputes: bool  # activations


class EngineRow(Row, tag_field="row", tag="engine"):
    engine: str
    slots: Count


class MeasuredRow(Record):
    """A row with what its fields refer to."""

    row: TrainStepRow | EngineRow
    kind: str  # way or engine
    gpu: Gpu
    shape: ModelShape
    rollout: Rollout
    source: str  # file, device, row

    def likeness(self, shape: ModelShape) -> float:
        """Logarithm of the ratio of parameters; 0 for equally many."""
        return abs(math.log(self.shape.parameters / shape.parameters))

    def too_short(self, least_s: float) -> UserError:
        what = f"took {self.row.seconds:.3g} s; the cost model of {self.gpu.name} allows {least_s:.3g} s or more"
        hint = "measure a larger model, or correct the GPU in a catalogue file"
        return UserError(what, where=self.source, hint=hint)


class ResultFile(Record):
    device: str
    rows: tuple[dict[str, Any], ...]
    measured: str = ""  # date and versions, of kept rows


def measured_efficiencies(
    files: Sequence[Path], catalog: Catalog, *, shape: ModelShape, gpus: Sequence[Gpu], engines: Sequence[str] = ENGINES
) -> tuple[dict[str, Efficiencies], tuple[str, ...]]:
    """Efficiencies by name of the GPU, and lines on what is measured.

    Args:
        files: of the user; without any, kept rows of models with about as many parameters are used.
        shape: of the model; the row with the nearest number of parameters is used.
        gpus: of the machines; rows of others are not used.
        engines: the first of them with a row is used.

    Raises:
        UserError: as `read_rows`, or a row is faster than the cost model allows.
    """
    if not files:
        kept = [each for each in kept_rows(catalog) if each.likeness(shape) <= math.log(ALIKE)]
        usable = [each for each in kept if each.kind in ("shared", *engines)]
        names = {each.gpu.name for each in usable}
        found = _efficiencies(usable, [gpu for gpu in gpus if gpu.name in names], shape, engines)
        return found, tuple(line for name, each in found.items() for line in each.described(name))
    read = [(file, read_rows(file, catalog)) for file in files]
    found = _efficiencies([each for _, rows in read for each in rows], gpus, shape, engines)
    lines = [line for name, each in found.items() for line in each.described(name)]
    for file, rows in read:
        if (other := rows[0].gpu.name) not in found:
            lines.append(f"{file} is not used: its rows are of {other}, the machines have {', '.join(found)}")
    return found, tuple(lines)


def _efficiencies(
    rows: Sequence[MeasuredRow], gpus: Sequence[Gpu], shape: ModelShape, engines: Sequence[str]
) -> dict[str, Efficiencies]:
    found: dict[str, Efficiencies] = {}
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        own = [each for each in rows if each.gpu.name == name]
        step, run = _nearest(own, ("shared",), shape), _nearest(own, engines, shape)
        trainer = TrainerEfficiency(source="assumed (no measured row of a training step)")
        engine = EngineEfficiency(source=f"assumed (no measured row of {' or '.join(engines)})")
        found[name] = Efficiencies(
            trainer=_trainer_efficiency(step) if step else trainer, engine=_engine_efficiency(run) if run else engine
        )
    return found


def _nearest(rows: Sequence[MeasuredRow], kinds: Sequence[str], shape: ModelShape) -> MeasuredRow | None:
    """The row of the first kind that has any, with the most similar number of parameters."""
    some = next(filter(None, ([each for each in rows if each.kind == kind] for kind in kinds)), [])
    return min(some, key=lambda each: each.likeness(shape), default=None)


def read_rows(file: Path, catalog: Catalog) -> Sequence[MeasuredRow]:
    """The measured rows of training steps (shared, without LoRA) and of Tidemill's engines, at least 1.

    Raises:
        UserError: not a result file, an unknown GPU, no such row, or a row without a field.
    """
    try:
        result = msgspec.json.decode(file.read_bytes(), type=ResultFile)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(file), hint=HINT) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not a file of measured rows: {error}", where=str(file), hint=HINT) from error
    found = _rows_of(result, catalog, where=str(file))
    if not found:
        what = "has no measured row of a training step (shared, without LoRA) or of an engine"
        raise UserError(what, where=str(file), hint=HINT)
    return found


@cache
def _kept() -> Sequence[ResultFile]:
    return msgspec.json.decode(KEPT.read_bytes(), type=tuple[ResultFile, ...])


def kept_rows(catalog: Catalog) -> Iterator[MeasuredRow]:
    """Those whose GPU is in the catalogue."""
    for result in _kept():
        with suppress(UserError):
            yield from _rows_of(result, catalog, where=result.measured)


def _rows_of(result: ResultFile, catalog: Catalog, *, where: str) -> list[MeasuredRow]:
    gpu, found = gpu_of_device(result.device, catalog, where=where), list[MeasuredRow]()
    for number, fields in enumerate(result.rows, 1):
        kind = fields.get("way") if fields.get("row") == "train_step" else fields.get("engine")
        if fields.get("status") != "measured" or fields.get("lora") or kind not in ("shared", *ENGINES):
            continue
        source = f"{where}: row {number}"
        try:
            row = msgspec.convert(fields, TrainStepRow | EngineRow)
        except msgspec.ValidationError as error:
            raise UserError(str(error), where=source, hint=HINT) from error
        work = Rollout(
            samples=row.samples,
            group_size=row.group_size,
            prompt_tokens=float(row.prompt_tokens),
            lengths=(row.completion_tokens,),
        )
        shape = shape_of_config(row.config, source=f"{source}: config")
        source = f"{where}, {result.device}, row {number} ({row.model}, {kind})"
        found.append(MeasuredRow(row=row, kind=kind, gpu=gpu, shape=shape, rollout=work, source=source))
    return found


def gpu_of_device(device: str, catalog: Catalog, *, where: str = "") -> Gpu:
    """The GPU of the catalogue for a device name of torch, such as `NVIDIA H100 80GB HBM3`.

    All words of the GPU's name except its memory are in the device's name. If the device's name has a memory size, or
    the form PCIe or NVL, the GPU's name has it, too. Of several GPUs the one with most words in common is taken.

    Raises:
        UserError: no GPU, or several.
    """
    words = _words(device)
    particular = {word for word in words if SIZE.fullmatch(word) or word in FORMS}
    common = {
        name: len(own & words)
        for name in catalog.gpus
        if particular <= (own := _words(name)) and {word for word in own if not SIZE.fullmatch(word)} <= words
    }
    found = [name for name, count in common.items() if count == max(common.values())]
    if len(found) != 1:
        what = f"the device {device!r} is {'no GPU of the catalogue' if not found else ' or '.join(found)}"
        hint = f"known: {', '.join(catalog.gpus)}; a catalogue file can add a GPU named by words of the device"
        raise UserError(what, where=where, hint=hint)
    return catalog.gpus[found[0]]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _trainer_efficiency(measured: MeasuredRow) -> TrainerEfficiency:
    """Computing takes the step without its update; recomputed activations count as computing, as in the profile."""
    row, work, assumed = measured.row, measured.rollout, ASSUMED.trainer
    assert isinstance(row, TrainStepRow)
    profile = trainer_profile(measured.shape, measured.gpu, gpus=1, efficiency=assumed)
    tokens = work.tokens + work.samples / work.group_size * work.prompt_tokens
    passes = learning_passes(recompute=row.recomputes)
    computed_s = profile.pass_s(tokens, work.prompt_tokens + work.mean, passes=passes, microbatches=0)
    launched_s = profile.microbatches(tokens, row.microbatch_tokens) * passes * profile.launch_s
    least_s = max(launched_s, assumed.compute * computed_s) + profile.update_s
    if row.seconds <= least_s:
        raise measured.too_short(least_s)
    compute = assumed.compute * computed_s / (row.seconds - profile.update_s)
    return replace(assumed, compute=compute, source=f"measured: {measured.source}")


def _engine_efficiency(measured: MeasuredRow) -> EngineEfficiency:
    """Both shares change by one factor; where one would exceed 1, the assumed overhead of a step is reduced."""
    row, work, assumed = measured.row, measured.rollout, ASSUMED.engine
    assert isinstance(row, EngineRow)
    profile = engine_profile(measured.shape, measured.gpu, slots=row.slots, efficiency=assumed)
    busy_s = generation_s(replace(profile, step_s=0.0), work, work.samples)
    overhead_s = generation_s(profile, work, work.samples) - busy_s
    most = 1 / max(assumed.bandwidth, assumed.compute)
    if not row.seconds > busy_s / most:
        raise measured.too_short(busy_s / most)
    factor = busy_s / max(row.seconds - overhead_s, busy_s / most)
    return replace(
        assumed,
        bandwidth=factor * assumed.bandwidth,
        compute=factor * assumed.compute,
        step_s=assumed.step_s * (row.seconds - busy_s / factor) / overhead_s,
        source=f"measured: {measured.source}",
    )
