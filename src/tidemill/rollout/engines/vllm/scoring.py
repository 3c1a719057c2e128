"""Frozen models in vLLM: a reference, which gives logprobs of completion tokens, and reward models.

vLLM computes several samples in a step, each as a prompt. Its logprobs of prompt tokens are at temperature 1, so every
rank scales the logits. A reward is the output of our head at the hidden state of the last token.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tidemill.core.records import LogprobBuffer, TokenBuffer, pack_logprobs, unpack_tokens
from tidemill.models.folder import weight_files
from tidemill.models.reward_model import ScalarHead
from tidemill.rollout.engines.vllm.engine import VllmSettings, prompt_logprobs_only, start_vllm, watch_ranks


class VllmScorer(ABC):
    """One frozen model. Not thread-safe.

    Args:
        settings: `model` is a folder with safetensors weights, which vLLM reads; `context` that of the longest sample.
        changes: arguments of vLLM's `EngineArgs`.
    """

    def __init__(self, settings: VllmSettings, changes: dict[str, Any]) -> None:
        # A prompt needs room for a token, which is never computed: it may be one beyond the model's limit.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        with tempfile.TemporaryDirectory(prefix="tidemill-weights-") as folder:
            _link_model(Path(settings.model), Path(folder))
            linked = replace(settings, model=folder, load_format="safetensors", context=settings.context + 1)
            # Steps of whole prompts are long enough without CUDA graphs.
            self._llm = start_vllm(linked, {"logits_processors": None, "enforce_eager": True} | changes)
        self._watch = watch_ranks(self._llm)
        self._prompt_tokens: dict[str, int] = {}  # of the samples in vLLM
        self._added = 0

    def add(self, token_ids: TokenBuffer, prompt_tokens: int) -> str:
        """Add a sample int32 [P + T]; returns its name."""
        name = str(self._added)
        self._added += 1
        self._llm.add_request(name, {"prompt_token_ids": unpack_tokens(token_ids)}, self._params())
        self._prompt_tokens[name] = prompt_tokens
        return name

    def step(self) -> dict[str, LogprobBuffer]:
        """Compute for one step of vLLM; returns the results of samples that ended, float32, by name.

        Raises:
            WorkerLost: a rank ended.
        """
        with self._watch.calls():
            outputs = self._llm.step()
        return {
            output.request_id: self._result(output, self._prompt_tokens.pop(output.request_id))
            for output in outputs
            if output.finished
        }

    def close(self) -> None:
        """Release the model, and end its ranks."""
        if self._llm.vllm_config.parallel_config.world_size > 1:
            self._watch.end(self._llm.model_executor.shutdown)
        self._llm = None

    @abstractmethod
    def _params(self) -> Any:
        """vLLM's parameters of a sample."""

    @abstractmethod
    def _result(self, output: Any, prompt_tokens: int) -> LogprobBuffer:
        """The result of a sample from vLLM's output."""


class VllmReference(VllmScorer):
    """Logprobs [T] of the completion at the sampling temperature."""

    def __init__(self, settings: VllmSettings, *, temperature: float) -> None:
        super().__init__(settings, {"hf_overrides": {"head_dtype": "float32"}})
        if temperature != 1.0:  # prompt logprobs are at temperature 1
            self._llm.collective_rpc("scale_logits", args=(1.0 / temperature,))

    def _params(self) -> Any:
        return prompt_logprobs_only()

    def _result(self, output: Any, prompt_tokens: int) -> LogprobBuffer:
        rows = zip(output.prompt_logprobs[prompt_tokens:], output.prompt_token_ids[prompt_tokens:], strict=True)
        return pack_logprobs([float(row[token].logprob) for row, token in rows])


class VllmReward(VllmScorer):
    """The score [1] of a sample."""

    def __init__(self, settings: VllmSettings, head: ScalarHead) -> None:
        from vllm.config import PoolerConfig

        pooler = PoolerConfig(task="embed", seq_pooling_type="LAST", use_activation=False)
        super().__init__(settings, {"runner": "pooling", "convert": "embed", "pooler_config": pooler})
        self._head = head.cpu()

    def _params(self) -> Any:
        from vllm import PoolingParams

        return PoolingParams(task="embed", use_activation=False)

    @torch.inference_mode()
    def _result(self, output: Any, prompt_tokens: int) -> LogprobBuffer:
        return pack_logprobs(self._head(output.outputs.data[None].cpu()).tolist())


def _link_model(source: Path, folder: Path) -> None:
    """Links to the configuration and the weights of a model; vLLM would also load other safetensors files, such as the
    head of a reward model."""
    for path in (*weight_files(source), *source.glob("*.json")):
        (folder / path.name).symlink_to(path.resolve())
