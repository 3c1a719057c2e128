"""Bytes per parameter, in what is stored and in what is trained."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.core.records import Record

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Of one parameter as it is stored or sent."""

Optimizer: TypeAlias = Literal["adam", "adam-8bit"]


class StateBytes(Record):
    """What training one parameter keeps, in bytes."""

    weights: float
    gradients: float
    moments: float
    master: float  # the copy in fp32 that small updates are added to

    @property
    def optimizer(self) -> float:
        return self.moments + self.master

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


MIXED_PRECISION = "mixed precision: weights and gradients in bf16, moments and master in fp32 (ZeRO, arXiv 1910.02054)"
TRAINED: dict[Optimizer, StateBytes] = {
    "adam": StateBytes(weights=2, gradients=2, moments=4 + 4, master=4),
    "adam-8bit": StateBytes(weights=2, gradients=2, moments=1 + 1, master=4),  # arXiv 2110.02861, without block scales
}
FROZEN_BYTES = 2
"""Of a parameter that is only read, in bf16."""
