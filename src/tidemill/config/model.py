"""Which models a run uses, with which adapter, and where the models beside the policy compute."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, Seed, refuse


class LoraConfig(Config):
    rank: int = Field(0, ge=0)
    """Inner width of an adapter; 0 trains the whole model instead."""
    alpha: float = Field(32.0, gt=0)
    """What an adapter adds is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by the last part of their names (`q_proj`); none named: all but the output head."""
    dropout: float = 0.0
    """Must be 0: sampling and training compute the same function, and dropout is a random one."""
    seed: Seed = 0
    """Seeds an adapter's initial weights; it starts by adding nothing whatever the seed."""

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @model_validator(mode="after")
    def _trainable(self) -> LoraConfig:
        faults = []
        if self.dropout != 0:
            faults.append(
                f"dropout = {self.dropout:g} would train another function than the one that sampled; set dropout = 0"
            )
        if self.targets and not self.enabled:
            faults.append("targets names layers, and rank = 0 gives none of them an adapter; set rank (8, say)")
        if odd := [name for name in self.targets if not name or "." in name]:
            faults.append(
                f"targets has {odd[0]!r}; name layers by the last part of their names, such as q_proj, for all blocks"
            )
        if twice := sorted({name for name in self.targets if self.targets.count(name) > 1}):
            faults.append(f"targets names {twice[0]} twice; name every layer once")
        return refuse(faults, self)


BUILT_IN_MODELS = ("smollm2-135m", "char")


class CharModelConfig(Config):
    """A character-level Llama built from a seed, for tests and benchmarks."""

    alphabet: str = "0123456789+-*=abcdefghijklmnopqrstuvwxyz .,?\n"
    """One token per character, after the special tokens (padding, end)."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide hidden_size."""
    context: int = Field(256, ge=8)
    """Longest sequence, in tokens."""
    seed: int = Field(0, ge=0)
    """Seeds the initial weights."""

    @model_validator(mode="after")
    def _buildable(self) -> CharModelConfig:
        faults = []
        if self.hidden_size % self.heads:
            faults.append(
                f"heads = {self.heads} does not divide hidden_size = {self.hidden_size}; make it a multiple of heads"
            )
        elif self.hidden_size // self.heads % 2:
            faults.append(
                f"hidden_size / heads = {self.hidden_size // self.heads} is odd and rotary positions need pairs; "
                "make it even"
            )
        if twice := "".join(sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})):
            faults.append(f"alphabet repeats {twice!r}; name every character once")
        if not self.alphabet:
            faults.append("alphabet is empty; name the characters the task writes with")
        return refuse(faults, self)


class ModelConfig(Config):
    source: str = "smollm2-135m"
    """`smollm2-135m`, `char` (see model.char), a local Hugging Face folder, or a hub id."""
    revision: str | None = None
    """Hub revision; only for hub ids."""
    chat_template: bool = False
    """Wrap each prompt as a user message in the model's chat template."""
    char: CharModelConfig = CharModelConfig()
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _known_source(self) -> ModelConfig:
        faults = []
        if not self.source.strip():
            faults.append("source is empty; name a model (`tidemill model list` shows the built-in ones)")
        if self.source in BUILT_IN_MODELS and self.revision is not None:
            faults.append(f'revision is only for hub ids, and source is "{self.source}"; leave revision out')
        if self.source == "char" and self.chat_template:
            faults.append('the "char" model has no chat template; set chat_template = false')
        return refuse(faults, self)


class PlacementConfig(Config):
    """An actor is a Ray actor of its own, on the nodes that the trainer may be on."""

    reward_model: Literal["driver", "actor"] = "driver"
    """Rewards of kind "model". driver: in the controller's process (in one process on its one compute thread)."""
    reference: Literal["trainer", "actor"] = "trainer"
    """The model that algorithm.kl_beta holds the policy to. trainer: in its process, which then has it in memory."""
    critic: Literal["trainer", "actor"] = "trainer"
    """The critic of algorithm.advantage = "gae", where critic.kind = "own". actor: it values each group when that is
    complete and learns while the policy does; where others are valued together, sums may round differently."""
    actor_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each of these actors; also its threads inside one operation."""
    actor_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for each of these actors."""

    def faults(self, runtime: str, *, critic: str) -> list[str]:
        """What cannot be on this runtime, or with this kind of critic, with its hint."""
        found = []
        if self.critic == "actor" and critic == "shared":
            found.append(
                'placement.critic = "actor" and critic.kind = "shared": a head on the policy\'s hidden states is where '
                'they are; set placement.critic = "trainer", or critic.kind = "own"'
            )
        if runtime != "ray":
            found += [
                f'placement.{name} = "actor" needs runtime = "ray", and runtime is "{runtime}"; set one of them'
                for name in self.on_actors
            ]
        return found

    @property
    def on_actors(self) -> tuple[str, ...]:
        """The keys that say "actor"."""
        return tuple(name for name in ("reward_model", "reference", "critic") if getattr(self, name) == "actor")


class ReadingConfig(Config):
    ahead: bool = False
    """Reward models and the reference read a sample while it is being generated, so that only its last chunk is left
    when it is finished; what they say of it is the same to the last bit. Each sample is then read as it finishes, and
    so it is by an actor (see [placement]). Otherwise reward models score what has finished together, as a token tree,
    and the trainer measures the reference's logprobs batch by batch: better for short completions."""
    chunk_tokens: int = Field(256, ge=1)
    """Tokens read at a time."""
    cache_tokens: int = Field(65536, ge=0)
    """Each of these models keeps the keys and values of so many tokens, of samples under way and their prompts; those
    for which there is no room are read when they are finished. 0 reads nothing ahead."""
    own_thread: bool = False
    """A model that shares a process with an engine or the trainer reads on a thread of its own, for machines with a
    core to spare. Otherwise it reads ahead only while that process has nothing else to compute."""
