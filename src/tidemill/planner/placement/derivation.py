"""The figures of one placement, from the speed of its GPUs to its cost."""

from __future__ import annotations

from tidemill.hardware.engine_profile import steady_tokens_per_s
from tidemill.hardware.figures import Derivation
from tidemill.hardware.model_shape import DTYPE_BYTES
from tidemill.planner.placement.estimate import Engine, Placement, Side, batch_tokens, estimate, portions
from tidemill.planner.placement.training import PlacementQuestion, Training, learning

ROOFLINE = "roofline, Williams et al. 2009: the longer of memory traffic and arithmetic"


def derive_generation(question: PlacementQuestion, placement: Placement, sheet: Derivation) -> None:
    """For each kind of engine the time of a decoding step with full slots; for each side its tokens per second."""
    sides = {"shared": placement.shared, "dedicated": placement.dedicated}
    for (name, side), portion in zip(sides.items(), portions(question, placement), strict=True):
        for engine, machines in side.engines:
            _engine(question, engine, machines, f"{name}.{engine.offer.description}", sheet)
        if not side.engines:
            continue
        samples = question.rollout.samples * portion
        if question.lag:
            _flow(question, side, samples * question.lag, name, sheet)
        else:
            _batch(question, side, samples, name, sheet)


def _batch(question: PlacementQuestion, side: Side, samples: float, name: str, sheet: Derivation) -> None:
    seconds, mean = side.batch_s(question, samples), question.rollout.mean
    sheet.compute(
        f"{name}.tokens_per_s",
        "tokens/s",
        formula="samples * mean / seconds",
        source="lag 0: this side's part of a batch; decoding steps are summed while fewer and fewer samples run",
        samples=samples,
        mean=mean,
        seconds=seconds,
    )


def _flow(question: PlacementQuestion, side: Side, in_flight: float, name: str, sheet: Derivation) -> None:
    inputs: dict[str, float] = {}
    count = sum(machines * engine.per_machine for engine, machines in side.engines)
    for number, (engine, machines) in enumerate(side.engines):
        inputs[f"engines_{number}"] = machines * engine.per_machine
        inputs[f"each_{number}"] = steady_tokens_per_s(engine.profile, question.rollout, in_flight / count)
    sheet.compute(
        f"{name}.tokens_per_s",
        "tokens/s",
        formula=" + ".join(f"engines_{number} * each_{number}" for number in range(len(side.engines))),
        source="lag 1 or more: free slots are refilled at once, up to the samples in flight that the lag allows",
        **inputs,
    )


def _engine(question: PlacementQuestion, engine: Engine, machines: float, label: str, sheet: Derivation) -> None:
    gpu, shape, profile, rollout = engine.offer.gpu, question.shape, engine.profile, question.rollout
    efficiencies = question.efficiencies_on(gpu)
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
        formula="parameters_read * element_bytes / (gpus * bandwidth * efficiency)",
        source=f"every decoding step reads the weights; {gpu.source}; the efficiency is {efficiencies.engine_source}",
        parameters_read=shape.parameters - shape.expert_parameters - shape.embedding_parameters,
        element_bytes=DTYPE_BYTES[question.engine_dtype],
        gpus=engine.gpus,
        bandwidth=gpu.bandwidth_bytes_per_s,
        efficiency=efficiencies.engine.bandwidth,
    )
    running = sheet.compute(
        f"{label}.running",
        "samples",
        formula="min(slots, cache_tokens // sample_tokens)",
        source="limited by the slots and by the memory for keys and values",
        slots=profile.slots,
        cache_tokens=profile.cache_tokens,
        sample_tokens=rollout.prompt_tokens + rollout.mean,
    )
    cached = running * rollout.running_context
    experts = profile.experts_s * (1 - (1 - profile.expert_share) ** running) if profile.expert_share else 0.0
    sheet.compute(
        f"{label}.decode_step_s",
        "s",
        formula="step + max(weights + experts + token * cached, sample * running + attended * cached)",
        source=f"{ROOFLINE}, with full slots; efficiencies and overhead are {efficiencies.engine_source}",
        step=profile.step_s,
        weights=profile.weights_s,
        experts=experts,
        token=profile.cached_token_s,
        cached=cached,
        sample=profile.sample_s,
        running=running,
        attended=profile.attended_token_s,
    )


MEGATRON = "Megatron-LM, arXiv 1909.08053, two reductions a layer and pass; rings"
FSDP = "PyTorch FSDP, arXiv 2304.11277: layers are gathered in every pass of every microbatch"


def derive_training(question: PlacementQuestion, training: Training, sheet: Derivation) -> None:
    """From the FLOPs of one token to the training time of a batch."""
    profile, gpu, shape = training.profile, training.group.weakest, question.shape
    learned, efficiencies = learning(question), question.efficiencies_on(*training.group.kinds)
    efficiency = f"the efficiency is {efficiencies.trainer_source}"
    microbatches = profile.microbatches(learned.tokens, question.microbatch_tokens)
    peak = gpu.peak_flops("bf16")
    sheet.compute(
        "forward_token_s",
        "s",
        formula="2 * active_parameters / (gpus * peak_flops * efficiency)",
        source=f"Kaplan et al., arXiv 2001.08361; {gpu.source}; {efficiency}",
        active_parameters=shape.active_parameters,
        gpus=profile.gpus,
        peak_flops=peak,
        efficiency=efficiencies.trainer.compute,
    )
    sheet.compute(
        "attention_pair_s",
        "s",
        formula="4 * layers * width / (gpus * peak_flops * efficiency)",
        source=f"one product with a key and one with a value for every head; {efficiency}",
        layers=shape.layers,
        width=shape.attention_width,
        gpus=profile.gpus,
        peak_flops=peak,
        efficiency=efficiencies.trainer.compute,
    )
    launched = sheet.compute(
        "training.launched_s",
        "s",
        formula="microbatches * passes * (launch_s * layers / stages)",
        source="the host launches the kernels of a layer one by one; the minimum time is assumed",
        microbatches=microbatches,
        passes=learned.passes,
        layers=shape.layers,
        stages=profile.stages,
        launch_s=efficiencies.trainer.launch_s,
    )
    computed = sheet.compute(
        "training.computed_s",
        "s",
        formula="max(tokens * passes * (forward_token_s + pair_s * context / 2), launched)",
        source="forward-sized passes of all roles with recomputation; a token attends to half a sequence on average",
        launched=launched,
        tokens=learned.tokens,
        passes=learned.passes,
        forward_token_s=profile.token_s,
        pair_s=profile.pair_s,
        context=learned.context,
    )
    gathered = sheet.compute(
        "training.gathered_s",
        "s",
        formula="gather_s * passes * microbatches",
        source=FSDP,
        gather_s=profile.gather_s,
        passes=learned.passes,
        microbatches=microbatches,
    )
    exchanged = sheet.compute(
        "training.exchanged_s",
        "s",
        formula="tokens * passes * exchanged_token_s",
        source=MEGATRON,
        tokens=learned.tokens,
        passes=learned.passes,
        exchanged_token_s=profile.exchanged_token_s,
    )
    update = sheet.compute(
        "training.update_s",
        "s",
        formula="moved + step_s",
        source="every state is read and written once; the rest of the optimizer's step is assumed",
        moved=profile.update_s - efficiencies.trainer.step_s,
        step_s=efficiencies.trainer.step_s,
    )
    sheet.compute(
        "training_s",
        "s",
        formula="computed * bubble + max(0, gathered - hidden * computed) + exchanged + update",
        source="an assumed fraction of the computation hides gathering; a pipeline idles at its ends",
        computed=computed,
        bubble=1 + (profile.stages - 1) / microbatches,
        gathered=gathered,
        hidden=profile.hidden,
        exchanged=exchanged,
        update=update,
    )


def derive(question: PlacementQuestion, placement: Placement) -> Derivation:
    """The figures of a placement, from the work of a batch to its cost."""
    sheet = Derivation()
    batch_tokens(question, sheet)
    derive_training(question, placement.training, sheet)
    derive_generation(question, placement, sheet)
    estimate(question, placement, sheet)
    return sheet
