"""Which network."""

from __future__ import annotations

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse
from tidemill.config.lora import LoraConfig

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
