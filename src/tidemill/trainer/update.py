"""One update: minibatches of microbatches, the loss of each, and the sums behind the metrics."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn

from tidemill.algos.corrections import CORRECTIONS, Corrected
from tidemill.algos.kl import MismatchSums, approximate_kl, k3, mismatch, no_mismatch
from tidemill.algos.losses import LOSSES, TokenLoss
from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.learning import OptimizerConfig
from tidemill.trainer.packing import Microbatch, Weighted, packed_size


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only (embeddings are matrices).

    The fused implementation is taken where the parameters' device and type allow: it needs no temporaries the size of
    a tensor. Elsewhere one tensor is updated at a time, which needs temporaries of the largest one.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
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
    except RuntimeError:  # how torch says that it has no fused kernel for these
        return adamw(fused=False)


def learning_rate(optimizer_step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of one optimizer step.

    Args:
        optimizer_step: 1-based number of the step about to be taken.
        total_steps: number of the run's last step; later ones stay at its rate.
        config: peak, warm-up, schedule and final ratio.

    Warm-up rises linearly to the peak at step `warmup_steps`; the schedule then falls from the peak there (at step 1
    without warm-up) to peak × min_learning_rate_ratio at step `total_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if optimizer_step <= warmup:
        return peak * optimizer_step / warmup
    if config.schedule == "constant":
        return peak
    start = max(warmup, 1)
    progress = min((optimizer_step - start) / (total_steps - start), 1.0) if total_steps > start else 0.0
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_and_step(optimizer: torch.optim.Optimizer, *, scale: float, max_grad_norm: float) -> float:
    """Normalise the accumulated gradients, clip them to a global norm, and take one optimizer step.

    Args:
        optimizer: its parameters' `.grad` hold sums over the batch. They are changed in place, never copied, and gone
            (None) afterwards.
        scale: multiplies every gradient first: one over what the sums are to be divided by.
        max_grad_norm: the largest global L2 norm after scaling.

    Returns:
        The global norm after scaling, before clipping. When it is not finite the step was skipped: weights and
        moments are as before, and the caller counts it.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = _global_norm(gradients) * scale
    if gradients and math.isfinite(norm):
        factor = scale * min(1.0, max_grad_norm / norm) if norm > 0 else scale
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _global_norm(gradients: list[Tensor]) -> float:
    """L2 norm over all gradients, read from the device once."""
    if not gradients:
        return 0.0
    # Row by row, then in double: one float32 sum over an embedding's 28M elements is off by 2e-3.
    squares = [torch.linalg.vector_norm(g, dim=-1 if g.ndim else None).double().square().sum() for g in gradients]
    return math.sqrt(torch.stack(squares).sum().item())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """The weighted sum to be differentiated, and what is told of its tokens."""

    loss: Tensor  # [], with gradient
    token: TokenLoss
    corrected: Corrected
    kl_T: Tensor | None  # float [T], k3 to the reference, without gradient
    log_ratio_ref_T: Tensor | None  # float [T], log(trainer / reference), without gradient


def policy_outcome(
    algorithm: AlgorithmConfig, microbatch: Microbatch, logprobs_T: Tensor, entropy_T: Tensor, *, kl_beta: float
) -> PolicyOutcome:
    """Loss of a microbatch whose proximal logprobs are known: Σ weight · (correction · policy loss + KL - entropy).

    Args:
        logprobs_T: float [T], now, with gradient.
        entropy_T: float [T] in nats, with gradient where there is a bonus on it.
        kl_beta: the present coefficient of the KL term.
    """
    proximal_T = microbatch.proximal_logprobs
    assert proximal_T is not None, "the proximal logprobs are measured before the loss"
    token = _token_loss(algorithm, microbatch, logprobs_T, proximal_T)
    corrected = _corrected(algorithm, microbatch, proximal_T)
    loss_T = corrected.weights_T * token.loss_T
    kl_T = None
    if microbatch.ref_logprobs is not None:
        kl_T = k3(logprobs_T, microbatch.ref_logprobs)
        if kl_beta and algorithm.kl_in == "loss":
            ratio_T = torch.exp(logprobs_T - proximal_T) * corrected.weights_T if algorithm.kl_ratio else 1.0
            loss_T = loss_T + kl_beta * ratio_T * kl_T
    if algorithm.entropy_bonus:
        loss_T = loss_T - algorithm.entropy_bonus * entropy_T
    return PolicyOutcome(
        loss=(microbatch.weights * loss_T).sum(),
        token=token,
        corrected=corrected,
        kl_T=None if kl_T is None else kl_T.detach(),
        log_ratio_ref_T=None if microbatch.ref_logprobs is None else logprobs_T.detach() - microbatch.ref_logprobs,
    )


def _token_loss(
    algorithm: AlgorithmConfig, microbatch: Microbatch, logprobs_T: Tensor, proximal_T: Tensor
) -> TokenLoss:
    row = LOSSES[algorithm.loss]
    samples = {"samples": microbatch.samples} if row.by_sample else {}
    settings = {name: getattr(algorithm, name) for name in row.settings}
    return row.function(logprobs_T, proximal_T, microbatch.advantages, **samples, **settings)


def _corrected(algorithm: AlgorithmConfig, microbatch: Microbatch, proximal_T: Tensor) -> Corrected:
    config = algorithm.correction
    row = CORRECTIONS[config.kind]
    if config.kind == "none":  # rollout logprobs may be missing
        log_ratio = torch.zeros_like(proximal_T)
    elif config.kind == "mu_step":
        # The last that was published is the trainer's own: where proximal logprobs are recomputed, the last factor is 1
        # for the tokens it was asked about, and the whole ratio for those made since.
        chain_KT = torch.cat([microbatch.rollout_logprobs[None], microbatch.publish_logprobs, proximal_T[None]])
        log_ratio = chain_KT.diff(dim=0)
    else:
        log_ratio = proximal_T - microbatch.rollout_logprobs
    return row.function(log_ratio, microbatch.samples, **{name: getattr(config, name) for name in row.limits})


@dataclass(slots=True)
class Minibatch:
    """The groups of one optimizer step. Samples wait in `open` until the token budget of a microbatch is full."""

    groups: int = 0
    denominator: int = 0  # what the summed gradients are divided by
    open: list[Weighted] = field(default_factory=list)
    open_tokens: int = 0
    microbatches: list[Microbatch] = field(default_factory=list)

    def add(self, samples: list[Weighted], budget: int) -> list[Weighted]:
        """Take samples that belong together; returns the earlier ones when the budget says that they are full."""
        size = packed_size(samples)
        full = self.open if self.open and self.open_tokens + size > budget else []
        if full:
            self.open, self.open_tokens = [], 0
        self.open.extend(samples)
        self.open_tokens += size
        return full

    def close(self) -> list[Weighted]:
        """What is still open, when no more groups will come."""
        rest, self.open, self.open_tokens = self.open, [], 0
        return rest


@dataclass(slots=True)
class UpdateSums:
    """Figures that add up over a batch and are reduced once."""

    groups_without_signal: int = 0
    groups_skipped_invalid: int = 0
    tokens_trained: int = 0
    tokens_packed: int = 0  # computed in forward passes with gradient
    pairs_packed: int = 0  # of tokens within one such pass
    tokens_unpacked: int = 0  # what they would have been without sharing
    clipped: float = 0.0
    truncated: float = 0.0  # tokens whose weight a correction held at a limit
    masked: float = 0.0  # tokens that a correction left out
    entropy: float = 0.0
    approx_kl: float = 0.0
    kl_ref: float | None = None  # None without a reference
    kl_ref_k1: float = 0.0
    kl_beta: float = 0.0  # the coefficient that the batch was learned with
    loss: float = 0.0
    optimizer_steps: int = 0
    steps_skipped_nonfinite: int = 0
    minibatches_dropped: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    train_s: float = 0.0
    cpu_s: float = 0.0  # of that, on a processor
    mismatch: MismatchSums = field(default_factory=no_mismatch)
    tokens_by_lag: Counter[int] = field(default_factory=Counter)
    critic: list[dict[str, float]] = field(default_factory=list)  # of each of its steps
    critic_wait_s: float | None = None  # for a critic elsewhere; None where it computes here

    def first_sight(self, microbatch: Microbatch, logprobs_T: torch.Tensor) -> None:
        """What is told of a microbatch once, of logprobs as good as those at the start of the update."""
        self.tokens_by_lag += microbatch.tokens_by_lag
        if not bool(microbatch.rollout_logprobs.isnan().any()):
            self.mismatch += mismatch(microbatch.rollout_logprobs, logprobs_T)

    def learned(
        self, microbatch: Microbatch, outcome: PolicyOutcome, logprobs_T: torch.Tensor, entropy_T: torch.Tensor
    ) -> None:
        """What is told of a microbatch each time it adds a gradient."""
        assert microbatch.proximal_logprobs is not None
        moved_T = approximate_kl(logprobs_T, microbatch.proximal_logprobs)
        self.clipped += float(outcome.token.clipped_T.sum())
        self.truncated += float(outcome.corrected.truncated_T.sum())
        self.masked += float(outcome.corrected.masked_T.sum())
        self.entropy += float(entropy_T.detach().sum())
        self.approx_kl += float(moved_T.sum())
        self.tokens_trained += microbatch.tokens
        self.tokens_packed += microbatch.tree.size
        self.pairs_packed += microbatch.tree.size**2
        self.tokens_unpacked += microbatch.unpacked_tokens
        if outcome.kl_T is not None:
            self.kl_ref = (self.kl_ref or 0.0) + float(outcome.kl_T.sum())
        if outcome.log_ratio_ref_T is not None:
            self.kl_ref_k1 += float(outcome.log_ratio_ref_T.sum())

    def values(self) -> dict[str, float]:
        """Metrics by name; see docs/metrics.md. Of no trained tokens and no optimizer steps there are no means."""
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
            values |= self._lags()
        if self.mismatch.tokens:
            values |= self._ratios()
        if self.tokens_trained:
            values |= self._means_of_tokens()
        if self.optimizer_steps:
            values |= {
                "loss": self.loss / self.optimizer_steps,
                "grad_norm": self.grad_norm / self.optimizer_steps,
                "learning_rate": self.learning_rate,
            }
        return values | self._critic_means()

    def _means_of_tokens(self) -> dict[str, float]:
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

    def _ratios(self) -> dict[str, float]:
        stats = self.mismatch.reduce()
        return {
            "mismatch_kl": stats.mismatch_kl,
            "ratio_mean": stats.ratio_mean,
            "ratio_var": stats.ratio_variance,
            "ratio_max": stats.ratio_max,
            "effective_sample_size": stats.effective_sample_size,
        }

    def _lags(self) -> dict[str, float]:
        """Mean, largest, and the share of tokens at each lag."""
        tokens = self.tokens_by_lag.total()
        mean = sum(lag * count for lag, count in self.tokens_by_lag.items()) / tokens
        shares = {f"lag/{lag}": count / tokens for lag, count in sorted(self.tokens_by_lag.items())}
        return {"policy_lag_mean": mean, "policy_lag_max": float(max(self.tokens_by_lag)), **shares}

    def _critic_means(self) -> dict[str, float]:
        """Of each figure, over the critic's steps that had it."""
        names = dict.fromkeys(name for step in self.critic for name in step)
        return {name: fmean(step[name] for step in self.critic if name in step) for name in names}
