"""How reward models and the reference read samples."""

from __future__ import annotations

from pydantic import Field

from tidemill.config.base import Config


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
