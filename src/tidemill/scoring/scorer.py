"""Scores finished samples. An error of a reward function makes its sample invalid and never ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import RewardConfig, ScoringConfig
from tidemill.core.errors import ScorerLost, UserError, exception_text
from tidemill.core.records import Prompt, Reward, Trajectory
from tidemill.data.prompts import ANSWER, Task
from tidemill.extensions.calls import MAX_HANGING, CallError, CallTimeout, HangingError, UserCalls
from tidemill.extensions.function_pool import FunctionProcesses
from tidemill.extensions.registry import resolve
from tidemill.extensions.results import LARGEST, TOO_LARGE, Score
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.builtin_rewards import (
    NOT_ABOUT_CORRECTNESS,
    Context,
    NamedReward,
    QueuedReward,
    build_rewards,
    judges,
)
from tidemill.scoring.user_rewards import WHERE, UserReward

ROUNDING = 1e-6


class RewardCalls:
    """What calls reward functions: threads of this process and other processes.

    Args:
        concurrency: `scoring.concurrency`.
    """

    def __init__(self, concurrency: int) -> None:
        self.threads = UserCalls(max_hanging=max(MAX_HANGING, concurrency))
        self.processes = FunctionProcesses(concurrency)

    async def close(self) -> None:
        """End processes and idle threads, and cancel awaitables; threads that hang stay until the process ends."""
        await self.threads.close()
        await self.processes.close()


class RewardScorer:
    """Implements core.protocols.Scorer with a weighted list of rewards.

    Args:
        calls: runs the functions; closed with the scorer. By default a new one.
    """

    def __init__(
        self,
        rewards: tuple[NamedReward, ...],
        *,
        timeout_s: float,
        concurrency: int,
        calls: RewardCalls | None = None,
    ) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        counted = [reward for reward in rewards if reward.weight]
        judging = counted if len(counted) == 1 else [reward for reward in counted if reward.judges]
        self._judge = judging[0] if len(judging) == 1 and judging[0].weight > 0 else None
        self._turns = asyncio.Semaphore(concurrency)
        self._calls = calls or RewardCalls(concurrency)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        """The weighted sum of all rewards; `components` holds each before weighting. `correct` is set only if the one
        reward with a non-zero weight tells it (`NamedReward.correct_at`), or of several the only one that judges.

        A reward that raises, times out or returns no finite number makes the sample's reward invalid: value 0 and a
        reason that names reward, error and sample.

        Raises:
            ScorerLost: the process of a reward model, or that of the task's scorer, ended and cannot be restarted.
        """
        if trajectory.fault:
            return Reward(value=0.0, valid=False, reason=trajectory.fault)
        if trajectory.outcome is not None:
            reported = {"environment": trajectory.outcome}
            return Reward(value=trajectory.outcome, components=reported, correct=self._correct(reported))
        sample = RewardInput(
            prompt=prompt,
            completion=trajectory.final,
            completion_tokens=trajectory.trained_length,
            sample_id=trajectory.sample_id,
            token_ids=trajectory.token_ids,
            prompt_tokens=trajectory.prompt_length,
            step=trajectory.versions[-1].version.number + 1 if trajectory.versions else 0,
            turns=trajectory.turns,
        )
        found: dict[str, Score] = {}
        faults: list[str] = []
        scoring = [self._note(reward, sample, found, faults) for reward in self._rewards if reward.scores]
        if len(scoring) < len(self._rewards):
            scoring.append(self._score_unqueued(sample, found, faults))
        await (scoring[0] if len(scoring) == 1 else asyncio.gather(*scoring))
        components: dict[str, float] = {}
        weighted: list[float] = []
        applying = [(reward, score) for reward in self._rewards if (score := found.get(reward.name)) is not None]
        for reward, (value, parts) in applying:
            components |= {reward.name: value, **{f"{reward.name}/{part}": each for part, each in parts.items()}}
            weighted.append(reward.weight * value)
        if any(abs(each) > LARGEST for each in weighted):
            faults.append(f"the weighted rewards are {', '.join(f'{each:g}' for each in weighted)}, {TOO_LARGE}")
        if all(reward.gold for reward, _ in applying) and not faults:
            faults.append("no reward applies: all returned None")
        if faults:
            of = sample.sample_id
            named = f"{of.purpose} {of.prompt_id} epoch {of.epoch} index {of.index}"
            reason = f"{'; '.join(faults)} (sample {named})"
            return Reward(value=0.0, components=components, valid=False, reason=reason)
        return Reward(value=math.fsum(weighted), components=components, correct=self._correct(components))

    def _correct(self, components: dict[str, float]) -> bool | None:
        """By the kind of the reward, never by its values: a graded reward may happen to be 0 or 1."""
        judge = self._judge
        if judge is None or judge.correct_at is None or judge.name not in components:
            return None
        return components[judge.name] >= judge.correct_at - ROUNDING

    async def close(self) -> None:
        """See `RewardCalls.close`."""
        await self._calls.close()
        for reward in self._rewards:
            if reward.scores:
                await reward.scores.close()

    async def _score_unqueued(self, sample: RewardInput, found: dict[str, Score], faults: list[str]) -> None:
        """Call the rewards that score one sample at a time, limited to `concurrency` samples. Queued rewards run
        concurrently without this limit, which would also limit their batches."""
        alone = [reward for reward in self._rewards if not reward.scores]
        async with contextlib.nullcontext() if all(reward.inline for reward in alone) else self._turns:
            for reward in alone:
                await self._note(reward, sample, found, faults)

    async def _note(self, reward: NamedReward, sample: RewardInput, found: dict[str, Score], faults: list[str]) -> None:
        timeout_s = reward.timeout_s or self._timeout_s
        try:
            if reward.needs_answer:
                sample.answer()
            found[reward.name] = await self._ask(reward, sample, timeout_s)
        except ScorerLost:  # affects every further sample
            raise
        except Exception as error:  # noqa: BLE001 -- whatever a reward raises is its sample's fault, not the run's
            if not reward.gold:
                fault = _fault(error, timeout_s)
                if reward.place and ": returned " in fault:  # if it raised, the fault has the line
                    fault += f" ({reward.place})"
                faults.append(f"reward {reward.name}: {fault}")

    async def _ask(self, reward: NamedReward, sample: RewardInput, timeout_s: float) -> Score:
        if reward.inline:
            return reward.value(reward.function(sample))
        if reward.scores and not reward.queues:
            return reward.value(await reward.scores(sample))
        if reward.scores:
            async with asyncio.timeout(timeout_s):
                return reward.value(await reward.scores(sample))
        threads = self._calls.threads
        return await threads.call(lambda: reward.function(sample), convert=reward.value, timeout_s=timeout_s)


def _fault(error: Exception, timeout_s: float) -> str:
    if isinstance(error, CallTimeout | TimeoutError):
        return f"no result within {timeout_s:g} s"
    if isinstance(error, HangingError):
        return f"not called, {error}"
    return str(error) if isinstance(error, CallError) else exception_text(error)


def build_scorer(
    scoring: ScoringConfig,
    *,
    task: Task,
    seed: int,
    stop_strings: tuple[str, ...] | None = None,
    open_model: Callable[[RewardConfig], QueuedReward] | None = None,
    calls: RewardCalls | None = None,
    sandbox: SandboxConfig = SandboxConfig(),  # noqa: B008 -- frozen
    judge_folder: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> RewardScorer:
    """The scorer of a run.

    Args:
        stop_strings: where `exact` and `numeric` stop reading a completion; by default the task's.
        open_model: makes the function of rewards of kind "model"; None refuses them.
        calls: runs the functions; by default a new one.
        sandbox: where rewards of kind "tests" and "task" run programs.
        judge_folder: where verdicts and costs of judges are kept; by default in the user's cache.
        warn: gets a message for every function that cannot run in another process.

    Raises:
        UserError: a reward cannot work.
    """
    stops = task.default_stop_strings if stop_strings is None else stop_strings
    calls = calls or RewardCalls(scoring.concurrency)
    context = Context(
        task=task,
        seed=seed,
        stop_strings=stops,
        timeout_s=scoring.timeout_s,
        concurrency=scoring.concurrency,
        calls=calls.threads,
        processes=calls.processes,
        sandbox=sandbox,
        open_model=open_model,
        judge_folder=judge_folder,
        warn=warn,
    )
    rewards = build_rewards(scoring.rewards, context)
    return RewardScorer(rewards, timeout_s=scoring.timeout_s, concurrency=scoring.concurrency, calls=calls)


def evaluation_scoring(scoring: ScoringConfig, *, task: Task, rewards: tuple[RewardConfig, ...] = ()) -> ScoringConfig:
    """The rewards used for evaluation: they measure correctness if possible, whatever training optimizes.

    The run's first reward that compares with the answer or declares what is correct, with weight 1. Without one: the
    run's other rewards, except random, length and model rewards, and judges and people that are gold. If none is left:
    the task's scorer or the comparison with the answer, so that a control run is measured too; without answers, all
    rewards of the run. Reward models are included with weight 0, so that their scores of held-out samples can be
    compared with correctness.

    Args:
        rewards: `eval.rewards`; if there are any, they are used instead.
    """
    if rewards:
        return scoring.model_copy(update={"rewards": rewards})
    models = tuple(each.model_copy(update={"weight": 0.0}) for each in scoring.rewards if each.kind == "model")
    as_reward = {"weight": 1.0, "role": "reward"}
    judging = tuple(each.model_copy(update=as_reward) for each in scoring.rewards if judges(each))
    others = tuple(
        each
        for each in scoring.rewards
        if each.kind not in NOT_ABOUT_CORRECTNESS and not (each.role == "gold" and each.kind in ("judge", "people"))
    )
    rows = task.held_out_rows
    if not (judging or others) and task.check is None and rows is not None and rows.mostly_missing(ANSWER):
        return scoring
    fallback = RewardConfig(kind="exact" if task.check is None else "task")
    return scoring.model_copy(update={"rewards": (judging[:1] or others or (fallback,)) + models})


def check_rewards(rewards: Sequence[RewardConfig], task: Task) -> None:
    """Check that the rewards of an evaluation can score every set of the task.

    Raises:
        UserError: a function takes a column that a set lacks, or a reward scores only the prompts of its task.
    """
    for reward in rewards if task.eval_sets else ():
        if reward.kind == "task":
            what = 'the reward "task" scores only the prompts of its task'
            hint = 'set eval.rewards = [{ kind = "exact" }], or another reward'
            raise UserError(what, where="eval.sets", hint=hint)
        if reward.kind == "python":
            extension = resolve(reward.function, "reward", where=WHERE)
            for name, found in task.eval_sets.items():
                try:
                    UserReward(extension, columns=found.columns, weights=reward.weights)
                except UserError as error:
                    where = f"eval.sets, {name}"
                    hint = f"{error.hint}; add the column, or set eval.rewards"
                    raise UserError(f"{error.what} in these rows", where=where, hint=hint) from error
