"""Cost models in seconds: protocols, constants, and costs from hardware profiles."""

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
        """Time from the lease to an engine without weights."""

    @property
    def cache_tokens(self) -> float:
        """Capacity of the KV cache in tokens, over all samples."""

    @property
    def longest_sample(self) -> float:
        """Most tokens of one sample, prompt and completion."""

    def decode_s(self, running: int, context_tokens: int, steps: int) -> float:
        """Time to decode `steps` tokens for each of `running` samples with `context_tokens` in total before.

        Increases with `steps`; 0 for 0 steps.
        """

    def prefill_s(self, tokens: int, samples: int = 1) -> float:
        """Time to prefill `tokens` in `samples` samples of equal length."""


class TrainerCosts(Protocol):
    """The trainer on its machines."""

    def accumulate_s(self, group: Group) -> float:
        """Time for the gradients of one group."""

    def commit_s(self) -> float:
        """Time of the optimizer steps of a batch."""

    def checkpoint_s(self) -> float:
        """Time to write or read the trainer's state."""


class WeightCosts(Protocol):
    """Transfer of a version from the trainer to a worker."""

    @property
    def nbytes(self) -> int:
        """Bytes of a snapshot."""

    @property
    def delta_nbytes(self) -> int:
        """Bytes of a delta to the previous version; 0: workers pull snapshots."""

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate of the trainer, shared by concurrent pulls."""

    @property
    def downlink_bytes_per_s(self) -> float:
        """Rate of one worker."""

    def publish_s(self) -> float:
        """Time until the version can be pulled."""

    def pull_s(self) -> float:
        """Time of a pull besides the transfer; the engine keeps decoding."""

    def swap_s(self) -> float:
        """Time in which the engine is paused."""


class ConstantEngine(Record):
    """A decode step takes constant time up to `plateau` samples and grows linearly beyond; contexts are free."""

    slots: int
    plateau: int  # samples decoded in the time of one
    step_s: float  # for up to `plateau` samples
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
        """The peak decoding rate."""
        return self.slots / self.decode_s(self.slots, 0, 1)


class ConstantTrainer(Record):
    """Training time is proportional to completion tokens."""

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
    """Constant times; by default infinite link rates."""

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
    """Several engines modelled as one: each has an equal share of samples and contexts.

    Their caches are pooled, so preemption caused by uneven shares is not modelled.
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
    """Trains on each group as it arrives, for its share of a microbatch's time.

    A prompt is computed once per group. Layers are gathered and launched once per microbatch, of which a group may be a
    fraction; the last microbatch of a batch is launched in full.
    """

    profile: TrainerProfile
    passes: float  # forward-sized, over all models: training passes plus one per frozen model
    microbatch_tokens: int  # per rank
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
