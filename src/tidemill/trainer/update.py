"""Optimizer steps, policy loss, minibatches and metrics of one update."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tidemill.algos.corrections import CORRECTIONS, Corrected
from tidemill.algos.kl import MismatchSums, approximate_kl, k3, mismatch, mismatch_by_source, no_mismatch
from tidemill.algos.losses import LOG_RATIO_LIMIT, LOSSES, TokenLoss
from tidemill.algos.user_functions import UserLoss, user_loss
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.learning import OptimizerConfig
from tidemill.core.records import Record, SampleId, SampleUpdate
from tidemill.models.ranks import ONE_RANK, Ranks, is_sharded, local_rows
from tidemill.models.token_tree import build_tree
from tidemill.trainer.packing import Microbatch, WeightedSample


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only (embeddings are matrices).

    Uses the fused implementation if device and dtype support it: it allocates no temporary tensors. Otherwise tensors
    are updated one at a time, with temporaries of the size of the largest.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [  # an implementation updates sharded and whole parameters in separate groups only
        {
            "params": [p for p in trainable if (p.ndim >= 2, is_sharded(p)) == (matrix, sharded)],
            "weight_decay": config.weight_decay if matrix else 0.0,
        }
        for matrix in (True, False)
        for sharded in (True, False)
    ]

    def adamw(*, fused: bool) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            foreach=False,
            fused=fused,
        )

    try:
        return adamw(fused=True)
    except RuntimeError:  # torch has no fused kernel for these parameters
        return adamw(fused=False)


def learning_rate(optimizer_step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of one optimizer step.

    Args:
        optimizer_step: 1-based number of the step.
        total_steps: last step of the schedule.
        config: peak, warm-up, schedule and final ratio.

    Rises linearly to the peak at step `warmup_steps`, then decays from the peak (at step 1 without warm-up) to
    peak × min_learning_rate_ratio at step `total_steps`, where it stays.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if optimizer_step > total_steps and config.schedule != "constant":
        return peak * config.min_learning_rate_ratio
    if optimizer_step <= warmup:
        return peak * optimizer_step / warmup
    if config.schedule == "constant":
        return peak
    start = max(warmup, 1)
    progress = (optimizer_step - start) / (total_steps - start) if total_steps > start else 0.0
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the following steps."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_and_step(
    optimizer: torch.optim.Optimizer, *, scale: float, max_grad_norm: float, ranks: Ranks = ONE_RANK
) -> float:
    """Scale the accumulated gradients, clip them by global norm, and take one optimizer step.

    Args:
        optimizer: the `.grad` of its parameters are sums over the batch; they are changed in place and set to None.
            Those of a parameter that every rank holds as a whole are sums over this rank's part of the batch.
        scale: factor of the gradients, one over the denominator of the sums.
        max_grad_norm: largest global L2 norm after scaling.

    Returns:
        The global norm after scaling, before clipping. If it is not finite, the step was skipped: weights and moments
        are unchanged.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = _global_norm(gradients, ranks) * scale
    if gradients and math.isfinite(norm):
        factor = scale * min(1.0, max_grad_norm / norm) if norm > 0 else scale
        with torch.no_grad():
            if gradients[0].is_cuda:  # a few kernels for all
                torch._foreach_mul_([local_rows(gradient)[0] for gradient in gradients], factor)
            else:
                for gradient in gradients:
                    gradient.mul_(factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _global_norm(gradients: list[Tensor], ranks: Ranks) -> float:
    """L2 norm over all gradients, with one transfer from the device; first sums whole gradients over the ranks."""
    if not gradients:
        return 0.0
    shards = [local_rows(gradient)[0] for gradient in gradients if is_sharded(gradient)]
    whole = [gradient for gradient in gradients if not is_sharded(gradient)]
    for gradient in whole if ranks.size > 1 else ():
        gradient.copy_(ranks.all_sum(gradient))
    total = _squares(whole, gradients[0].device)
    if shards:
        total = total + ranks.all_sum(_squares(shards, gradients[0].device))
    return math.sqrt(total.item())


def own_gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """float64 [], L2 norm over the rows of gradients in this process."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    device = gradients[0].device if gradients else torch.device("cpu")
    return _squares([local_rows(each)[0] for each in gradients], device).sqrt()


def _squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """float64 [], the sum of squares."""
    if gradients and gradients[0].is_cuda:  # a few kernels for all, which add in double
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum()
    # Per row, then in double: a float32 sum over the 28M elements of an embedding has an error of 2e-3.
    squares = [torch.linalg.vector_norm(g, dim=-1 if g.ndim else None).double().square().sum() for g in gradients]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """Loss of a microbatch and per-token results for metrics."""

    loss: Tensor  # [], weighted sum with gradient
    token: TokenLoss
    corrected: Corrected
    kl_T: Tensor | None  # float [T], k3 estimate to the reference, without gradient
    log_ratio_ref_T: Tensor | None  # float [T], log(trainer / reference), without gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLosses:
    """The user functions of a configuration."""

    loss: UserLoss | None = None  # replaces the policy loss
    terms: tuple[UserLoss, ...] = ()


def user_losses(algorithm: AlgorithmConfig, *, has_reference: bool) -> UserLosses:
    """Raises UserError: a function does not exist or cannot be called."""
    loss = None
    if algorithm.loss not in LOSSES:
        loss = user_loss(algorithm.loss, "loss", where="algorithm.loss", has_reference=has_reference)
    where = "algorithm.loss_terms"
    terms = tuple(
        user_loss(each.function, "loss_term", where=where, weight=each.weight, has_reference=has_reference)
        for each in algorithm.loss_terms
    )
    return UserLosses(loss=loss, terms=terms)


def policy_outcome(
    algorithm: AlgorithmConfig,
    microbatch: Microbatch,
    logprobs_T: Tensor,
    entropy_T: Tensor,
    *,
    kl_beta: float,
    user: UserLosses | None = None,
    step: int = 0,
) -> PolicyOutcome:
    """Loss of a microbatch, Σ weight · (correction · policy loss + KL term - entropy bonus + user terms).

    Args:
        user: the user's functions; a loss replaces the policy loss.
        step: number of the batch, for user functions.
        microbatch: with proximal logprobs.
        logprobs_T: float [T], of the current policy, with gradient.
        entropy_T: float [T] in nats, with gradient if there is an entropy bonus.
        kl_beta: current coefficient of the KL term.
    """
    proximal_T = microbatch.proximal_logprobs
    assert proximal_T is not None, "the proximal logprobs are computed before the loss"
    corrected = _corrected(algorithm, microbatch, proximal_T)
    user = user or UserLosses()
    inputs: dict[str, Any] = {  # of the user's functions; all but `logprobs` are detached
        "logprobs": logprobs_T,
        "proximal_logprobs": proximal_T,
        "rollout_logprobs": microbatch.rollout_logprobs,
        "ref_logprobs": microbatch.ref_logprobs,
        "advantages": microbatch.advantages,
        "mask": ~corrected.masked_T,
        "sample_index": microbatch.samples.index_T,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "step": step,
    }
    if user.loss:  # no token counts as clipped
        ratio_T = torch.exp((logprobs_T.detach() - proximal_T).clamp(max=LOG_RATIO_LIMIT))
        unclipped_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        token = TokenLoss(loss_T=user.loss(inputs), clipped_T=unclipped_T, ratio_T=ratio_T)
    else:
        row = LOSSES[algorithm.loss]
        samples = {"samples": microbatch.samples} if row.by_sample else {}
        settings = {name: getattr(algorithm, name) for name in row.settings}
        token = row.function(logprobs_T, proximal_T, microbatch.advantages, **samples, **settings)
    loss_T = corrected.weights_T * token.loss_T
    kl_T = None
    if microbatch.ref_logprobs is not None:
        kl_T = k3(logprobs_T, microbatch.ref_logprobs)
        if kl_beta and algorithm.kl_in == "loss":
            factor_T = torch.exp(logprobs_T - proximal_T) * corrected.weights_T if algorithm.kl_ratio else 1.0
            loss_T = loss_T + kl_beta * factor_T * kl_T
    if algorithm.entropy_bonus:
        loss_T = loss_T - algorithm.entropy_bonus * entropy_T
    for term in user.terms:
        loss_T = loss_T + term.weight * term(inputs)
    return PolicyOutcome(
        loss=(microbatch.weights * loss_T).sum(),
        token=token,
        corrected=corrected,
        kl_T=None if kl_T is None else kl_T.detach(),
        log_ratio_ref_T=None if microbatch.ref_logprobs is None else logprobs_T.detach() - microbatch.ref_logprobs,
    )


def _corrected(algorithm: AlgorithmConfig, microbatch: Microbatch, proximal_T: Tensor) -> Corrected:
    config = algorithm.correction
    row = CORRECTIONS[config.kind]
    if config.kind == "none":  # rollout logprobs may be missing
        log_ratio = torch.zeros_like(proximal_T)
    elif config.kind == "mu_step":
        # The last published version is the trainer's own. With recomputed proximal logprobs the last factor is 1 for
        # tokens generated before that publish, and the whole ratio for tokens generated after it.
        chain_KT = torch.cat([microbatch.rollout_logprobs[None], microbatch.publish_logprobs, proximal_T[None]])
        log_ratio = chain_KT.diff(dim=0)
    else:
        log_ratio = proximal_T - microbatch.rollout_logprobs
    return row.function(log_ratio, microbatch.samples, **{name: getattr(config, name) for name in row.limits})


@dataclass(slots=True)
class Minibatch:
    """The groups of one optimizer step. `pending` collects samples until the token budget of a microbatch is full."""

    denominator: int = 0  # of the summed gradients
    pending: list[WeightedSample] = field(default_factory=list)
    pending_tokens: int = 0
    round: list[list[WeightedSample]] = field(default_factory=list)  # of each rank, not computed yet
    microbatches: list[Microbatch] = field(default_factory=list)

    def add(self, samples: list[WeightedSample], budget: int) -> list[WeightedSample]:
        """Add samples of one group; returns the pending samples if these would exceed the budget, else []."""
        size = build_tree([ids for sample in samples for ids in sample.input_ids]).size
        full = self.flush() if self.pending_tokens + size > budget else []
        self.pending.extend(samples)
        self.pending_tokens += size
        return full

    def flush(self) -> list[WeightedSample]:
        """Remove and return the pending samples."""
        samples = self.pending
        self.pending = []
        self.pending_tokens = 0
        return samples


_SUMS_OF_MICROBATCHES = (
    "tokens_trained",
    "tokens_packed",
    "pairs_packed",
    "tokens_unpacked",
    "clipped",
    "truncated",
    "masked",
    "entropy",
    "approx_kl",
    "kl_ref_k1",
    "kept_cache_kl",
    "kept_cache_tokens",
)


def sample_update(sample: WeightedSample, *, signal: bool) -> SampleUpdate:
    """What is logged of a sample's advantage.

    Args:
        signal: whether its group has a reward signal.
    """
    per_token = np.atleast_1d(np.asarray(sample.advantage, np.float32))
    differ = per_token.min() < per_token.max()
    return SampleUpdate(
        sample_id=sample.trajectory.sample_id,
        advantage=float(per_token.mean()) if differ else float(per_token[0]),
        token_advantages=per_token.tobytes() if differ else b"",
        signal=signal,
    )


class _RankSums(Record):
    """Sums over the microbatches of one rank."""

    sums: dict[str, float]
    kl_ref: float | None
    mismatch: list[float]
    mismatch_of: list[tuple[str, str, list[float]]]
    tokens_by_lag: dict[int, int]
    cpu_s: float
    grad_norm: float
    details: list[tuple[SampleId, tuple[bytes, bytes]]]


@dataclass(slots=True)
class UpdateSums:
    """Sums over a batch, transferred from the device and reduced to metrics once."""

    groups_without_signal: int = 0
    groups_skipped_invalid: int = 0
    tokens_trained: int = 0
    tokens_packed: int = 0  # computed in forward passes with gradient
    pairs_packed: int = 0  # pairs of tokens within one pass (tokens²)
    tokens_unpacked: int = 0  # tokens to compute without prefix sharing
    clipped: float = 0.0
    truncated: float = 0.0  # tokens whose correction weight was truncated
    masked: float = 0.0  # tokens masked by the correction
    entropy: float = 0.0
    approx_kl: float = 0.0
    kl_ref: float | None = None  # None without a reference
    kl_ref_k1: float = 0.0
    kl_beta: float = 0.0  # coefficient of this batch
    loss: float = 0.0
    optimizer_steps: int = 0
    steps_skipped_nonfinite: int = 0
    minibatches_dropped: int = 0
    grad_norm: float = 0.0
    own_grad_norm: float = 0.0  # of the rows of this rank, before scaling
    learning_rate: float = 0.0
    train_s: float = 0.0
    cpu_s: float = 0.0  # CPU time within train_s
    mismatch: MismatchSums = field(default_factory=no_mismatch)
    kept_cache_kl: float = 0.0  # of `mismatch`, the KL of tokens sampled from kept caches
    kept_cache_tokens: int = 0
    # By engine and worker, and lease: Σ KL and tokens, float64 [2], without those from kept caches.
    mismatch_of: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    tokens_by_lag: Counter[int] = field(default_factory=Counter)
    of_ranks: dict[str, dict[str, float]] = field(default_factory=dict)  # see `StepMetrics.ranks`
    details: dict[SampleId, tuple[bytes, bytes]] = field(default_factory=dict)  # logprobs and entropies, float32 [T]
    # The host does not wait for each microbatch: until `to_host`, float64 [] by field, and details as float32 [2, T].
    on_device: dict[str, Tensor] = field(default_factory=dict)
    details_on_device: dict[SampleId, Tensor] = field(default_factory=dict)
    critic: list[dict[str, float]] = field(default_factory=list)  # metrics of each critic step
    critic_wait_s: float | None = None  # None unless the critic runs in another process

    def add(self, name: str, value: Tensor) -> None:
        """Add to the field `name` a number [] on the device."""
        self.on_device[name] = value.double() + self.on_device.get(name, 0.0)

    def to_host(self) -> None:
        """Transfer what is on the device, at once."""
        if sums := self.on_device:
            device = next(iter(sums.values())).device  # with trainer.offload norms are on the CPU
            values = torch.stack([each.to(device) for each in sums.values()]).tolist()
            for name, value in zip(sums, values, strict=True):
                setattr(self, name, (getattr(self, name) or 0.0) + value)
        if details := self.details_on_device:
            parts = torch.cat(list(details.values()), 1).cpu().split([each.shape[1] for each in details.values()], 1)
            for sample_id, (logprobs, entropies) in zip(details, parts, strict=True):
                self.details[sample_id] = logprobs.numpy().tobytes(), entropies.numpy().tobytes()
        self.on_device, self.details_on_device = {}, {}

    def add_rollout(self, microbatch: Microbatch, logprobs_T: Tensor) -> None:
        """Add lags and importance ratios of a microbatch, once, with logprobs from the start of the update."""
        self.tokens_by_lag += microbatch.tokens_by_lag
        rollout_T, source_T = microbatch.rollout_logprobs, microbatch.source_rows
        if microbatch.has_rollout_logprobs:
            self.mismatch += mismatch(rollout_T, logprobs_T)
            if microbatch.kept_cache is not None:
                kept, fresh = microbatch.kept_cache
                of_kept = mismatch(rollout_T[kept], logprobs_T[kept])
                self.add("kept_cache_kl", of_kept.kl)
                self.kept_cache_tokens += of_kept.tokens
                # A worker that kept more caches than others is not sick.
                rollout_T, logprobs_T, source_T = rollout_T[fresh], logprobs_T[fresh], source_T[fresh]
            sums = mismatch_by_source(rollout_T, logprobs_T, source_T, len(microbatch.sources))
            for source, of_source in zip(microbatch.sources, sums.unbind(1), strict=True):
                if source[0]:
                    self.mismatch_of[source] = self.mismatch_of.get(source, 0) + of_source

    def add_backward(
        self, microbatch: Microbatch, outcome: PolicyOutcome, logprobs_T: Tensor, entropy_T: Tensor
    ) -> None:
        """Add the statistics of one backward pass over a microbatch."""
        assert microbatch.proximal_logprobs is not None
        kl_T = approximate_kl(logprobs_T, microbatch.proximal_logprobs)
        terms = {
            "clipped": outcome.token.clipped_T,
            "truncated": outcome.corrected.truncated_T,
            "masked": outcome.corrected.masked_T,
            "entropy": entropy_T.detach(),
            "approx_kl": kl_T,
            "kl_ref": outcome.kl_T,
            "kl_ref_k1": outcome.log_ratio_ref_T,
        }
        for name, terms_T in terms.items():
            if terms_T is not None:
                self.add(name, terms_T.sum())
        self.tokens_trained += microbatch.tokens
        self.tokens_packed += microbatch.tree.size
        self.pairs_packed += microbatch.tree.size**2
        self.tokens_unpacked += microbatch.unpacked_tokens

    def add_details(self, microbatch: Microbatch, logprobs_T: Tensor, entropy_T: Tensor) -> None:
        """Keep the logprobs and entropies of the microbatch's chosen samples; those of later epochs do not count."""
        for sample_id, places in microbatch.detailed:
            if sample_id not in self.details_on_device:
                both = torch.stack([logprobs_T[places], entropy_T.detach()[places]]).float()
                self.details_on_device[sample_id] = both

    def add_ranks(self, ranks: Ranks) -> None:
        """Add the sums over microbatches of the other ranks, in the order of the ranks."""
        self.to_host()
        if ranks.size == 1:
            return
        sums = {name: getattr(self, name) for name in _SUMS_OF_MICROBATCHES}
        mismatch_of = [(*source, each.tolist()) for source, each in self.mismatch_of.items()]
        own = _RankSums(
            sums=sums,
            kl_ref=self.kl_ref,
            mismatch=self.mismatch.as_list(),
            mismatch_of=mismatch_of,
            tokens_by_lag=dict(self.tokens_by_lag),
            cpu_s=self.cpu_s,
            grad_norm=self.own_grad_norm,
            details=list(self.details.items()),
        )
        parts = [msgspec.msgpack.decode(part, type=_RankSums) for part in ranks.gather(msgspec.msgpack.encode(own))]
        for name in _SUMS_OF_MICROBATCHES:
            setattr(self, name, sum(part.sums[name] for part in parts))
        self.details = dict(each for part in parts for each in part.details)
        known = [part.kl_ref for part in parts if part.kl_ref is not None]
        self.kl_ref = sum(known) if known else None
        mismatches = [MismatchSums.from_list(part.mismatch) for part in parts]
        self.mismatch = reduce(operator.add, mismatches)
        for index, (part, of_rank) in enumerate(zip(parts, mismatches, strict=True)):
            kl = float(of_rank.kl) / max(of_rank.tokens, 1)
            self.of_ranks[f"rank {index}"] = {"cpu_s": part.cpu_s, "grad_norm": part.grad_norm, "mismatch_kl": kl}
        self.mismatch_of, self.tokens_by_lag = {}, Counter()
        for part in parts:
            self.tokens_by_lag += Counter(part.tokens_by_lag)
            for source, lease, figures in part.mismatch_of:
                of_source = torch.tensor(figures, dtype=torch.float64)
                self.mismatch_of[source, lease] = self.mismatch_of.get((source, lease), 0) + of_source

    def values(self) -> dict[str, float]:
        """Metrics by name, see docs/reference/metrics.md. Means over zero tokens or steps are omitted."""
        self.to_host()
        values: dict[str, float] = {
            "groups_without_signal": self.groups_without_signal,
            "groups_skipped_invalid": self.groups_skipped_invalid,
            "tokens_trained": self.tokens_trained,
            "tokens_packed": self.tokens_packed,
            "pairs_packed": self.pairs_packed,
            "tokens_unpacked": self.tokens_unpacked,
            "optimizer_steps_skipped": self.steps_skipped_nonfinite,
            "minibatches_dropped": self.minibatches_dropped,
            "time_train_s": self.train_s,
            "cpu_train_s": self.cpu_s,
        }
        if self.kl_beta:
            values["kl_beta"] = self.kl_beta
        if self.critic_wait_s is not None:
            values["time_critic_wait_s"] = self.critic_wait_s
        if self.tokens_by_lag:
            tokens = self.tokens_by_lag.total()
            values["policy_lag_mean"] = sum(lag * count for lag, count in self.tokens_by_lag.items()) / tokens
            values["policy_lag_max"] = float(max(self.tokens_by_lag))
            values |= {f"lag/{lag}": count / tokens for lag, count in sorted(self.tokens_by_lag.items())}
        values |= self.mismatch.reduce() | self._mismatch_by_source()
        if self.kept_cache_tokens:
            values["mismatch_kl_kept_cache"] = self.kept_cache_kl / self.kept_cache_tokens
            values["kept_cache_fraction"] = self.kept_cache_tokens / self.mismatch.tokens
        if self.tokens_trained:
            values |= self._token_means()
        if self.optimizer_steps:
            values |= {
                "loss": self.loss / self.optimizer_steps,
                "grad_norm": self.grad_norm / self.optimizer_steps,
                "learning_rate": self.learning_rate,
            }
        critic_names = dict.fromkeys(name for step in self.critic for name in step)
        return values | {name: fmean(step[name] for step in self.critic if name in step) for name in critic_names}

    def mismatch_by_lease(self) -> dict[str, tuple[float, float]]:
        """See `StepMetrics.mismatch`."""
        return {lease: (float(sums[0]), float(sums[1])) for (_, lease), sums in self.mismatch_of.items() if lease}

    def _mismatch_by_source(self) -> dict[str, float]:
        """By engine, and by engine and worker; empty if one worker generated everything."""
        if len({source for source, _ in self.mismatch_of}) < 2:
            return {}
        sums: dict[str, Tensor] = {}
        for (source, _), of_lease in self.mismatch_of.items():
            for name in (source, source.partition("/")[0]):
                sums[name] = sums.get(name, 0) + of_lease
        values: dict[str, float] = {}
        for name, of_source in sorted(sums.items()):
            kl, tokens = of_source.tolist()
            if tokens:
                values |= {f"mismatch_kl/{name}": kl / tokens, f"mismatch_tokens/{name}": tokens}
        return values

    def _token_means(self) -> dict[str, float]:
        tokens = self.tokens_trained
        means = {
            "entropy": self.entropy / tokens,
            "approx_kl": self.approx_kl / tokens,
            "clip_fraction": self.clipped / tokens,
            "correction_truncated": self.truncated / tokens,
            "correction_masked": self.masked / tokens,
        }
        if self.kl_ref is None:
            return means
        return means | {"kl_ref": self.kl_ref / tokens, "kl_ref_k1": self.kl_ref_k1 / tokens}
