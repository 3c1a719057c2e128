"""Losses of supervised fine-tuning, reward models and preference optimisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(
    chosen_P: Tensor,
    rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation: -(1 - ε) log σ(βh) - ε log σ(-βh), h = (π_w - ref_w) - (π_l - ref_l).

    Args:
        chosen_P, rejected_P: float [P], summed logprobs of the completion tokens, with gradient.
        ref_chosen_P, ref_rejected_P: float [P], of the reference model; detached.
        beta: strength of the implicit KL penalty.
        label_smoothing: ε, assumed fraction of pairs with swapped labels.

    Returns:
        float [P].

    Source: DPO, arXiv 2305.18290; label smoothing, E. Mitchell, "A note on DPO with noisy preferences", 2023.
    """
    scaled_P = beta * margin(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P)
    return -(1.0 - label_smoothing) * logsigmoid(scaled_P) - label_smoothing * logsigmoid(-scaled_P)


def ipo(chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor, *, beta: float) -> Tensor:
    """Identity preference optimisation: (h - 1 / (2β))², with a target for the margin.

    Args:
        chosen_P, rejected_P: float [P], *mean* logprobs over each completion's tokens, with gradient (as in TRL, agreed
            with the authors: with sums the target would depend on length).
        ref_chosen_P, ref_rejected_P: float [P], means of the reference model; detached.
        beta: τ of the paper.

    Returns:
        float [P].

    Source: IPO, arXiv 2310.12036.
    """
    return (margin(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P) - 1.0 / (2.0 * beta)).square()


def margin(chosen_P: Tensor, rejected_P: Tensor, ref_chosen_P: Tensor, ref_rejected_P: Tensor) -> Tensor:
    """h = (π_w - ref_w) - (π_l - ref_l), float [P]; β h is the margin of the implicit rewards."""
    return (chosen_P - ref_chosen_P.detach()) - (rejected_P - ref_rejected_P.detach())


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, *, margins_P: Tensor | None = None, centring: float = 0.0
) -> Tensor:
    """Reward model loss: -log σ(r_w - r_l - margin) + centring (r_w + r_l)².

    Args:
        chosen_P, rejected_P: float [P], scores, with gradient.
        margins_P: float [P], required difference of the scores; None for 0.
        centring: weight of the penalty on the mean score, which pairs alone do not determine; usually 0.01.

    Returns:
        float [P].

    Source: Llama 2, arXiv 2307.09288 (margin); "Helping or herding?", arXiv 2312.09244 (centring).
    """
    difference_P = chosen_P - rejected_P
    if margins_P is not None:
        difference_P = difference_P - margins_P.detach()
    loss_P = -logsigmoid(difference_P)
    return loss_P + centring * (chosen_P + rejected_P).square() if centring else loss_P


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """An entry of `PREFERENCE_LOSSES`."""

    function: Callable[..., Tensor]  # (chosen, rejected, ref_chosen, ref_rejected [P], settings)
    reduce: Literal["sum", "mean"]  # of the token logprobs of a completion
    settings: dict[str, float]  # passed by name, with their usual values
    formula: str
    source: str


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(
        function=dpo,
        reduce="sum",
        settings={"beta": 0.1, "label_smoothing": 0.0},
        formula="-(1 - ε) log σ(β h) - ε log σ(-β h),  h = (π_w - ref_w) - (π_l - ref_l)",
        source="DPO, arXiv 2305.18290",
    ),
    "ipo": PreferenceLoss(
        function=ipo,
        reduce="mean",
        settings={"beta": 0.1},
        formula="(h - 1 / (2 β))², h of mean logprobs per token",
        source="IPO, arXiv 2310.12036",
    ),
}


def cross_entropy(trainer_logprobs_T: Tensor) -> Tensor:
    """-log π of each completion token in nats, float [T], with gradient."""
    return -trainer_logprobs_T
