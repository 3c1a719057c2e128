"""The figures of one placement with their formulas."""

from __future__ import annotations

import math

from tidemill.hardware.engine_profile import steady_tokens_per_s
from tidemill.hardware.gpu_catalog import ETHERNET_LATENCY_S
from tidemill.hardware.model_shape import DTYPE_BYTES
from tidemill.planner.figures import Derivation
from tidemill.planner.placement.estimate import SECONDS_PER_HOUR, Engine, Estimate, Side, portions, streaming
from tidemill.planner.placement.training import PlacementQuestion, Training, learned_parameters, learning

ROOFLINE = "roofline, Williams et al. 2009: the longer of moving bytes and computing"


def derive_generation(question: PlacementQuestion, found: Estimate, sheet: Derivation) -> None:
    """For each kind of engine a decoding step with full slots, and the rate that comes of it."""
    placement = found.placement
    sides = {"shared": placement.shared, "dedicated": placement.dedicated}
    for (name, side), portion in zip(sides.items(), portions(question, placement), strict=True):
        for engine, machines in side.engines:
            _engine(question, engine, machines, f"{name}.{engine.offer.words}", sheet)
        if not side.engines:
            continue
        samples = question.rollout.samples * portion
        if question.lag:
            _flow(question, side, samples * question.lag, name, sheet)
        else:
            _batch(question, side, samples, name, sheet)


def _batch(question: PlacementQuestion, side: Side, samples: float, name: str, sheet: Derivation) -> None:
    seconds, mean = side.batch_s(question, samples), question.rollout.mean
    sheet.note(
        f"{name}.tokens_per_s",
        samples * mean / seconds,
        "tokens/s",
        formula="samples * mean / seconds",
        source="lag 0: its portion of a batch; decoding steps summed over the lengths, with ever fewer samples running",
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
    sheet.note(
        f"{name}.tokens_per_s",
        side.steady(question, in_flight),
        "tokens/s",
        formula=" + ".join(f"engines_{number} * each_{number}" for number in range(len(side.engines))),
        source="lag 1 or more: slots are filled again at once, as far as the lag lets samples be in flight",
        **inputs,
    )


def _engine(question: PlacementQuestion, engine: Engine, machines: float, label: str, sheet: Derivation) -> None:
    gpu, shape, profile, rollout = engine.offer.gpu, question.shape, engine.profile, question.rollout
    sheet.note(
        f"{label}.engines",
        machines * engine.per_machine,
        "engines",
        formula="machines * gpus_per_machine / gpus",
        source="whole engines on each machine",
        machines=machines,
        gpus_per_machine=engine.per_machine * engine.gpus,
        gpus=engine.gpus,
    )
    sheet.note(
        f"{label}.weights_s",
        profile.weights_s,
        "s",
        formula="parameters_read * element_bytes / (gpus * bandwidth * efficiency)",
        source=f"every decoding step reads the weights; {gpu.source}; the efficiency is assumed",
        parameters_read=shape.parameters - shape.expert_parameters - shape.embedding_parameters,
        element_bytes=DTYPE_BYTES[question.engine_dtype],
        gpus=engine.gpus,
        bandwidth=gpu.bandwidth_bytes_per_s,
        efficiency=question.engine.bandwidth,
    )
    running = profile.most_running(rollout.prompt_tokens + rollout.mean)
    sheet.note(
        f"{label}.running",
        running,
        "samples",
        formula="min(slots, cache_tokens // sample_tokens)",
        source="what slots and the memory that is left for keys and values hold",
        slots=profile.slots,
        cache_tokens=profile.cache_tokens,
        sample_tokens=rollout.prompt_tokens + rollout.mean,
    )
    cached = running * rollout.running_context
    experts = profile.experts_s * (1 - (1 - profile.expert_share) ** running) if profile.expert_share else 0.0
    sheet.note(
        f"{label}.decode_step_s",
        profile.decode_step_s(running, cached),
        "s",
        formula="step + max(weights + experts + token * cached, sample * running + attended * cached)",
        source=f"{ROOFLINE}, with full slots",
        step=profile.step_s,
        weights=profile.weights_s,
        experts=experts,
        token=profile.cached_token_s,
        cached=cached,
        sample=profile.sample_s,
        running=running,
        attended=profile.attended_token_s,
    )


def derive_pull(question: PlacementQuestion, found: Estimate, sheet: Derivation) -> None:
    """Nothing where no machine only generates."""
    placement = found.placement
    if not placement.dedicated.engines:
        return
    parameters = learned_parameters(question)
    sheet.note(
        "pull_s",
        found.pull_s,
        "s",
        formula="max(parameters * 2 * receivers / trainer_rate, parameters * 2 / worker_rate) + latency",
        source="a full version for every machine that only generates, over their networks; a delta is smaller",
        parameters=parameters,
        receivers=max(1, math.ceil(placement.dedicated.machines)),
        trainer_rate=sum(
            offer.machine.network_bytes_per_s * count for offer, count in placement.training.group.members
        ),
        worker_rate=min(engine.offer.machine.network_bytes_per_s for engine, _ in placement.dedicated.engines),
        latency=ETHERNET_LATENCY_S,
    )


MEGATRON = "Megatron-LM, arXiv 1909.08053, two reductions a layer and pass; rings"
FSDP = "PyTorch FSDP, arXiv 2304.11277: layers are gathered in every pass of every microbatch"


def derive_training(question: PlacementQuestion, training: Training, sheet: Derivation) -> None:
    """From the FLOPs of a token to the seconds of a batch."""
    profile, gpu, shape = training.profile, training.group.weakest, question.shape
    learned = learning(question)
    microbatches = profile.microbatches(learned.tokens, question.microbatch_tokens)
    peak = gpu.peak_flops("bf16")
    sheet.note(
        "forward_token_s",
        profile.token_s,
        "s",
        formula="2 * active_parameters / (gpus * peak_flops * efficiency)",
        source=f"Kaplan et al., arXiv 2001.08361; {gpu.source}; the efficiency is assumed",
        active_parameters=shape.active_parameters,
        gpus=profile.gpus,
        peak_flops=peak,
        efficiency=question.trainer.compute,
    )
    sheet.note(
        "attention_pair_s",
        profile.pair_s,
        "s",
        formula="4 * layers * width / (gpus * peak_flops * efficiency)",
        source="a product with a key and one with a value, of every head",
        layers=shape.layers,
        width=shape.attention_width,
        gpus=profile.gpus,
        peak_flops=peak,
        efficiency=question.trainer.compute,
    )
    launched = sheet.note(
        "training.launched_s",
        microbatches * learned.passes * profile.launch_s,
        "s",
        formula="microbatches * passes * layers / stages * launch_s",
        source="the kernels of a layer are launched one by one by the host; its least time is assumed",
        microbatches=microbatches,
        passes=learned.passes,
        layers=shape.layers,
        stages=profile.stages,
        launch_s=question.trainer.launch_s,
    )
    computed = sheet.note(
        "training.computed_s",
        max(learned.tokens * learned.passes * (profile.token_s + profile.pair_s * learned.context / 2), launched),
        "s",
        formula="max(tokens * passes * (forward_token_s + pair_s * context / 2), launched)",
        source="forward-sized passes of all roles, activations computed again; each token sees half a sequence",
        launched=launched,
        tokens=learned.tokens,
        passes=learned.passes,
        forward_token_s=profile.token_s,
        pair_s=profile.pair_s,
        context=learned.context,
    )
    gathered = sheet.note(
        "training.gathered_s",
        profile.gather_s * learned.passes * microbatches,
        "s",
        formula="gather_s * passes * microbatches",
        source=FSDP,
        gather_s=profile.gather_s,
        passes=learned.passes,
        microbatches=microbatches,
    )
    exchanged = sheet.note(
        "training.exchanged_s",
        learned.tokens * learned.passes * profile.exchanged_token_s,
        "s",
        formula="tokens * passes * exchanged_token_s",
        source=MEGATRON,
        tokens=learned.tokens,
        passes=learned.passes,
        exchanged_token_s=profile.exchanged_token_s,
    )
    update = sheet.note(
        "training.update_s",
        profile.update_s,
        "s",
        formula="moved + step_s",
        source="every state is read and written once; what the optimizer's step takes beside that is assumed",
        moved=profile.update_s - question.trainer.step_s,
        step_s=question.trainer.step_s,
    )
    sheet.note(
        "training_s",
        training.seconds,
        "s",
        formula="computed * bubble + max(0, gathered - hidden * computed) + exchanged + update",
        source="gathering hides behind a share of the computing, assumed; a pipeline is empty at its ends",
        computed=computed,
        bubble=1 + (profile.stages - 1) / microbatches,
        gathered=gathered,
        hidden=profile.hidden,
        exchanged=exchanged,
        update=update,
    )


def derive(question: PlacementQuestion, found: Estimate) -> Derivation:
    """From what is computed and generated to what it costs."""
    sheet = Derivation()
    sheet.note(
        "tokens",
        found.tokens,
        "tokens",
        formula="samples * mean",
        source="completion tokens of a batch; the mean is of the lengths given",
        samples=question.rollout.samples,
        mean=question.rollout.mean,
    )
    derive_training(question, found.placement.training, sheet)
    derive_generation(question, found, sheet)
    derive_pull(question, found, sheet)
    if question.lag:
        _with_lag(question, found, sheet)
    else:
        _on_policy(question, found, sheet)
    _idle(found, sheet)
    _money(question, found, sheet)
    return sheet


def _on_policy(question: PlacementQuestion, found: Estimate, sheet: Derivation) -> None:
    first, last = streaming(question)
    sheet.note(
        "seeding_s",
        found.seeding_s,
        "s",
        formula="max(0, (tokens - dedicated * (1 - last) * training_s) / (shared + dedicated))"
        if found.shared_rate
        else "0",
        source="RLBoost's seeding window, arXiv 2510.19225, where neither side waits; none without a shared side",
        tokens=found.tokens,
        shared=found.shared_rate,
        dedicated=found.dedicated_rate,
        last=last,
        training_s=found.training_s,
    )
    sheet.note(
        "generation_s",
        found.generation_s,
        "s",
        formula="max((tokens - shared * seeding_s) / dedicated, longest_s)" if found.dedicated_rate else "seeding_s",
        source="what is left is the dedicated side's, and no batch is done before its longest sample",
        tokens=found.tokens,
        shared=found.shared_rate,
        seeding_s=found.seeding_s,
        dedicated=found.dedicated_rate,
        longest_s=found.longest_s,
    )
    sheet.note(
        "step_s",
        found.step_s,
        "s",
        formula="max(max(seeding_s, first * generation_s) + training_s, generation_s + last * training_s) + pull_s",
        source="lag 0: learning goes on while the last samples are generated, if advantages let it; shares assumed",
        seeding_s=found.seeding_s,
        first=first,
        generation_s=found.generation_s,
        training_s=found.training_s,
        last=last,
        pull_s=found.exposed_pull_s,
    )


def _with_lag(question: PlacementQuestion, found: Estimate, sheet: Derivation) -> None:
    sheet.note(
        "step_s",
        found.step_s,
        "s",
        formula="max((tokens + shared * learn) / (shared + dedicated), learn, longest_s / (lag + 1)) + pull",
        source="lag 1 or more: both sides at work all the while; the longest sample has lag + 1 steps",
        tokens=found.tokens,
        shared=found.shared_rate,
        learn=found.training_s,
        dedicated=found.dedicated_rate,
        longest_s=found.longest_s,
        lag=question.lag,
        pull=found.exposed_pull_s,
    )


def _idle(found: Estimate, sheet: Derivation) -> None:
    sheet.note(
        "trainer_idle_share",
        found.trainer_idle,
        "of a step",
        formula="max(0, 1 - (training_s + seeding_s) / step_s)",
        source="what the training GPUs neither learn nor generate",
        training_s=found.training_s,
        seeding_s=found.seeding_s,
        step_s=found.step_s,
    )


def _money(question: PlacementQuestion, found: Estimate, sheet: Derivation) -> None:
    placement = found.placement
    used = [offer for offer, _ in placement.training.group.members]
    used += [engine.offer for engine, _ in placement.dedicated.engines]
    sheet.note(
        "usd_per_hour",
        placement.usd_per_hour,
        "USD",
        formula="training + generating",
        source="; ".join(dict.fromkeys(f"{offer.name}: {offer.machine.price_source}" for offer in used)),
        training=placement.training.group.usd_per_hour,
        generating=placement.dedicated.usd_per_hour,
    )
    sheet.note(
        "usd_per_million_tokens",
        found.usd_per_million,
        "USD",
        formula="usd_per_hour * step_s / seconds_per_hour / tokens * million",
        source="completion tokens trained",
        usd_per_hour=placement.usd_per_hour,
        step_s=found.step_s,
        seconds_per_hour=SECONDS_PER_HOUR,
        tokens=found.tokens,
        million=1e6,
    )
    sheet.note(
        "hours",
        found.hours,
        "h",
        formula="steps * step_s / seconds_per_hour",
        source="every step alike",
        steps=question.steps,
        step_s=found.step_s,
        seconds_per_hour=SECONDS_PER_HOUR,
    )
    sheet.note(
        "cost_usd",
        found.usd,
        "USD",
        formula="usd_per_hour * hours",
        source="of all steps",
        usd_per_hour=placement.usd_per_hour,
        hours=found.hours,
    )
