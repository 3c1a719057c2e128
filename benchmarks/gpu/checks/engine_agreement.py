"""The embedded engine: its logprobs against transformers and against the trainer, repeated runs, other batches.

Between engine and trainer, both in bf16, logprobs differ by rounding: of the logits, and of the residual stream, which
only the trainer keeps in fp32. The limit is transformers' own difference between these two ways to compute.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from benchmarks.gpu.checks.noise import numpy_gumbel
from benchmarks.gpu.checks.reference import FP32, OWN, OWN_ERROR, in_dtype, reference, reference_logprobs, sharp_model
from benchmarks.gpu.engine import FIRST, no_text
from benchmarks.gpu.engine import requests as requests_of
from benchmarks.gpu.qwen_shapes import TINY
from benchmarks.gpu.train_step import tree_logprobs, tree_of
from tidemill.core.records import GenerateRequest, SampleId, unpack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.rollout.sampling import noise_key

if TYPE_CHECKING:
    from tidemill.rollout.engines.embedded.static_decode import StepKernels

SLOTS = 32
COMPARED = 8
"""Samples that are computed again, one by one."""
USUAL = 0.02
"""Standard deviation of weights at the start of training."""
TARGET = "target of the project: from transformers with weights rounded alike"
OTHER_DRAWS = 0.01
"""Largest share of tokens, in fp32, that are not the argmax of the reference's logits plus NumPy's noise."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What an engine reported, by sample."""

    tokens: Mapping[SampleId, Sequence[int]]
    logprobs: Mapping[SampleId, Sequence[float]]

    def differing(self, other: Generated) -> int:
        """Samples of which any token or any bit of a logprob is another."""
        return sum(
            self.tokens[each] != other.tokens[each] or self.logprobs[each] != other.logprobs[each]
            for each in self.tokens
        )

    def first_difference(self, other: Generated) -> tuple[int, float] | None:
        """The earliest token of any sample that differs in any bit, and by how much its logprob does."""
        differences = [
            (place, abs(own - others))
            for each in self.tokens
            for place, (own, others) in enumerate(zip(self.logprobs[each], other.logprobs[each], strict=True))
            if own != others
        ]
        return min(differences, default=None)


def engine_agreement(rows: CheckRows) -> None:
    usual = sharp_model(rows.settings, scale=USUAL)
    for dtype, mean, most in ((torch.float32, 1e-4, 1e-4), (torch.bfloat16, 2e-2, 0.2)):
        limits = [Limit("mean", mean, TARGET), Limit("max", most, TARGET)]
        name = f"{str(dtype).removeprefix('torch.')}, weights as at the start of training"
        rows.measure(name, partial(_generates, rows.settings, usual, dtype, fixed=False), limits)
    limits = [*limits, Limit("mismatch_kl", 1e-3, TARGET)]
    rows.measure(f"{name}, against the trainer", partial(_against_trainer, rows.settings, usual), limits)
    model = sharp_model(rows.settings)
    for dtype in (torch.float32, torch.bfloat16):
        limits = [Limit("mean_to_own_error", OWN_ERROR[dtype], OWN)]
        if dtype == torch.float32:
            limits += [Limit("max", FP32, "order of sums"), Limit("other_draws", OTHER_DRAWS, "near ties")]
        for fixed in (False, True):
            name = f"{str(dtype).removeprefix('torch.')}{', batch-invariant' if fixed else ''}"
            repeats = [Limit("repeated_differ", 0, "the same requests in the same order")]
            if fixed:
                repeats.append(Limit("other_batch_differ", 0, "engine.batch_invariant"))
            rows.measure(name, partial(_generates, rows.settings, model, dtype, fixed=fixed), [*limits, *repeats])
    rows.measure(
        "bfloat16, against the trainer",
        partial(_against_trainer, rows.settings, model),
        [
            Limit(
                "mean_to_own_error",
                OWN_ERROR[torch.bfloat16],
                "transformers: bf16 weights against autocast over fp32 weights",
            )
        ],
    )
    rows.measure("rounding of logits", partial(_rounded_logits, rows.settings, model))


def _asked(settings: Settings) -> list[GenerateRequest]:
    groups, size, prompt, new_tokens = (2, 3, 12, 8) if settings.tiny else (4, 8, 300, 64)
    return requests_of(TINY, groups, size, prompt, new_tokens)  # its tokens are in every vocabulary


def _engine_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    own = in_dtype(model, dtype)
    use_packed_attention(own)
    return own


def generated(
    model: PreTrainedModel, asked: Sequence[GenerateRequest], *, fixed: bool, kernels: StepKernels | None = None
) -> Generated:
    context = max(len(unpack_tokens(each.prompt_ids)) + each.sampling.max_new_tokens for each in asked)
    engine = EmbeddedEngine(
        model,
        decode=no_text,
        slots=SLOTS,
        context=context,
        version=FIRST,
        batch_invariant=fixed,
        kernels=kernels,
    )
    engine.submit(asked)
    tokens: dict[SampleId, list[int]] = {}
    logprobs: dict[SampleId, list[float]] = {}
    left = len(asked)
    while left:
        for delta in engine.poll(1.0):
            tokens.setdefault(delta.sample_id, []).extend(unpack_tokens(delta.token_ids))
            logprobs.setdefault(delta.sample_id, []).extend(np.frombuffer(delta.logprobs, np.float32).tolist())
            left -= delta.finish is not None
    return Generated(tokens=tokens, logprobs=logprobs)


def _generates(settings: Settings, model: PreTrainedModel, dtype: torch.dtype, *, fixed: bool) -> dict[str, Any]:
    asked, own = _asked(settings), _engine_model(model, dtype)
    first = generated(own, asked, fixed=fixed)
    found: dict[str, Any] = {"repeated_differ": first.differing(generated(own, asked, fixed=fixed))}
    if fixed:
        alone = generated(own, asked[::-3], fixed=True)  # a third of the samples, in another order
        found["other_batch_differ"] = alone.differing(first)
        found["first_difference"] = alone.first_difference(first)
    rounded_model = in_dtype(model, dtype)  # not from `own`, which the engine may have spoilt
    plain, same_dtype = reference(in_dtype(rounded_model, torch.float64)), reference(rounded_model)
    gaps, own_gaps, other_draws = list[torch.Tensor](), list[torch.Tensor](), 0
    for request in asked[:: max(1, len(asked) // COMPARED)]:
        prompt = unpack_tokens(request.prompt_ids)
        sequence = [*prompt, *first.tokens[request.sample_id]]
        with torch.no_grad():
            expected = reference_logprobs(plain, sequence, len(prompt)).cpu()
            rounded = reference_logprobs(same_dtype, sequence, len(prompt)).cpu()
        gaps.append((expected - torch.tensor(first.logprobs[request.sample_id])).abs())
        own_gaps.append((expected - rounded).abs())
        if dtype == torch.float32:
            other_draws += _other_draws(plain, sequence, len(prompt), request)
    gap, own_gap = torch.cat(gaps), torch.cat(own_gaps)
    found |= {"max": float(gap.max()), "mean": float(gap.mean()), "own_error_mean": float(own_gap.mean())}
    found["mean_to_own_error"] = found["mean"] / found["own_error_mean"]
    if dtype == torch.float32:
        found["other_draws"] = other_draws / gap.numel()
    return {**found, "tokens": gap.numel()}


@torch.no_grad()
def _other_draws(model: PreTrainedModel, sequence: Sequence[int], prompt: int, request: GenerateRequest) -> int:
    """Tokens that the reference would not have drawn with the noise of the sample and their position."""
    ids = torch.tensor([list(sequence)], device=model.device)
    logits = model(ids, use_cache=False).logits[0, prompt - 1 : -1].cpu().double().numpy()
    seed = request.sample_id.seed(request.branch)
    keys = [noise_key(seed, position - 1) for position in range(prompt, len(sequence))]
    noise = np.stack([numpy_gumbel(key, logits.shape[1]) for key in keys])
    return int(((logits + noise).argmax(-1) != np.array(sequence[prompt:])).sum())


def _against_trainer(settings: Settings, model: PreTrainedModel) -> dict[str, Any]:
    """Engine in bf16 and trainer in bf16 over fp32 weights, on what the engine generated."""
    asked = _asked(settings)
    samples_of = generated(_engine_model(model, torch.bfloat16), asked, fixed=False)
    prompt = len(unpack_tokens(asked[0].prompt_ids))
    sequences = [[*unpack_tokens(each.prompt_ids), *samples_of.tokens[each.sample_id]] for each in asked]
    rollout = torch.tensor([list(samples_of.logprobs[each.sample_id]) for each in asked])
    samples = np.array(sequences, np.int32)
    trained = copy.deepcopy(model)
    use_packed_attention(trained)
    forward = TreeForward(trained, autocast=torch.bfloat16, device=settings.device)
    with torch.no_grad():
        (computed,) = tree_logprobs(forward, [samples], [tree_of(samples, share=True)], prompt, settings.device)
    ratio = computed.cpu().double() - rollout.double()
    gap = ratio.abs()
    found = {"max": float(gap.max()), "mean": float(gap.mean()), "mismatch_kl": float((ratio.exp() - 1 - ratio).mean())}
    plain, rounded = reference(copy.deepcopy(model)), reference(in_dtype(model, torch.bfloat16))
    own_gaps = list[torch.Tensor]()
    with torch.no_grad():
        for sequence in sequences[:: max(1, len(sequences) // COMPARED)]:
            with torch.autocast(settings.device.type, torch.bfloat16):
                trainer_side = reference_logprobs(plain, sequence, prompt)
            own_gaps.append((trainer_side - reference_logprobs(rounded, sequence, prompt)).abs())
    own = float(torch.cat(own_gaps).mean())
    return {**found, "own_error_mean": own, "mean_to_own_error": found["mean"] / own}


def _rounded_logits(settings: Settings, model: PreTrainedModel) -> dict[str, Any]:
    """How much of it is the rounding of logits to bf16 before the softmax: everything else in fp32."""
    plain = reference(copy.deepcopy(model))
    request = _asked(settings)[0]
    ids = torch.tensor([unpack_tokens(request.prompt_ids)], device=settings.device)
    with torch.no_grad():
        logits = plain(ids, use_cache=False).logits[0].float()
    exact, rounded = torch.log_softmax(logits, -1), torch.log_softmax(logits.bfloat16().float(), -1)
    weighted = (exact.exp() * (exact - rounded).abs()).sum(-1)
    return {"mean_logprob_difference": float(weighted.mean()), "max_logit": float(logits.abs().max())}
