"""Guards: reward hacking and machines that compute wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.base import NEUTRAL, ActiveIf, Config

HAS_GOLD = ActiveIf(lambda spec: spec.has_gold, 'no reward has role = "gold"')
ROLLS_BACK = ActiveIf(lambda spec: spec.guard.action == "rollback", 'guard.action is not "rollback"')


class AmendConfig(Config):
    kl_beta: float | None = Field(None, gt=0)
    """algorithm.kl_beta after a rollback; from 0 it loads a reference."""
    entropy_bonus: float | None = Field(None, ge=0)
    """algorithm.entropy_bonus after a rollback: rewards diversity."""
    reward_weights: dict[str, float] = {}
    """Weights of rewards after a rollback, by name; 0 removes one."""

    @property
    def is_empty(self) -> bool:
        return self.kl_beta is None and self.entropy_bonus is None and not self.reward_weights


class MachinesConfig(Config):
    action: Literal["off", "warn", "quarantine"] = "quarantine"
    """Workers that compute wrongly or much more slowly than before. warn: name them. quarantine: stop using them, at
    most a quarter of the fleet at once, and leave tokens that they computed wrongly out of training."""


class GuardConfig(Config):
    action: Literal["off", "warn", "pause", "rollback"] = "warn"
    """What happens when the reward rises and gold does not. warn: a message. pause: the run stops with a checkpoint,
    exit code 3. rollback: the run returns to a checkpoint before the estimated onset, applies [guard.amend] and
    continues; a second time it stops with exit code 3. off: gold rewards are computed for all samples, and nothing
    decides."""
    gold_share: Annotated[float, HAS_GOLD] = Field(0.1, gt=0, le=1)
    """Share of the samples of a batch that get a gold score, chosen by hash."""
    gold_most: Annotated[int, HAS_GOLD] = Field(8, ge=1)
    """Maximum number of samples of a batch that get a gold score; four times as many in the first step."""
    gold_timeout_s: Annotated[float, NEUTRAL, HAS_GOLD] = Field(120.0, gt=0)
    """Time from the end of a step until its gold scores are counted as missing, in seconds."""
    canary_every: Annotated[int, HAS_GOLD] = Field(10, ge=0)
    """Steps between measurements of proxy and gold on held-out prompts; 0: none."""
    canaries: Annotated[int, HAS_GOLD] = Field(16, ge=1)
    """Maximum number of these prompts."""
    canary_set: Annotated[str, HAS_GOLD] = ""
    """Name of the set in eval.sets with these prompts. Default: the held-out prompts of the task."""
    probes: Annotated[bool, HAS_GOLD] = True
    """Before the first step, score texts that no reward should like: an empty one, the prompt, a list of all answers, a
    repeated mark, an instruction to the judge."""
    amend: Annotated[AmendConfig, ROLLS_BACK] = AmendConfig()
    machines: Annotated[MachinesConfig, NEUTRAL] = MachinesConfig()

    def issues(self) -> Iterator[str]:
        if self.action == "rollback" and self.amend.is_empty:
            yield (
                'action = "rollback" would train the same run again; set amend.kl_beta, amend.entropy_bonus or '
                "amend.reward_weights"
            )
