"""Cost models in seconds: protocols, and costs from hardware profiles."""

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


class WeightCosts(Record):
    """Transfer of a version from the trainer to a worker; by default instantaneous."""

    nbytes: int = 0  # of a snapshot
    delta_nbytes: int = 0  # of a delta to the previous version; 0: workers pull snapshots
    uplink_bytes_per_s: float = math.inf  # of the trainer, shared by concurrent pulls
    downlink_bytes_per_s: float = math.inf  # of one worker
    publish_s: float = 0.0  # until the version can be pulled
    pull_s: float = 0.0  # of a pull besides the transfer; the engine keeps decoding
    swap_s: float = 0.0  # in which the engine is paused


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
        return 0.0
