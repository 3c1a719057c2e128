"""Judges finished samples: a fault of a reward function marks its sample and never ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

from tidemill.config.task import RewardConfig, ScoringConfig
from tidemill.core.errors import ReaderLost, exception_text
from tidemill.core.records import RIGHT, Prompt, Reward, SampleId, Trajectory
from tidemill.envs.text.batch_rewards import Sample
from tidemill.envs.text.prompts import Task
from tidemill.envs.text.rewards import Context, NamedReward, QueuedReward, build_rewards
from tidemill.envs.text.user_calls import CallError, CallTimeout, HangingError, UserCalls

TOO_LARGE = "and no reward may be larger than 1e18"
MOST_HANGING = 64
"""With so many calls hanging past their deadline, further ones fail at once instead of taking threads."""
JUDGES_THE_ANSWER = frozenset({"exact", "numeric", "math_verify", "task"})
SAYS_NOTHING_OF_CORRECTNESS = frozenset({"random", "length", "model"})
LARGEST = 1e18
"""Of a reward's size: float32 holds its square, which deviations are made of."""


class RewardScorer:
    """Implements core.protocols.Scorer over a weighted list of rewards.

    Args:
        calls: where functions are called; closed with the scorer. By default one that no other scorer shares.
    """

    def __init__(
        self,
        rewards: tuple[NamedReward, ...],
        *,
        timeout_s: float,
        concurrency: int,
        calls: UserCalls | None = None,
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        counted = [reward for reward in rewards if reward.weight]
        self._tells_correctness = len(counted) == 1 and counted[0].right_at_one and counted[0].weight == 1
        self._turns = asyncio.Semaphore(concurrency)
        self._calls = calls or UserCalls(most_hanging=max(MOST_HANGING, concurrency))

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        """The weighted sum of all rewards; `components` holds each before its weight. `correct` is known where the only
        reward that counts is one whose value is 1 for a right answer and less for a wrong one.

        One that raises, passes its deadline or returns no finite number makes the sample's reward invalid: value 0,
        and a reason naming reward, fault and sample.

        Raises:
            ReaderLost: a reward model in a process of its own is gone for good.
        """
        sample = Sample(
            prompt=prompt,
            completion=trajectory.text,
            completion_tokens=trajectory.completion_length,
            sample_id=trajectory.sample_id,
            token_ids=trajectory.token_ids,
        )
        found: dict[str, float] = {}
        faults: list[str] = []
        together = [self._note(reward, sample, found, faults) for reward in self._rewards if reward.scores]
        alone = self._ask_in_turn(sample, found, faults)
        await (asyncio.gather(alone, *together) if together else alone)
        components = {reward.name: found[reward.name] for reward in self._rewards if reward.name in found}
        weighted = [reward.weight * components.get(reward.name, 0.0) for reward in self._rewards]
        if any(abs(each) > LARGEST for each in weighted):
            faults.append(f"with their weights rewards are {', '.join(f'{each:g}' for each in weighted)}, {TOO_LARGE}")
        if faults:
            reason = f"{'; '.join(faults)} (sample {_name(sample.sample_id)})"
            return Reward(value=0.0, components=components, valid=False, reason=reason)
        value = math.fsum(weighted)
        return Reward(value=value, components=components, correct=value >= RIGHT if self._tells_correctness else None)

    async def close(self) -> None:
        """End idle threads and cancel what is awaited; calls that hang stay until the process ends."""
        await self._calls.close()
        for reward in self._rewards:
            if reward.scores:
                await reward.scores.close()

    async def _ask_in_turn(self, sample: Sample, found: dict[str, float], faults: list[str]) -> None:
        """Those that judge one sample at a time, so many samples at once as are allowed. (The others are asked beside
        them: a limit would be one of their batches.)"""
        alone = [reward for reward in self._rewards if not reward.scores]
        async with contextlib.nullcontext() if all(reward.inline for reward in alone) else self._turns:
            for reward in alone:
                await self._note(reward, sample, found, faults)

    async def _note(self, reward: NamedReward, sample: Sample, found: dict[str, float], faults: list[str]) -> None:
        timeout_s = reward.timeout_s or self._timeout_s
        try:
            found[reward.name] = await self._ask(reward, sample, timeout_s)
        except (CallTimeout, TimeoutError):
            faults.append(f"reward {reward.name}: no result within {timeout_s:g} s")
        except HangingError as error:
            faults.append(f"reward {reward.name}: not asked, {error}")
        except CallError as error:
            faults.append(f"reward {reward.name}: {error}")
        except ReaderLost:  # of every sample from now on: nothing would be learned from
            raise
        except Exception as error:  # noqa: BLE001 -- whatever a reward raises is its sample's fault, not the run's
            faults.append(f"reward {reward.name}: {exception_text(error)}")

    async def _ask(self, reward: NamedReward, sample: Sample, timeout_s: float) -> float:
        if reward.inline:
            return _finite(reward.function(sample))
        if reward.scores:
            async with asyncio.timeout(timeout_s):
                return _finite(await reward.scores(sample))
        return await self._calls.call(lambda: reward.function(sample), convert=_finite, timeout_s=timeout_s)


def build_scorer(
    scoring: ScoringConfig,
    *,
    task: Task,
    seed: int,
    stop_strings: tuple[str, ...] | None = None,
    open_model: Callable[[RewardConfig], QueuedReward] | None = None,
    calls: UserCalls | None = None,
) -> RewardScorer:
    """The scorer of a run.

    Args:
        stop_strings: where `exact` and `numeric` stop reading a completion; the task's own by default.
        open_model: makes the function of a reward of kind "model"; without it there can be none.
        calls: where functions are called; None makes them.

    Raises:
        UserError: for a reward that cannot work.
    """
    stops = task.default_stop_strings if stop_strings is None else stop_strings
    rewards = build_rewards(scoring.rewards, Context(task=task, seed=seed, stop_strings=stops, open_model=open_model))
    return RewardScorer(rewards, timeout_s=scoring.timeout_s, concurrency=scoring.concurrency, calls=calls)


def evaluation_scoring(scoring: ScoringConfig, *, task: Task) -> ScoringConfig:
    """What evaluation judges by: being right where that can be told, whatever training adds up.

    It is the run's first reward that compares with the answer, with weight 1. Without one it is the others as they are,
    but for those that say nothing of being right. With none left it is the task's own scorer or the comparison with the
    answer: so a control run is still measured. Reward models are asked too, with weight 0: what they say of held-out
    samples stands beside the truth.
    """
    models = tuple(each.model_copy(update={"weight": 0.0}) for each in scoring.rewards if each.kind == "model")
    judging = tuple(each.model_copy(update={"weight": 1.0}) for each in scoring.rewards if each.kind in
                    JUDGES_THE_ANSWER)  # fmt: skip
    others = tuple(each for each in scoring.rewards if each.kind not in SAYS_NOTHING_OF_CORRECTNESS)
    fallback = RewardConfig(kind="exact" if task.check is None else "task")
    return scoring.model_copy(update={"rewards": (judging[:1] or others or (fallback,)) + models})


def _finite(result: Any) -> float:
    """
    Raises:
        CallError: the result is not a finite number of a size that can be used.
    """
    if isinstance(result, str | bytes) or not hasattr(type(result), "__float__"):
        raise CallError(exception_text(TypeError(f"returned {result!r:.60}, which is no number")))
    value = float(result)
    if not math.isfinite(value):
        raise CallError(f"ValueError: returned {value}, which is not finite")
    if abs(value) > LARGEST:
        raise CallError(f"ValueError: returned {value:g}, {TOO_LARGE}")
    return value


def _name(sample_id: SampleId) -> str:
    return f"{sample_id.purpose} {sample_id.prompt_id} epoch {sample_id.epoch} index {sample_id.index}"
