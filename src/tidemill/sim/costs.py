"""The time that things take, in seconds: protocols, constants, and costs from profiles."""

from __future__ import annotations

import math
from typing import Protocol

from tidemill.core.records import Group, Record
from tidemill.hardware.engine_profile import EngineProfile
from tidemill.hardware.trainer_profile import TrainerProfile


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


class ProfiledEngine(Record):
    """Several engines side by side as if they were one: each has an equal part of the samples and of their contexts.

    Their caches count as one, so that what an uneven part would put back is not seen.
    """

    profile: EngineProfile
    engines: int = 1
    boot_s: float = 0.0

    @property
    def slots(self) -> int:
        return self.engines * self.profile.slots

    @property
    def cache_tokens(self) -> float:
        return self.engines * self.profile.cache_tokens

    @property
    def longest_sample(self) -> float:
        return self.profile.cache_tokens

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        if not running:
            return 0.0
        busy = min(running, self.engines)
        return self.profile.decode_s(running / busy, context_tokens / busy, steps)

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        return samples * self.profile.prefill_s(tokens / samples) / self.engines if samples else 0.0


class ProfiledTrainer(Record):
    """Learns from a group as it comes: its share of a microbatch's time.

    A prompt is computed once for its group. Layers are gathered and launched once a microbatch, of which a group may be
    a part; a batch's last one is launched whole, however little is in it.
    """

    profile: TrainerProfile
    passes: float  # forward-sized, of all models together: learning, and one of each frozen model that reads
    microbatch_tokens: int  # of one rank
    checkpoint: float = 0.0  # seconds

    def accumulate_s(self, group: Group) -> float:
        prompt = group.trajectories[0].prompt_length
        lengths = [prompt + trajectory.completion_length for trajectory in group.trajectories]
        tokens = sum(lengths) - (len(lengths) - 1) * prompt
        context = sum(length**2 for length in lengths) / sum(lengths)
        microbatches = tokens / self.profile.ranks / self.microbatch_tokens
        return self.profile.pass_s(tokens, context, passes=self.passes, microbatches=microbatches)

    def commit_s(self) -> float:
        return self.profile.update_s + self.passes * self.profile.launch_s

    def checkpoint_s(self) -> float:
        return self.checkpoint
