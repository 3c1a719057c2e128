"""The figures of one placement, from the speed of its GPUs to its cost."""

from __future__ import annotations

from tidemill.hardware.engine_profile import DECODE_STEP, RUNNING, WEIGHTS, weights_read
from tidemill.hardware.figures import Derivation
from tidemill.planner.placement.estimate import Engine, Placement, batch_tokens, estimate
from tidemill.planner.placement.training import PlacementQuestion, training_time

ROOFLINE = "roofline, Williams et al. 2009: the longer of memory traffic and arithmetic"


def derive(question: PlacementQuestion, placement: Placement) -> Derivation:
    """The figures of a placement, from the work of a batch to its cost."""
    sheet, training = Derivation(), placement.training
    batch_tokens(question, sheet)
    training_time(question, training.group, training.tp, training.pp, sheet)
    for name, side in (("shared", placement.shared), ("dedicated", placement.dedicated)):
        for engine, machines in side.engines:
            _engine(question, engine, machines, f"{name}.{engine.offer.description}", sheet)
    estimate(question, placement, sheet)
    return sheet


def _engine(question: PlacementQuestion, engine: Engine, machines: float, label: str, sheet: Derivation) -> None:
    """The number of engines, and the time of a decoding step with full slots."""
    gpu, profile, rollout = engine.offer.gpu, engine.profile, question.rollout
    efficiency = question.efficiencies_on(gpu).engine
    sheet.compute(
        f"{label}.engines",
        "engines",
        formula="machines * gpus_per_machine / gpus",
        source="whole engines on each machine",
        machines=machines,
        gpus_per_machine=engine.per_machine * engine.gpus,
        gpus=engine.gpus,
    )
    sheet.compute(
        f"{label}.weights_s",
        "s",
        formula=WEIGHTS,
        source=f"every decoding step reads the weights; {gpu.source}; the efficiency is {efficiency.source}",
        **weights_read(question.shape, gpu, gpus=engine.gpus, dtype=question.engine_dtype, efficiency=efficiency),
    )
    running = sheet.compute(
        f"{label}.running",
        "samples",
        formula=RUNNING,
        source="limited by the slots and by the memory for keys and values",
        **profile.capacity(rollout.prompt_tokens + rollout.mean),
    )
    sheet.compute(
        f"{label}.decode_step_s",
        "s",
        formula=DECODE_STEP,
        source=f"{ROOFLINE}, with full slots; efficiencies and overhead are {efficiency.source}",
        **profile.decoding(running, running * rollout.running_context),
    )
