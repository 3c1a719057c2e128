"""Mean reward and accuracy of greedy completions of held-out prompts, by the worker that generates for training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import msgspec

from tidemill.controller.collection import collecting
from tidemill.controller.entries import EvalResult
from tidemill.controller.in_flight import InFlight, Plan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout import Rollout
from tidemill.core.errors import UserError
from tidemill.core.protocols import Scorer
from tidemill.core.records import RIGHT, PolicyVersion, Prompt, Record, SamplingParams, Trajectory

HELD_OUT = "held_out"


class Evaluation(Record):
    """An evaluation's figures and its samples, in the order of the prompts."""

    result: EvalResult
    samples: tuple[Trajectory, ...]


async def evaluate(
    *,
    step: int,
    version: PolicyVersion,
    prompts: Sequence[Prompt],
    rollout: Rollout,
    scorer: Scorer,
    sampling: SamplingParams,
    seed: int,
    name: str = HELD_OUT,
) -> Evaluation:
    """One greedy completion per prompt, judged by `scorer`.

    `scorer` is not the training one: what a run is rewarded for (a length, a random control) need not be what it is
    measured by. Nothing is journalled; an interrupted evaluation starts anew.

    Args:
        step: committed batches behind `version`, which the worker must have loaded.
        rollout: its ledger and scorer are not used.
        sampling: the temperature is set to 0.

    Raises:
        UserError: there are no prompts.
        Exception: as `collecting`.
    """
    if not prompts:
        raise UserError(
            "the task has no held-out prompts", where="task", cure="keep some (held_out_fraction, held_out_path)"
        )
    rollout = replace(
        rollout,
        scorer=scorer,
        ledger=Ledger(None),
        reading=None,
        truncated="trained",
        phase="evaluation",
        window_s=math.inf,
    )
    greedy = msgspec.structs.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    plan = Plan(purpose=f"eval:{name}", run_seed=seed, group_size=1, sampling=greedy)
    in_flight = InFlight(plan, version_number=version.number)
    groups = plan_groups([(0, prompt) for prompt in prompts], first_position=0, from_version=version.number)
    in_flight.open(groups, prompts)
    began = rollout.clock.now()
    async with collecting(in_flight, rollout) as scored:
        by_prompt = {trajectory.sample_id.prompt_id: trajectory async for trajectory in scored}
    samples = tuple(by_prompt[prompt.prompt_id] for prompt in prompts)
    return Evaluation(result=judged(name, step, version, samples, rollout.clock.now() - began), samples=samples)


def rewards_of(samples: Iterable[Trajectory]) -> list[float]:
    """The valid rewards."""
    return [sample.reward.value for sample in samples if sample.reward is not None and sample.reward.valid]


def correct(trajectory: Trajectory) -> bool:
    """Whether the completion is right by its reward: valid, and 1 or more where the reward does not tell."""
    reward = trajectory.reward
    if reward is None or not reward.valid:
        return False
    return reward.value >= RIGHT if reward.correct is None else reward.correct


def right_or_wrong(samples: Sequence[Trajectory]) -> list[bool] | None:
    """Whether each completion is right; None where rewards are graded, or none is valid.

    Rewards that do not tell (`Reward.correct`) are right or wrong where all of them are 0 or 1. A sample without a
    valid reward counts as wrong.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None and sample.reward.valid]
    if not rewards or any(reward.correct is None and reward.value not in (0.0, 1.0) for reward in rewards):
        return None
    return [correct(sample) for sample in samples]


def judged(
    name: str, step: int, version: PolicyVersion, samples: Sequence[Trajectory], duration_s: float
) -> EvalResult:
    """The figures of greedy samples, of which there must be at least one."""
    rewards, right = rewards_of(samples), right_or_wrong(samples)
    return EvalResult(
        name=name,
        step=step,
        version=version,
        reward_mean=fmean(rewards) if rewards else None,
        reward_stderr=stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
        greedy_accuracy=None if right is None else fmean(right),
        n=len(samples),
        invalid=len(samples) - len(rewards),
        truncated_fraction=fmean(sample.truncated for sample in samples),
        completion_tokens_mean=fmean(sample.completion_length for sample in samples),
        duration_s=duration_s,
    )
