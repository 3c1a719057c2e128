"""Profiles of engines and trainers as the costs of simulated twins."""

from __future__ import annotations

from tidemill.core.records import Group, Record
from tidemill.sim.profiles.engine import EngineProfile
from tidemill.sim.profiles.trainer import TrainerProfile


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
