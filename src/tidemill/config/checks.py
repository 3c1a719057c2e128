"""Faults that depend on what a run is for: training needs more of a configuration than trying a prompt."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.config.faults import ConfigError, Fault
from tidemill.config.schema import RunSpec

Purpose: TypeAlias = Literal["train", "eval", "generate", "read"]
"""What a configuration is loaded for; "read" only wants to know what it says."""


def refuse_untrainable(spec: RunSpec) -> None:
    """Raises ConfigError if training on `spec` could not work or would optimise something else than it says."""
    if faults := contradictions(spec, "train"):
        raise ConfigError(faults)


def contradictions(spec: RunSpec, purpose: Purpose) -> list[Fault]:
    """What is wrong with `spec` for this purpose, beyond what is wrong with it for any."""
    faults = list[Fault]()
    if purpose in ("train", "generate", "eval"):
        faults += _context_faults(spec, purpose)
    if purpose == "eval" and spec.eval.samples_per_prompt > 1 and spec.sampling.temperature == 0:
        what = f"0 is greedy: all {spec.eval.samples_per_prompt} samples of a prompt would be the same"
        faults.append(
            Fault(key="sampling.temperature", what=what, cure="set it above 0, or eval.samples_per_prompt to 0")
        )
    if purpose == "train":
        faults += _sampling_faults(spec) + _batch_faults(spec)
    return faults


def _context_faults(spec: RunSpec, purpose: Purpose) -> list[Fault]:
    limits = {"sampling.max_new_tokens": spec.sampling.max_new_tokens}
    if purpose != "generate":
        limits["eval.max_new_tokens"] = spec.eval.max_new_tokens
    context = spec.model.char.context
    return [
        Fault(
            key=name,
            what=f"{limit} new tokens leave no room for a prompt in the model's {context} (model.char.context)",
            cure=f"lower {name} or raise model.char.context",
        )
        for name, limit in limits.items()
        if spec.model.source == "char" and limit >= context
    ]


def _sampling_faults(spec: RunSpec) -> list[Fault]:
    sampling, faults = spec.sampling, []
    why = "the loss takes importance ratios over the whole vocabulary, and a cut-off distribution is another one"
    if sampling.top_p < 1:
        cure = "set sampling.top_p = 1 (evaluation is greedy in any case)"
        faults.append(Fault(key="sampling.top_p", what=f"{sampling.top_p} cannot be trained on: {why}", cure=cure))
    if sampling.top_k > 0:
        cure = "set sampling.top_k = 0 (evaluation is greedy in any case)"
        faults.append(Fault(key="sampling.top_k", what=f"{sampling.top_k} cannot be trained on: {why}", cure=cure))
    if sampling.temperature == 0:
        what = "0 is greedy: every sample of a group would be the same and none better than its siblings"
        faults.append(Fault(key="sampling.temperature", what=what, cure="set it above 0, usually to 1"))
    return faults


def _batch_faults(spec: RunSpec) -> list[Fault]:
    faults = []
    if spec.batch.microbatch_tokens < spec.sampling.max_new_tokens:
        what = (
            f"{spec.batch.microbatch_tokens} tokens cannot hold one completion of "
            f"sampling.max_new_tokens = {spec.sampling.max_new_tokens}, let alone its prompt"
        )
        cure = "raise batch.microbatch_tokens well above it, or lower sampling.max_new_tokens"
        faults.append(Fault(key="batch.microbatch_tokens", what=what, cure=cure))
    if not any(reward.weight for reward in spec.scoring.rewards):
        what = "every weight is 0, so that all samples score alike and nothing is learned"
        faults.append(Fault(key="scoring.rewards", what=what, cure="give at least one reward a weight"))
    return faults
