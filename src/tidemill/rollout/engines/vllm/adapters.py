"""Hands the adapter of each version to vLLM, which reads adapters from a folder in peft's format.

Every version has an id of its own, so that vLLM's prefix cache never shares keys and values between versions. With
`in_place` all versions have one id: the adapter of running requests is replaced, and they keep their caches.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tidemill.config.schema import VLLM_LARGEST_RANK
from tidemill.models.weight_stream import WeightStream

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, VLLM_LARGEST_RANK)
"""Ranks for which vLLM allocates memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Rank, scaling and layers of an adapter, as in `[model.lora]`; `targets` is not empty.

    Args:
        in_place: whether a version replaces the adapter of running requests.
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    in_place: bool = False

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs`: one adapter in memory, in the dtype of the model."""
        allocated = next(rank for rank in RANKS if rank >= self.rank)
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": allocated,
            "lora_target_modules": list(self.targets),
        }


class Adapters:
    """The newest version's adapter as a request of vLLM; `newest` is None before the first."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._config = json.dumps(
            {
                "peft_type": "LORA",
                "r": settings.rank,
                "lora_alpha": settings.alpha,
                "target_modules": list(settings.targets),
            }
        )
        self._in_place = settings.in_place
        self._folder = tempfile.TemporaryDirectory(prefix="tidemill-adapter-")
        self._written = 0
        self.newest: Any = None

    def write(self, tensors: WeightStream) -> Any:
        """Write a version's adapter; the folder then holds no other."""
        from vllm.lora.request import LoRARequest

        self._written += 1
        folder = Path(self._folder.name)
        (folder / "adapter_config.json").write_text(self._config)
        named = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in tensors}
        save_file(named, folder / "adapter_model.safetensors")
        if self._in_place:
            self.newest = LoRARequest("newest", 1, str(folder))  # with `load_inplace`, it would be read at each step
            return LoRARequest("newest", 1, str(folder), load_inplace=True)
        self.newest = LoRARequest(f"version-{self._written}", self._written, str(folder))
        return self.newest

    def close(self) -> None:
        self._folder.cleanup()
