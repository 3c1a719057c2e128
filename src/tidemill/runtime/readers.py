"""The frozen models of a run that read sample by sample, and those of them that are in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Reader
from tidemill.models.reward_model import load_reward_model
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.local_reader import LocalReader
from tidemill.runtime.machine import choose_device, choose_precision
from tidemill.trainer.chunked_reader import ChunkedReader, Gauge, LogprobGauge, ScoreGauge

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """By what they are for; whoever made them closes them."""

    rewards: Mapping[Path, Reader] = field(default_factory=dict)  # by the folder of their model
    reference: Reader | None = None

    @property
    def all(self) -> tuple[Reader, ...]:
        return (*self.rewards.values(), *([self.reference] if self.reference else ()))


def reward_reader(spec: RunSpec, folder: Path, compute: ComputeThread | None = None) -> LocalReader:
    """A reward model that scores samples one by one.

    Args:
        compute: a thread to share; None for one of its own.

    Raises:
        UserError: the model cannot be had.
    """
    device = choose_device(spec.trainer)
    reward = load_reward_model(folder, device=device)
    return _reader(spec, reward.model, ScoreGauge(reward.head), device, compute)


def reference_reader(spec: RunSpec, model: PreTrainedModel, compute: ComputeThread | None = None) -> LocalReader:
    """The reference, which says what it thinks of every token after the prompt.

    Args:
        compute: a thread to share; None for one of its own.
    """
    gauge = LogprobGauge(
        model,
        temperature=spec.sampling.temperature,
        logits_budget_bytes=spec.trainer.logits_budget_mb * MEGABYTE,
    )
    return _reader(spec, model, gauge, next(model.parameters()).device, compute)


def _reader(
    spec: RunSpec, model: PreTrainedModel, gauge: Gauge, device: torch.device, compute: ComputeThread | None
) -> LocalReader:
    reader = ChunkedReader(
        model,
        gauge,
        chunk_tokens=spec.reading.chunk_tokens,
        cache_tokens=spec.reading.cache_tokens,
        autocast=choose_precision(spec.trainer, device),
    )
    if compute is None or spec.reading.own_thread:
        return LocalReader(reader, ComputeThread("tidemill-reader"), owned=True)
    return LocalReader(reader, compute, owned=False)
