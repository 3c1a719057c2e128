"""What things take, in seconds: protocols that profiles of engines, trainers and networks implement; and constants."""

from __future__ import annotations

import math
from typing import Protocol

from tidemill.core.records import Group, Record


class EngineCosts(Protocol):
    """One worker's engine on its machine."""

    @property
    def slots(self) -> int:
        """Samples decoded at once."""

    @property
    def boot_s(self) -> float:
        """From the lease to an engine without weights."""

    @property
    def cache_tokens(self) -> float:
        """Tokens whose keys and values fit, of all samples together."""

    @property
    def longest_sample(self) -> float:
        """Tokens of one sample at most, prompt and completion."""

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        """`steps` tokens of each of `running` samples, which together have `context_tokens` before the first of them.

        Rises with `steps`, and is 0 for none.
        """

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        """Keys and values of so many tokens, in `samples` samples of one length."""


class TrainerCosts(Protocol):
    """The trainer on its machines."""

    def accumulate_s(self, group: Group) -> float:
        """Gradients of one group."""

    def commit_s(self) -> float:
        """The optimizer's part of a batch."""

    def checkpoint_s(self) -> float:
        """Writing the trainer's state, or reading it."""


class WeightCosts(Protocol):
    """A version on its way from the trainer to a worker."""

    @property
    def nbytes(self) -> int:
        """Of a whole snapshot."""

    @property
    def delta_nbytes(self) -> int:
        """Of the difference from the version before; 0 where whole snapshots are pulled."""

    @property
    def uplink_bytes_per_s(self) -> float:
        """Of the trainer, shared by all who pull at once."""

    @property
    def downlink_bytes_per_s(self) -> float:
        """Of one worker."""

    def publish_s(self) -> float:
        """Until it can be pulled."""

    def pull_s(self) -> float:
        """What a pull takes beside the bytes on their way, while the engine goes on."""

    def swap_s(self) -> float:
        """The engine stands still."""


class ConstantEngine(Record):
    """A decode step takes as long for `plateau` samples as for one, and longer for more; contexts cost nothing."""

    slots: int
    plateau: int  # samples that cost no more than one
    step_s: float  # of up to `plateau` samples
    prefill_tokens_per_s: float
    boot_s: float = 0.0
    cache_tokens: float = math.inf

    @property
    def longest_sample(self) -> float:
        return self.cache_tokens

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        return steps * self.step_s * max(1.0, running / self.plateau)

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return tokens / self.prefill_tokens_per_s

    @property
    def peak_tokens_per_s(self) -> float:
        """The most it can decode."""
        return self.slots / self.decode_s(self.slots, 0, 1)


class ConstantTrainer(Record):
    """A group takes as long as it has completion tokens."""

    tokens_per_s: float
    commit: float = 0.0  # seconds
    checkpoint: float = 0.0  # seconds

    def accumulate_s(self, group: Group) -> float:
        return sum(trajectory.completion_length for trajectory in group.trajectories) / self.tokens_per_s

    def commit_s(self) -> float:
        return self.commit

    def checkpoint_s(self) -> float:
        return self.checkpoint


class ConstantWeights(Record):
    """Seconds as given; without links, for whoever pulls and however many do."""

    nbytes: int = 0
    delta_nbytes: int = 0
    uplink_bytes_per_s: float = math.inf
    downlink_bytes_per_s: float = math.inf
    publish: float = 0.0  # seconds
    pull: float = 0.0  # seconds
    swap: float = 0.0  # seconds

    def publish_s(self) -> float:
        return self.publish

    def pull_s(self) -> float:
        return self.pull

    def swap_s(self) -> float:
        return self.swap
