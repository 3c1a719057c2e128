"""Models that nobody trains: each is in memory once, however many roles name it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.models.loading import load_model


class FrozenModels:
    """By folder, on one device. Not for use from two threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[Path, PreTrainedModel] = {}

    def load(self, folder: Path) -> PreTrainedModel:
        """The model of a folder; the second to ask gets the same one.

        Raises:
            UserError: it cannot be loaded.
        """
        if folder.resolve() not in self._models:
            self.keep(folder, load_model(folder, device=self._device).requires_grad_(False))
        return self._models[folder.resolve()]

    def keep(self, folder: Path, model: PreTrainedModel) -> None:
        """Make `model` what a folder stands for: somebody holds these weights already, and never changes them."""
        self._models[folder.resolve()] = model
