"""The figures of learning from a batch, each with its formula."""

from __future__ import annotations

from tidemill.planner.figures import Sheet
from tidemill.planner.placement.question import PlacementQuestion
from tidemill.planner.placement.training import Training, learning

MEGATRON = "Megatron-LM, arXiv 1909.08053, two reductions a layer and pass; rings"
FSDP = "PyTorch FSDP, arXiv 2304.11277: layers are gathered in every pass of every microbatch"


def derive_training(question: PlacementQuestion, training: Training, sheet: Sheet) -> None:
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
