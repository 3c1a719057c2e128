"""Models that nobody trains: each is in memory once, however many roles name it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.models.loading import load_model
from tidemill.models.lora import attach_adapter
from tidemill.models.snapshots import empty_twin


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
            self._models[folder.resolve()] = load_model(folder, device=self._device).requires_grad_(False)
        return self._models[folder.resolve()]

    def with_adapter(self, folder: Path, config: ModelConfig) -> PreTrainedModel:
        """A model that learns in an adapter of its own: other modules over the very parameters of the frozen one.

        Raises:
            UserError: it cannot be loaded, or takes no such adapter.
        """
        base = self.load(folder)
        model = empty_twin(base, base.dtype, shared=base.parameters())
        attach_adapter(model, config)
        return model
