"""Handwritten trajectories and groups."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.records import (
    Group,
    PolicyVersion,
    Reward,
    SampleId,
    Segment,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)

VERSION = PolicyVersion(number=0, digest="start")


def trajectory(
    prompt: Sequence[int],
    completion: Sequence[int],
    reward: float,
    *,
    index: int = 0,
    logprobs: Sequence[float] | None = None,
    valid: bool = True,
    weight: float = 1.0,
) -> Trajectory:
    """A single-turn sample: the prompt's tokens, then the trained completion."""
    total = len(prompt) + len(completion)
    return Trajectory(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id=str(list(prompt)), epoch=0, index=index),
        token_ids=pack_tokens([*prompt, *completion]),
        segments=(
            Segment(role="prompt", start=0, end=len(prompt), trained=False),
            Segment(role="action", start=len(prompt), end=total, trained=True),
        ),
        rollout_logprobs=pack_logprobs(logprobs if logprobs is not None else [-1.0] * len(completion)),
        versions=(VersionRun(version=VERSION, start=0, end=len(completion)),),
        finish="stop",
        reward=Reward(value=reward, valid=valid, reason="" if valid else "made invalid"),
        weight=weight,
    )


def group(position: int, trajectories: Sequence[Trajectory]) -> Group:
    return Group(position=position, prompt_id=trajectories[0].sample_id.prompt_id, trajectories=tuple(trajectories))
