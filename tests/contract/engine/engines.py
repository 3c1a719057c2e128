"""The engines under the contract, small models for them, and what they must generate, computed by transformers."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine_requests import Collected
from tests.torch_kernels import TORCH_KERNELS
from tidemill.config.model import LoraConfig, ModelConfig
from tidemill.core.protocols import Engine
from tidemill.core.records import GenerateRequest, PolicyVersion, WeightManifest, unpack_tokens
from tidemill.models.attention import use_packed_attention
from tidemill.models.lora import attach_adapter, learned_parameters, linear_layers
from tidemill.models.snapshots import Part, empty_copy, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.models.weight_stream import streamed_weights
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.rollout.sampling import gumbel, noise_key
from tidemill.rollout.weight_sources import EmptyModel, StreamUser
from tidemill.weights.snapshot import Snapshot, allocate

SLOTS, CONTEXT, VOCABULARY = 4, 96, 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,  # vLLM has no kernels for smaller ones
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough that logits are far from uniform
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOLERANCE = 1e-4
"""Of logprobs, in fp32: more than the rounding of each model below."""
NO_ADAPTER, ADAPTER = LoraConfig(), LoraConfig(rank=4)
WINDOW = 8
_WINDOWS = ["sliding_attention", "full_attention"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=_WINDOWS, query_pre_attn_scalar=64)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
    "nine_heads": lambda: LlamaForCausalLM(  # in groups of three, as in SmolLM2
        LlamaConfig(
            **SHAPE
            | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 192}
            | {"initializer_range": 0.15 * (128 / 576) ** 0.5},  # logits as large as those of the other models
            tie_word_embeddings=True,
        )
    ),
    "large_vocabulary": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SHAPE, "vocab_size": 151_936}, tie_word_embeddings=True)
    ),
}
HAS_VLLM = importlib.util.find_spec("vllm") is not None or "TIDEMILL_TEST_VLLM" in os.environ
KINDS = ("embedded", "fixed", "static", *["vllm"] * HAS_VLLM)


def model(name: str, seed: int) -> PreTrainedModel:
    """A model with weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = MODELS[name]()
    return made.float().eval()  # type: ignore[no-any-return]


def letters(token_ids: Sequence[int]) -> str:
    """One letter for each token."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


class User(StreamUser, Protocol):
    def bind(self, parts: Sequence[Snapshot], part: Part) -> None: ...


@dataclass
class Contract:
    """An engine with the model whose weights it has."""

    engine: Engine
    user: User
    shape: str
    lora: LoraConfig = NO_ADAPTER
    folder: Path | None = None  # snapshots are files of this folder
    version: int = -1
    model: PreTrainedModel = field(init=False)
    collected: Collected = field(default_factory=Collected)

    def load(self, seed: int, *, asleep: bool = False) -> None:
        """Publish a model of `seed` to the engine as the next version; with an adapter only that is of `seed`.

        Args:
            asleep: the engine sleeps before, and its weights are streamed.
        """
        self.version += 1
        version = PolicyVersion(number=self.version, digest=f"weights {seed}")
        if not self.lora.enabled:
            self.model = model(self.shape, seed)
        elif self.version == 0:
            self.model = model(self.shape, 0)
            attach_adapter(self.model, ModelConfig(source="here", lora=self.lora))
            self._bind("base", seed, version)
        if self.lora.enabled:
            fill_adapter(self.model, seed)
        if asleep:
            self._stream()
        else:
            self._bind("learned", seed, version)
        self.engine.load(version)

    def _stream(self) -> None:
        self.user.sleep()
        self.user.wake_weights()
        parts: tuple[Part, ...] = ("base", "learned") if self.lora.enabled else ("learned",)
        for part in parts:
            self.user.receive(streamed_weights(self.model, torch.float32, part=part), part)
        self.user.wake_caches()

    def _bind(self, part: Part, seed: int, version: PolicyVersion) -> None:
        layout = snapshot_layout(self.model, torch.float32, part=part)
        buffer = allocate(snapshot_bytes(layout))
        write_snapshot(self.model, layout, buffer, part=part)
        digest = f"{part} {seed}"
        manifest = WeightManifest(version=version, digest=digest, nbytes=snapshot_bytes(layout), tensors=layout)
        file = None
        if self.folder is not None:
            file = self.folder / digest
            file.write_bytes(buffer.data)
        self.user.bind([Snapshot(manifest=manifest, buffer=buffer, file=file)], part)

    def run(self, requests: Sequence[GenerateRequest], *, polls: int = 3000) -> Collected:
        """Generate samples to their ends."""
        collected = Collected(requests)
        self.engine.submit(requests)
        return self.finish(collected, polls=polls)

    def finish(self, collected: Collected, *, polls: int = 3000) -> Collected:
        for _ in range(polls):
            collected.add(self.engine.poll(0.0))
            status = self.engine.status()
            if not status.running and not status.queued:
                collected.add(self.engine.poll(0.0))
                return collected
        raise AssertionError(f"not finished: {self.engine.status()}")

    @torch.inference_mode()
    def expected(self, request: GenerateRequest, tokens: int) -> tuple[list[int], list[float]]:
        """The next tokens of a sample and their logprobs: one forward pass of transformers for each."""
        known, temperature = unpack_tokens(request.prompt_ids) + unpack_tokens(request.prefix_ids), 1.0
        temperature = request.sampling.temperature
        drawn, logprobs = list[int](), list[float]()
        for _ in range(tokens):
            logits = self.model(torch.tensor([known])).logits[0, -1].float() / (temperature or 1.0)
            noise = gumbel(
                [noise_key(request.sample_id.seed(request.branch), len(known) - 1)], len(logits), logits.device
            )[0]
            token = int((logits + noise * bool(temperature)).argmax())
            drawn.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
            known.append(token)
        return drawn, logprobs


def fill_adapter(adapted: PreTrainedModel, seed: int) -> None:
    """Give both matrices of every adapted layer values that change the tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learned_parameters(adapted).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def open_contract(
    kind: str,
    shape: str,
    *,
    lora: LoraConfig = NO_ADAPTER,
    context: int = CONTEXT,
    keep_cache: bool = False,
    ranks: int = 1,
    **args: Any,
) -> Contract:
    """An engine without weights: "fixed" is the embedded one in batch-invariant mode, "static" as on a GPU.

    The last two arguments are for vLLM.
    """
    version = PolicyVersion(number=-1, digest="none")
    if kind != "vllm":
        hollow = model(shape, 0)
        use_packed_attention(hollow)
        if lora.enabled:
            attach_adapter(hollow, ModelConfig(source="here", lora=lora))
        hollow = empty_copy(hollow, torch.float32)
        embedded = EmbeddedEngine(
            hollow,
            decode=letters,
            slots=SLOTS,
            context=context,
            version=version,
            batch_invariant=kind == "fixed",
            keep_cache=keep_cache,
            prefill_chunk_tokens=64,
            kernels=TORCH_KERNELS if kind == "static" else None,
        )
        return Contract(embedded, EmptyModel(hollow, drop_caches=embedded.drop_caches), shape, lora)
    from tidemill.rollout.engines.vllm.adapters import AdapterSettings
    from tidemill.rollout.engines.vllm.engine import VllmEngine, VllmSettings

    folder = Path(tempfile.mkdtemp())
    shown = model(shape, 0)
    shown.config.architectures = [type(shown).__name__]
    shown.config.save_pretrained(folder)
    targets, adapter = lora.targets or linear_layers(shown), None
    if lora.enabled:
        adapter = AdapterSettings(rank=lora.rank, alpha=lora.alpha, targets=targets, in_place=keep_cache)
    settings = VllmSettings(
        model=str(folder),
        dtype="float32",
        slots=SLOTS,
        context=context,
        ranks=ranks,
        args=args,
        keep_cache=keep_cache,
        adapter=adapter,
    )
    vllm = VllmEngine(settings, decode=letters, version=version)
    return Contract(vllm, vllm, shape, lora, folder if ranks > 1 else None)
