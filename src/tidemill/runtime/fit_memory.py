"""Settings of a trainer that follow from the memory of its GPU: tokens of a microbatch, recomputed activations."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.config.learning import Checkpointing
from tidemill.config.schema import RunSpec
from tidemill.hardware.process_memory import FULL_MICROBATCHES, Models, Work, needs

TOKENS = (16_384, 8_192, 4_096)
"""Of a microbatch, if they fit. With fewer a GPU waits for the host, which launches the kernels of each layer."""
USABLE = 0.85
"""Share of a GPU's memory that the plan may fill; the rest is for its libraries and fragmentation."""


def fitted(spec: RunSpec, models: Models | None, work: Work, *, gpu_bytes: float | None) -> RunSpec:
    """Choose `batch.microbatch_tokens` and `trainer.activation_checkpointing` where they are automatic.

    The choice follows from the configuration, the models and the kind of GPU. A resumed run keeps its microbatches;
    recomputed activations do not change results. They cost more than smaller microbatches: of the choices that fit,
    the first of `_choices` is taken.

    Args:
        models: None if their shapes are unknown.
        gpu_bytes: memory of the GPU, free or not; None on a CPU.
    """
    if gpu_bytes is None or models is None:
        return _with(spec, spec.batch.microbatch_budget, spec.trainer.recomputes(on_gpu=gpu_bytes is not None))
    choices = list(_choices(spec))
    for each in choices:
        need = needs(each, models, work, on_gpu=True, alone=False, lengths=FULL_MICROBATCHES).gpu
        if need is not None and need.at_full_length <= USABLE * gpu_bytes:
            return each
    return choices[-1]


def _choices(spec: RunSpec) -> Iterator[RunSpec]:
    tokens, checkpointing = spec.batch.microbatch_tokens, spec.trainer.activation_checkpointing
    ways: tuple[Checkpointing, ...] = (False, "selective", True) if checkpointing == "auto" else (checkpointing,)
    for way in ways:
        for number in (tokens,) if tokens else TOKENS:
            yield _with(spec, number, way)
    yield _with(spec, spec.batch.microbatch_budget, ways[-1])


def _with(spec: RunSpec, tokens: int, checkpointing: Checkpointing) -> RunSpec:
    batch = spec.batch.model_copy(update={"microbatch_tokens": tokens})
    trainer = spec.trainer.model_copy(update={"activation_checkpointing": checkpointing})
    return spec.model_copy(update={"batch": batch, "trainer": trainer})
