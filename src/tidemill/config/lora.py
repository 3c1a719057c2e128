"""Low-rank adapters: train small matrices beside frozen layers instead of the layers."""

from __future__ import annotations

from pydantic import Field, model_validator

from tidemill.config.base import Config, Seed, refuse


class LoraConfig(Config):
    rank: int = Field(0, ge=0)
    """Inner width of an adapter; 0 trains the whole model instead."""
    alpha: float = Field(32.0, gt=0)
    """What an adapter adds is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by the last part of their names (`q_proj`); none named: all but the output head."""
    dropout: float = 0.0
    """Must be 0: sampling and training compute the same function, and dropout is a random one."""
    seed: Seed = 0
    """Seeds an adapter's initial weights; it starts by adding nothing whatever the seed."""

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @model_validator(mode="after")
    def _trainable(self) -> LoraConfig:
        faults = []
        if self.dropout != 0:
            faults.append(
                f"dropout = {self.dropout:g} would train another function than the one that sampled; set dropout = 0"
            )
        if self.targets and not self.enabled:
            faults.append("targets names layers, and rank = 0 gives none of them an adapter; set rank (8, say)")
        if odd := [name for name in self.targets if not name or "." in name]:
            faults.append(
                f"targets has {odd[0]!r}; name layers by the last part of their names, such as q_proj, for all blocks"
            )
        if twice := sorted({name for name in self.targets if self.targets.count(name) > 1}):
            faults.append(f"targets names {twice[0]} twice; name every layer once")
        return refuse(faults, self)
