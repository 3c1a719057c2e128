"""Adds the sample's own noise to the logits of vLLM's first model runner (V1), which then takes the argmax.

V1 samples with a sequential generator, whose state is lost when a sample continues elsewhere. Model Runner V2 draws the
same noise itself from the request's seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidemill.rollout.sampling import gumbel, noise_key, normalizers
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

SEED = "tidemill_seed"
"""Key of a request's `extra_args`."""

drawn_logprobs: dict[tuple[int, int], float] = {}
"""Logprobs of the tokens that the last step drew at another temperature than 1, by seed and position of the last input
token. V1 itself returns logprobs at temperature 1 only."""


@dataclass(slots=True)
class _Row:
    seed: int
    temperature: float
    prompt_tokens: int
    completion: list[int]  # vLLM's own list, which grows

    @property
    def position(self) -> int:
        """Index of the last input token."""
        return self.prompt_tokens + len(self.completion) - 1


class PositionNoise(LogitsProcessor):
    """Runs after the temperature and before top-k, which is 1."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return True  # processors that say False run before the temperature

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, completion in batch_update.added:
            self._rows.pop(row, None)
            if (found := _row(params, prompt, completion)) is not None:
                self._rows[row] = found
        for source, target, direction in batch_update.moved:
            moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        drawn_logprobs.clear()
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        places = [(self._rows[row].seed, self._rows[row].position) for row in rows]
        noise = gumbel([noise_key(*place) for place in places], logits.shape[1], logits.device)
        scaled = logits[rows].float()
        noisy = noise.add_(scaled)
        other = [at for at, row in enumerate(rows) if self._rows[row].temperature != 1.0]
        if other:
            tokens = noisy[other].argmax(-1, keepdim=True)
            logprobs = scaled[other].gather(1, tokens)[:, 0] - normalizers(scaled[other])
            drawn_logprobs.update({places[at]: value for at, value in zip(other, logprobs.tolist(), strict=True)})
        logits[rows] = noisy.to(logits.dtype)
        return logits


def _row(params: SamplingParams, prompt: list[int] | None, completion: list[int]) -> _Row | None:
    seed = (params.extra_args or {}).get(SEED)
    if seed is None or params.temperature == 0:
        return None
    return _Row(seed=seed, temperature=params.temperature, prompt_tokens=len(prompt or ()), completion=completion)
