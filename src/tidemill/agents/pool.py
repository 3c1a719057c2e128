"""The environments of a run: turns are answered within budgets and deadlines, lost states restored, faults attributed.

act ── plan the turn's calls ── hold a host ── restore the state, if it was lost ── make the calls ── observation
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.agents.environment import Environment
from tidemill.agents.hosts import Host
from tidemill.agents.instances import CallOutcome, Work, clean
from tidemill.agents.placement import EnvironmentHosts, Live
from tidemill.agents.turn_plan import FaultError, PlannedCall, TurnPlanner, first_text, task_of, task_seed
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import GuardStop, UserError
from tidemill.core.protocols import CallLog, TurnFormat
from tidemill.core.records import Call, Episode, EpisodeEnd, Message, Observation, SampleId, pack_tokens
from tidemill.extensions.processes import LostError
from tidemill.extensions.registry import Extension

EVALUATION = "eval"
"""Start of the purposes of evaluations' samples."""
BACKOFF_S = 0.1
"""Wait before the second attempt; doubles with each further one."""
PLAIN_ANSWERS = ("", "0")
"""Answers whose score shows whether `score` works, besides the row's own."""
COUNTS = ("calls", "mistakes", "timeouts", "cut", "cleaned", "retries", "failures", "faults")


class FailureError(Exception):
    """The episode breaks its environment."""


@dataclass(slots=True)
class Answering:
    """A turn while it is answered."""

    episode: Episode
    live: Live
    log: CallLog
    planned: list[PlannedCall]
    done: dict[int, CallOutcome]  # of the planned calls, by index


class EnvironmentPool:
    """Implements `core.protocols.Environments` for a user's class.

    Args:
        environment: of the class; see `find_environment`.
        run_id: part of the call ids, which are unique across runs.
        report: receives the first failure, and the first fault of each method.

    Raises:
        UserError: a tool of the class is wrong.
    """

    def __init__(
        self,
        environment: Extension,
        config: EnvConfig,
        format: TurnFormat,  # noqa: A002
        *,
        sandbox: SandboxConfig = SandboxConfig(),  # noqa: B008 -- frozen
        run_id: str = "",
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.environment: type[Environment] = environment.function  # type: ignore[assignment]
        self.config = config
        self._name, self._format, self._run_id, self._report = environment.name, format, run_id, report
        self.planner = TurnPlanner(self.environment, config, format, sandbox)
        self.schemas = [each.schema for each in self.planner.tools.values()]
        self.placement = EnvironmentHosts(self.environment, config, sandbox, warn=report)
        self._live: dict[SampleId, Live] = {}
        self._keys, self._session = itertools.count(1), uuid.uuid4().hex[:8]
        self._counts = dict.fromkeys(COUNTS, 0)
        self._reported: dict[str, str] = {}  # first message of each kind
        self._faults: list[str] = []  # that count

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        """See `core.protocols.Environments`."""
        live = self._live.get(episode.sample_id)
        if live is None:
            live = self._live[episode.sample_id] = Live(next(self._keys))
        try:
            observation = await self._answer(live, episode, calls)
        except FailureError as error:
            self._counts["failures"] += 1
            self._report_first("failure", f"an episode broke the environment {self._name}: {error}")
            given = self.config.failure_reward
            outcome = self.environment.lowest_reward if given is None else given
            observation = Observation(end="failure", reason=str(error), outcome=outcome)
        except FaultError as error:
            observation = self._fault(error)
        if observation.end:
            self.placement.release(live)
        return observation

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for each in sample_ids:
            if (live := self._live.pop(each, None)) is not None:
                self.placement.release(live)

    def take_counts(self) -> dict[str, int]:
        """Calls made, mistakes of agents, deadlines that fired, observations cut and cleaned, retries after lost
        processes, episodes that ended in failure and in fault, since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
        return counts

    async def reset(self, host: Host, key: int, task: dict[str, Any]) -> CallOutcome:
        """Start an episode in a host.

        Raises:
            LostError: the host ended, or `reset` did not return in time.
            FaultError: `reset` failed.
        """
        arguments = json.dumps({"task": task, "seed": task_seed(task)})
        work = Work(index=0, episode=key, method="reset", arguments=arguments)
        outcome = await host.make(work, self.config.call_timeout_s)
        if outcome.error:
            raise FaultError(outcome.text, f"{self._name}.reset")
        return outcome

    async def close(self) -> None:
        await self.placement.close()

    async def _answer(self, live: Live, episode: Episode, log: CallLog) -> Observation:
        """Raises FailureError, FaultError."""
        turn, uses_tools = episode.turns[-1], self.planner.uses_tools
        planned = self.planner.calls(turn)
        answer = self.planner.answer(planned, turn)
        left = self.config.calls - sum(len(each.calls) for each in episode.turns[:-1])
        over = uses_tools and len(planned) > left
        if over:
            planned, answer = planned[:left], None
        answering = Answering(episode, live, log, planned, self._already_done(episode, planned))
        await self._perform(answering)
        outcomes = [answering.done[call.index] for call in planned]
        late = sum(each.error == "late" for each in outcomes)
        self._counts["timeouts"] += late
        self._counts["mistakes"] += sum(each.error == "raised" for each in outcomes)
        self._counts["cut"] += sum(each.cut > 0 for each in outcomes)
        self._counts["cleaned"] += sum(each.cleaned for each in outcomes)
        if lacking := "".join(sorted(self.planner.lacking)):
            what = f"observations of {self._name} have characters that the model's vocabulary lacks"
            self._report_first("vocabulary", f"{what}; they are left out: {lacking!r:.40}")
        end: EpisodeEnd = ""
        if over:
            end = "calls"
        elif answer is not None or any(each.done for each in outcomes):
            end = "done"
        elif len(episode.turns) >= self.config.turns:
            end = "turns"
        elif live.spent_s >= self.config.seconds:
            end = "seconds"
        reward = 0.0 if uses_tools else outcomes[0].reward
        if answer is not None and self.planner.scores:
            answering.planned = [*planned, self.planner.score(len(planned), answer)]
            await self._perform(answering)
            scored = answering.done[len(planned)]
            if scored.error:
                raise await self._blame_score(episode, answer, scored)
            reward = scored.reward
        if live.answered >= 0:
            live.answered = len(episode.turns)
        text = "\n".join(each.text for each in outcomes)
        token_ids, new_branch = ([], False) if end else self._encode(episode, outcomes)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        calls = [self._record(episode, call, outcome) for call, outcome in zip(planned, outcomes, strict=True)]
        return Observation(
            text=text,
            token_ids=pack_tokens(token_ids),
            new_branch=new_branch,
            reward=reward,
            end=end,
            final=answer,
            state_key=digest if uses_tools else outcomes[0].state_key or digest,
            calls=tuple(calls) if uses_tools else (),
            timeouts=late,
        )

    def _already_done(self, episode: Episode, planned: Sequence[PlannedCall]) -> dict[int, CallOutcome]:
        """Outcomes of calls that are in the journal, and of those that are not made.

        Raises:
            FaultError: a call that must not be repeated was interrupted.
        """
        done: dict[int, CallOutcome] = {}
        for call in planned:
            if (finished := episode.finished.get(call.index)) is not None:
                done[call.index] = self.planner.recorded(call, finished)
            elif call.mistake:
                mistake = CallOutcome(index=call.index, text=clean(call.mistake), error="raised")
                done[call.index] = self.planner.settle(call, mistake)
            elif self.planner.finishes(call):
                done[call.index] = CallOutcome(index=call.index)
            elif call.index in episode.started:
                what = f"{self._name}.{call.name} was interrupted, and must not be repeated"
                raise FaultError(what, "interrupted", counted=False)
        return done

    def _encode(self, episode: Episode, outcomes: Sequence[CallOutcome]) -> tuple[list[int], bool]:
        """Raises FaultError: the model's vocabulary cannot express the texts."""
        role = "tool" if self.planner.uses_tools else "user"
        messages = [Message(role=role, content=each.text) for each in outcomes]
        try:
            return self._format.answer(episode, messages, tools=self.schemas)
        except UserError as error:
            raise FaultError(f"an observation cannot be encoded: {error.what}") from error

    async def _perform(self, answering: Answering) -> None:
        """Make the calls that are not done, again in another host if theirs is lost.

        Raises:
            FailureError, FaultError: they could not be made.
        """
        live, turn = answering.live, len(answering.episode.turns)
        attempt = 1
        while pending := [call for call in answering.planned if call.index not in answering.done]:
            pending = pending[: self.config.concurrency]
            try:
                async with self.placement.hold(live, len(pending)) as host:
                    if live.answered != turn - 1:
                        await self._restore(answering, host)
                    await self._make_calls(answering, host, pending)
            except LostError as lost:
                if attempt >= self.config.attempts:
                    raise await self._blame(answering.episode, f"{lost} ({attempt} attempts)") from lost
                self._counts["retries"] += 1
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                attempt += 1

    async def _make_calls(self, answering: Answering, host: Host, pending: Sequence[PlannedCall]) -> None:
        """Make calls at the same time, and kill the host if one is late. Calls that still run then stay undone; one
        that must not be repeated is waited for.

        Raises:
            LostError: the host ended.
            FaultError: it ended during a call that must not be repeated, or a result is wrong.
        """
        episode, live = answering.episode, answering.live
        for call in pending:
            if not call.idempotent:
                await answering.log.started(call.index)
        self._counts["calls"] += len(pending)
        running = {call.index: call for call in pending}
        begun = asyncio.get_running_loop().time()
        try:
            host.send([self._work(answering, call, len(episode.turns)) for call in pending])
            async for outcome in _outcomes(host, running, max(self.config.seconds - live.spent_s, 0.0)):
                call = running.pop(outcome.index)
                settled = self.planner.settle(call, outcome)
                answering.done[call.index] = settled
                if not call.idempotent:
                    await answering.log.ended(call.index, self._record(episode, call, settled))
            if running or any(answering.done[call.index].error == "late" for call in pending):
                self.placement.lose(live)
        except BaseException as error:
            if running or isinstance(error, LostError):
                self.placement.lose(live)
            interrupted = next((call.name for call in running.values() if not call.idempotent), None)
            if isinstance(error, LostError) and interrupted is not None:
                what = f"{self._name}.{interrupted} must not be repeated, and {error}"
                by_episode = isinstance(await self._blame(episode, str(error)), FailureError)
                raise FaultError(what, counted=not by_episode) from error
            raise
        finally:
            live.spent_s += asyncio.get_running_loop().time() - begun

    async def _restore(self, answering: Answering, host: Host) -> None:
        """Reset the environment and repeat the earlier calls.

        Raises:
            LostError: the host ended.
            FailureError: the same, after a call of the episode has ended its process.
            FaultError: a result differs, or the calls must not be repeated.
        """
        episode, live = answering.episode, answering.live
        history = episode.turns[:-1]
        if history and self.placement.exclusive:
            what = f"{self._name}.step must not be repeated, and the state of the episode was lost"
            if history[-1].timeouts:
                raise FailureError(f"{what} with a late step")
            raise FaultError(what, "interrupted", counted=False)
        started = await self.reset(host, live.key, task_of(episode.prompt))
        if not clean(first_text(episode.prompt)).endswith(started.text):
            what = self._different(0, started.text, first_text(episode.prompt))
            raise FaultError(what, "not deterministic")
        repeated = [(turn, *pair) for turn, each in enumerate(history, 1) for pair in self.planner.earlier_calls(each)]
        finished = [(call, answering.done[call.index]) for call in answering.planned if call.index in answering.done]
        repeated += [(len(episode.turns), *pair) for pair in finished if self.planner.restores(*pair)]
        for turn, call, earlier in repeated:
            again = await host.make(self._work(answering, call, turn), call.timeout_s)
            again = self.planner.settle(call, again)
            if again.done:
                raise FaultError(f"{self._name}.step was called after the end of the episode")
            if again.text != earlier.text or again.reward != earlier.reward:
                what = self._different(turn, again.text, earlier.text)
                if live.broke_host:
                    raise FailureError(f"{what}, after a call of the episode ended its process")
                raise FaultError(what, "not deterministic", counted=False)
        live.answered, live.broke_host = len(history), False

    async def _blame(self, episode: Episode, lost: str) -> Exception:
        """Whose fault it is that an episode lost all its hosts: the episode's, if its task can be reset elsewhere."""
        try:
            async with self.placement.fresh_host() as host:
                await self.reset(host, 0, task_of(episode.prompt))
        except (LostError, FaultError) as error:
            return FaultError(f"{lost}, and a new process fails too: {error}", "lost process")
        return FailureError(f"{lost}, while a new process can be reset")

    async def _blame_score(self, episode: Episode, answer: str, scored: CallOutcome) -> Exception:
        """Whose fault it is that an answer has no score: the episode's, if another answer to its task has one."""
        what = f"{self._name}.{scored.text}" if scored.error == "late" else scored.text
        task = task_of(episode.prompt)
        others = [each for each in (str(task.get("answer", "")), *PLAIN_ANSWERS) if each != answer]
        with contextlib.suppress(LostError, FaultError):
            async with self.placement.fresh_host() as host:
                for other in others:
                    await self.reset(host, 0, task)
                    call = self.planner.score(0, other)
                    work = Work(index=0, episode=0, method=call.name, arguments=call.arguments)
                    if not (await host.make(work, call.timeout_s)).error:
                        return FailureError(f"{what}, while the answer {other!r:.40} has a score")
        return FaultError(what, f"{self._name}.score")

    def _fault(self, error: FaultError) -> Observation:
        """Raises GuardStop: too many episodes were lost."""
        self._counts["faults"] += 1
        self._report_first(error.name, str(error))
        if error.counted:
            self._faults.append(str(error))
        if len(self._faults) >= self.config.max_environment_errors:
            raise GuardStop(
                f"{len(self._faults)} episodes were lost to faults of the environment {self._name}; the first: "
                f"{self._faults[0]}\n  correct it and run the same command again: the run resumes from its checkpoint"
            )
        return Observation(end="fault", reason=str(error))

    def _report_first(self, name: str, text: str) -> None:
        """Report what happened, once for each name."""
        if name not in self._reported:
            self._reported[name] = text
            self._report(text)

    def _different(self, turn: int, now: str, earlier: str) -> str:
        what = f"the environment {self._name} is not deterministic: repeating turn {turn} gave"
        return f"{what} {now!r:.60} instead of {earlier!r:.60}"

    def _work(self, answering: Answering, call: PlannedCall, turn: int) -> Work:
        call_id = self._call_id(answering.episode, turn, call)
        key = answering.live.key
        return Work(index=call.index, episode=key, method=call.name, arguments=call.arguments, call_id=call_id)

    def _call_id(self, episode: Episode, turn: int, call: PlannedCall) -> str:
        name = f"{episode.sample_id.key:016x}-{episode.restarts}"
        if episode.sample_id.purpose.startswith(EVALUATION):  # repeated with other weights, and not journalled
            name = f"{self._session}-{self._live[episode.sample_id].key}"
        return f"{self._run_id}-{name}-{turn}-{call.index}"

    def _record(self, episode: Episode, call: PlannedCall, outcome: CallOutcome) -> Call:
        return self.planner.record(call, outcome, self._call_id(episode, len(episode.turns), call))


async def _outcomes(host: Host, running: Mapping[int, PlannedCall], left_s: float) -> AsyncIterator[CallOutcome]:
    """Outcomes of running calls, from which the caller removes those that it receives.

    Once a deadline has fired, only calls that must not be repeated are waited for.

    Raises:
        LostError: the host ended.
    """
    loop = asyncio.get_running_loop()
    timeouts = {index: min(call.timeout_s, left_s) for index, call in running.items()}
    deadlines = {index: loop.time() + timeout_s for index, timeout_s in timeouts.items()}
    late: set[int] = set()
    while waiting := [call for call in running.values() if call.index not in late]:
        if late and all(call.idempotent for call in waiting):
            break
        try:
            outcome = await host.outcome(min(deadlines[call.index] for call in waiting) - loop.time())
        except TimeoutError:
            late |= {index for index in running if deadlines[index] <= loop.time()}
        else:
            if outcome.index not in late:
                yield outcome
    for index in late:
        text = f"{running[index].name} did not return within {timeouts[index]:.3g} s"
        yield CallOutcome(index=index, text=text, error="late")
