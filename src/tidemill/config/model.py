"""Models: the policy, its LoRA adapter, and where and how critic, reference and reward models compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from tidemill.config.addresses import ModelName
from tidemill.config.base import HAS_CRITIC, HAS_REFERENCE, ActiveIf, Config, Neutral, Seed

DTYPE_NAMES: dict[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""PyTorch's names of the data types of weights, which are accepted, too."""
EXPORT_DTYPE: Final = "fp32"
"""Data type of exported weights unless another one is chosen: that of checkpoints, so that nothing is rounded."""


def dtype_name(given: Any) -> Any:
    """`bfloat16` as `bf16`; anything else unchanged."""
    return DTYPE_NAMES.get(given, given) if isinstance(given, str) else given


WeightsDtype: TypeAlias = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(dtype_name)]


class LoraConfig(Config):
    rank: int = Field(0, ge=0)
    """Rank of the LoRA adapter; 0 trains all weights of the model."""
    alpha: float = Field(32.0, gt=0)
    """LoRA scaling: the adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the last part of their name (`q_proj`). Empty: all but the output head."""
    dropout: float = 0.0
    """Must be 0: with dropout the trainer would compute another function than the engine that sampled."""
    seed: Seed = 0
    """Seed of the adapter's initial weights."""

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    def issues(self) -> Iterator[str]:
        if self.dropout != 0:
            yield f"dropout = {self.dropout:g}: trainer and engine would compute different functions; set dropout = 0"
        if self.targets and not self.enabled:
            yield "targets is set and rank = 0 disables the adapter; set rank, for example to 8"
        if odd := [name for name in self.targets if not name or "." in name]:
            yield f"targets contains {odd[0]!r}; give the last part of the layer's name, such as q_proj"


BUILT_IN_MODELS = ("smollm2-135m", "char")
PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = (PAD, EOS)
"""Tokens of the character model, before its alphabet."""


class CharModelConfig(Config):
    """A character-level Llama with random weights, for tests and benchmarks."""

    alphabet: str = "0123456789+-*=abcdefghijklmnopqrstuvwxyz .,?\n"
    """The vocabulary: one token per character, after the padding and end tokens."""
    hidden_size: int = Field(128, ge=8)
    """Hidden size."""
    layers: int = Field(4, ge=1)
    """Number of decoder layers."""
    heads: int = Field(4, ge=1)
    """Number of attention heads; must divide hidden_size."""
    context: int = Field(512, ge=8)
    """Maximum sequence length, in tokens."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights."""

    @property
    def vocabulary_size(self) -> int:
        return len(SPECIAL_TOKENS) + len(self.alphabet)

    @property
    def intermediate_size(self) -> int:
        """Width of the gated MLP: 8/3 of the hidden size (as in Llama), rounded up to a multiple of 32."""
        return -(-8 * self.hidden_size // (3 * 32)) * 32

    @property
    def parameters(self) -> int:
        """Number of parameters; the tied embedding counts once."""
        hidden = self.hidden_size
        per_layer = 4 * hidden * hidden + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.vocabulary_size * hidden + self.layers * per_layer + hidden

    def issues(self) -> Iterator[str]:
        if self.hidden_size % self.heads:
            yield f"heads = {self.heads} does not divide hidden_size = {self.hidden_size}; make it a multiple of heads"
        elif self.hidden_size // self.heads % 2:
            size = self.hidden_size // self.heads
            yield f"hidden_size / heads = {size} is odd, and rotary embeddings need an even size; make it even"
        if repeated := "".join(sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})):
            yield f"alphabet repeats {repeated!r}; list every character once"
        if not self.alphabet:
            yield "alphabet is empty; list the characters of the task"


class ModelConfig(Config):
    source: ModelName = "smollm2-135m"
    """The policy: `smollm2-135m`, `char` (see model.char), a local Hugging Face folder, a hub id, or the directory of a
    run, whose newest checkpoint is used and stored."""
    revision: str | None = None
    """Hub revision: branch, tag or commit. Only for hub ids."""
    chat_template: Annotated[bool, Neutral(("export",))] = False
    """Format each prompt as a user message with the model's chat template."""
    char: CharModelConfig = CharModelConfig()
    lora: Annotated[LoraConfig, Neutral(("demonstrations", "export"))] = LoraConfig()

    def issues(self) -> Iterator[str]:
        if not self.source.strip():
            yield "source is empty; name a model (`tidemill model list` lists the built-in ones)"
        if self.source in BUILT_IN_MODELS and self.revision is not None:
            yield f'revision is only for hub ids, and source is "{self.source}"; leave revision out'
        if self.source == "char" and self.chat_template:
            yield 'the "char" model has no chat template; set chat_template = false'


HAS_REWARD_MODEL = ActiveIf(lambda spec: bool(spec.scoring.model_folders), 'no reward is of kind "model"')
HAS_ACTORS = ActiveIf(lambda spec: bool(spec.placement.on_actors), "no model is placed on an actor")
SCORES_ON_ACTORS = ActiveIf(
    lambda spec: bool({"reward_model", "reference"} & {*spec.placement.on_actors}),
    "no reward model and no reference is placed on an actor",
)
HAS_FROZEN_SCORERS = ActiveIf(lambda spec: spec.has_frozen_scorers, "there is no reward model and no reference")
READS_AHEAD = ActiveIf(lambda spec: spec.reading.ahead, "reading.ahead is false")
READS_IN_CHUNKS = ActiveIf(
    lambda spec: spec.reading.ahead or bool(spec.placement.on_actors),
    "reading.ahead is false, and no model is on an actor",
)


class PlacementConfig(Config):
    """Where the reserved side generates, and which models run on a dedicated Ray actor, on the nodes where the trainer
    may run."""

    engine: Literal["auto", "own", "colocated"] = "auto"
    """The reserved engine. auto: the embedded one, over the trainer's parameters; with trainer.shards, as own. own: one
    of engine.kind in a process of its own, with the resources of a worker. colocated: one of engine.kind in the
    trainer's process (in each shard), on its device; it sleeps while the trainer computes. Needs a policy lag of 0."""
    reward_model: Annotated[Literal["driver", "actor"], HAS_REWARD_MODEL] = "driver"
    """Where reward models run. driver: in the controller's process. actor: each on a Ray actor."""
    reference: Annotated[Literal["trainer", "actor"], HAS_REFERENCE] = "trainer"
    """Where the reference model of algorithm.kl_beta runs. trainer: in the trainer's process and memory."""
    critic: Annotated[Literal["trainer", "actor"], HAS_CRITIC] = "trainer"
    """Where a critic of kind = "own" runs. actor: it computes values of each group when the group is complete, and
    trains at the same time as the policy. Values may differ by rounding from those computed in the trainer. With
    trainer.shards the critic has as many shards, each on an actor."""
    actor_cpus: Annotated[float, HAS_ACTORS] = Field(1.0, ge=0)
    """CPUs reserved for each of these actors; also the number of threads of one operation."""
    actor_gpus: Annotated[float, HAS_ACTORS] = Field(0.0, ge=0)
    """GPUs reserved for each of these actors."""
    scoring_engine: Annotated[Literal["embedded", "vllm"], SCORES_ON_ACTORS] = "embedded"
    """What computes the reward models and the reference on actors. embedded: Tidemill's own forward pass, also ahead
    (reading.ahead). vllm: vLLM 0.32, which scores finished samples; [engine.vllm] sets its memory."""
    actor_tensor_parallel: Annotated[int, SCORES_ON_ACTORS] = Field(1, ge=1)
    """Ranks of vLLM for each of these models, as engine.tensor_parallel; each has the resources of actor_cpus and
    actor_gpus."""

    @property
    def on_actors(self) -> tuple[str, ...]:
        """The keys whose value is "actor"."""
        return tuple(name for name in ("reward_model", "reference", "critic") if getattr(self, name) == "actor")


class ReadingConfig(Config):
    ahead: Annotated[bool, HAS_FROZEN_SCORERS] = False
    """Reward models and the reference process a sample chunk by chunk while it is generated, so that only the last
    chunk remains when it is finished. Results are bit-identical. Each sample is then processed separately, as it is on
    an actor. false: reward models score finished samples in batches, and the trainer computes the reference's logprobs
    per batch, which is faster for short completions."""
    chunk_tokens: Annotated[int, READS_IN_CHUNKS] = Field(256, ge=1)
    """Chunk size, in tokens."""
    cache_tokens: Annotated[int, READS_IN_CHUNKS] = Field(65536, ge=0)
    """Size of each such model's KV cache for unfinished samples, in tokens. Samples that do not fit are processed when
    they are finished; 0 processes nothing ahead."""
    own_thread: Annotated[bool, READS_AHEAD] = False
    """Process chunks on an additional thread, for machines with a spare core. false: process them only while the
    process's engine or trainer is idle."""
