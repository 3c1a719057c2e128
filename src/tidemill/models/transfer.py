"""Copies host arrays to a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on a device. A GPU copies it from page-locked memory, which the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
