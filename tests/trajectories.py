"""Handwritten trajectories and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tidemill.core.records import (
    Group,
    PolicyVersion,
    Reward,
    SampleId,
    Segment,
    Trajectory,
    Turn,
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


Part = tuple[Literal["action", "observation", "context"], Sequence[int]]
"""Role and tokens of a segment."""


def agent_trajectory(
    prompt: Sequence[int],
    parts: Sequence[Part],
    rewards: Sequence[float],
    *,
    total: float | None = None,
    states: Sequence[str] = (),
    index: int = 0,
    valid: bool = True,
    **changed: Any,
) -> Trajectory:
    """A trajectory whose actions are its turns, with their `rewards`.

    Args:
        total: the trajectory's reward; None: the sum of the turns' rewards.
        states: `state_key` of each turn; by default all differ.
        changed: other fields.
    """
    tokens, turns = list(prompt), list[Turn]()
    segments = [Segment(role="prompt", start=0, end=len(prompt), trained=False)]
    for role, ids in parts:
        start, end = len(tokens), len(tokens) + len(ids)
        segments.append(Segment(role=role, start=start, end=end, trained=role == "action"))
        tokens += ids
        if role == "action":
            number = len(turns)
            state = states[number] if states else f"{index}.{number}"
            own = (start - len(prompt), end - len(prompt))
            turns.append(Turn(start=own[0], end=own[1], text="", reward=rewards[number], state_key=state))
    length, value = len(tokens) - len(prompt), sum(rewards) if total is None else total
    fields: dict[str, Any] = {
        "sample_id": SampleId(run_seed=0, purpose="train", prompt_id=str(list(prompt)), epoch=0, index=index),
        "token_ids": pack_tokens(tokens),
        "segments": tuple(segments),
        "rollout_logprobs": pack_logprobs([-1.0] * sum(turn.end - turn.start for turn in turns)),
        "versions": (VersionRun(version=VERSION, start=0, end=length),),
        "finish": "stop",
        "turns": tuple(turns),
        "reward": Reward(value=value, valid=valid, reason="" if valid else "made invalid"),
        "weight": float(valid),
    }
    return Trajectory(**{**fields, **changed})


def group(position: int, trajectories: Sequence[Trajectory]) -> Group:
    return Group(position=position, prompt_id=trajectories[0].sample_id.prompt_id, trajectories=tuple(trajectories))
