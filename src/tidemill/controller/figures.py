"""What a batch was like, in numbers: the controller's share of a step's metrics. Names are those of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from tidemill.controller.in_flight import Tally
from tidemill.controller.samples import Sample
from tidemill.core.records import PolicyVersion, Reward, Trajectory


def sample_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards (over valid samples; standard deviation with ddof 0), lengths in tokens, and what was left out."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward and trajectory.reward.valid]
    lengths = [trajectory.completion_length for trajectory in trajectories]
    figures = {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_fraction": fmean(trajectory.truncated for trajectory in trajectories),
        "samples": float(len(trajectories)),
        "samples_invalid": float(len(trajectories) - len(rewards)),
        "samples_left_out": float(sum(trajectory.weight == 0 for trajectory in trajectories)),
    }
    if rewards:
        values = [reward.value for reward in rewards]
        figures |= {"reward_mean": fmean(values), "reward_std": pstdev(values), **_components(rewards)}
    return figures


def _components(rewards: Sequence[Reward]) -> dict[str, float]:
    """Mean of each component over the samples that have it; a single one would only repeat the reward."""
    names = dict.fromkeys(name for reward in rewards for name in reward.components)
    if len(names) < 2:
        return {}
    return {
        f"reward/{name}": fmean(reward.components[name] for reward in rewards if name in reward.components)
        for name in names
    }


def batch_figures(samples: Sequence[Sample], tally: Tally, version: PolicyVersion) -> dict[str, float]:
    """Token counts; `version` is the one the batch was learned from.

    `tokens_generated` counts every completion token of the batch, `tokens_recovered` those of them that came from the
    journal, `tokens_other_weights` those made by weights that bear the version's number but not its digest: after a
    restart a version may have been made again, a little different.
    """
    runs = [run for sample in samples for run in sample.versions]
    other = (r.end - r.start for r in runs if r.version.number == version.number and r.version != version)
    return {
        "tokens_generated": float(sum(sample.length for sample in samples)),
        "tokens_recovered": float(sum(sample.recovered for sample in samples)),
        "tokens_other_weights": float(sum(other)),
        "prompt_tokens_computed": float(tally.prompt_tokens_computed),
        "prompt_tokens_reused": float(tally.prompt_tokens_reused),
        "deltas_ignored": float(tally.ignored.total()),
        "tokens_recomputed": float(tally.tokens_recomputed),
        "tokens_discarded": float(tally.tokens_discarded),
        "samples_restarted": float(tally.samples_restarted),
        "groups_dropped": float(tally.groups_dropped),
        "groups_redrawn": float(tally.groups_redrawn),
    }
