"""What a loss is made of besides what a recipe names as its advantage, loss and correction: formulas, sources, keys."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """A row of the registry."""

    formula: str
    source: str
    settings: tuple[str, ...] = ()  # keys of the configuration it goes by, `section.key`


TERMS: dict[str, dict[str, Term]] = {
    "normalize": {
        "sample": Term("1 / S Σ_s 1 / |s| Σ_t loss_t, over S samples", "DeepSeekMath, arXiv 2402.03300"),
        "token": Term("Σ_s Σ_t loss_t / Σ_s |s|", "DAPO, arXiv 2503.14476"),
        "constant": Term(
            "Σ_s Σ_t loss_t / (S max_new_tokens)", "Dr. GRPO, arXiv 2503.20783", ("sampling.max_new_tokens",)
        ),
    },
    "kl": {
        "loss": Term(
            "k3 = e^d - d - 1, d = ref - trainer;  loss + kl_beta k3, times the importance ratio with kl_ratio = true",
            'J. Schulman, "Approximating KL divergence", 2020',
            ("algorithm.kl_beta", "algorithm.kl_ratio"),
        ),
        "reward": Term("k1 = rollout - ref;  r_t - kl_beta k1_t", "RLHF, arXiv 1909.08593", ("algorithm.kl_beta",)),
        "kl_target": Term(
            "kl_beta ← kl_beta (1 + 0.1 clip(kl / kl_target - 1, ±0.2)) after each batch; not set: fixed",
            "arXiv 1909.08593, section 2.2",
            ("algorithm.kl_target",),
        ),
        "kl_stop": Term(
            "mean(ρ - 1 - log ρ) > kl_stop ends the update; not set: never",
            'J. Schulman, "Approximating KL divergence", 2020',
            ("algorithm.kl_stop",),
        ),
    },
    "value": {
        "value_clip": Term(
            "max((V - R)², (V_start + clamp(V - V_start, ±value_clip) - R)²);  value_clip = 0: (V - R)²",
            '"Implementation matters in deep policy gradients", arXiv 2005.12729',
            ("algorithm.value_clip", "algorithm.value_coefficient"),
        ),
        "normalize": Term(
            "V and R as (x - mean) / std of the returns so far", "PopArt, arXiv 1602.07714", ("critic.normalize",)
        ),
    },
    "shaping": {
        "overlong": Term(
            "R + min(-(L - (max_new_tokens - b)) / b, 0), L tokens long, b = overlong_buffer_tokens; 0: off",
            "DAPO, arXiv 2503.14476, whose b is a fifth of the longest completion",
            ("algorithm.overlong_buffer_tokens",),
        ),
        "entropy_bonus": Term("loss_t - entropy_bonus H(π_t)", "A3C, arXiv 1602.01783", ("algorithm.entropy_bonus",)),
    },
    "supervised": {
        "sft": Term("-log π, mean over a minibatch's completion tokens", "InstructGPT, arXiv 2203.02155"),
        "reward_model": Term(
            "-log σ(r_w - r_l - margin) + centring (r_w + r_l)²",
            'Bradley and Terry, 1952; Llama 2, arXiv 2307.09288 (margin); "Helping or herding?", arXiv 2312.09244',
            ("reward_model.centring", "reward_model.margins"),
        ),
    },
}
"""By table of `tidemill algorithms`; what computes them is in the modules beside this one."""
