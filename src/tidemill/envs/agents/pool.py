"""The environments of a run: live episodes, the hosts that hold them, budgets, deadlines and faults.

    act ── plan the turn's calls ── hold a host ── restore the state, if it was lost ── make the calls ── observation

A call is made in the process that holds its episode. Up to four processes for each concurrent call hold one episode
each; with more live episodes they share processes, which then wait for each other's turns. Episodes whose `step` must
not be repeated never share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidemill.config.agent import EnvConfig
from tidemill.core.errors import GuardStop, UserError
from tidemill.core.protocols import CallLog, TurnFormat
from tidemill.core.records import Call, Episode, EpisodeEnd, Message, Observation, SampleId, pack_tokens
from tidemill.envs.agents.environment import Environment
from tidemill.envs.agents.hosts import Host, Launcher, LostError, ProcessLauncher, ThreadLauncher
from tidemill.envs.agents.instances import Instances, Outcome, Work
from tidemill.envs.agents.turn_plan import (
    REFUSED_FACTOR,
    FaultError,
    Planned,
    TurnPlanner,
    first_text,
    task_of,
    task_seed,
)
from tidemill.extensions.registry import Extension, import_path

HOSTS_PER_CALL = 4
"""Processes for each concurrent call, before episodes share them."""
BACKOFF_S = 0.1
"""Wait before the second attempt; doubles with each further one."""
CHARACTERS_PER_TOKEN = 16
"""Longer texts are refused without encoding them."""
COUNTS = ("calls", "mistakes", "timeouts", "retries", "failures", "faults")


class FailureError(Exception):
    """The episode breaks its environment."""


@dataclass(slots=True)
class Live:
    """An episode that is not over."""

    key: int  # names it in its host
    host: Host | None = None
    answered: int = -1  # turns that its state in the host includes; -1: it has none there
    spent_s: float = 0.0  # in calls, since the pool was made


class EnvironmentPool:
    """Implements `core.protocols.Environments` for a user's class.

    Args:
        environment: of the class; see `find_environment`.
        run_id: part of the call ids, which are unique across runs.
        report: receives the first fault of each method.

    Raises:
        UserError: a tool of the class is wrong.
    """

    def __init__(
        self,
        environment: Extension,
        config: EnvConfig,
        format: TurnFormat,  # noqa: A002
        *,
        run_id: str = "",
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.environment: type[Environment] = environment.function  # type: ignore[assignment]
        self.config = config
        self._name, self._format, self._run_id, self._report = environment.name, format, run_id, report
        self.planner = TurnPlanner(self.environment, config, format)
        self.schemas = [each.schema for each in self.planner.tools.values()]
        self._launcher = make_launcher(self.environment, config)
        self._exclusive = not self.planner.uses_tools and not self.environment.idempotent
        self._hosts: list[Host] = []
        self._live: dict[SampleId, Live] = {}
        self._keys = itertools.count(1)
        self._permits = asyncio.Semaphore(config.concurrency)
        self._acquiring = asyncio.Lock()  # several permits for one turn, without a deadlock
        self._background: set[asyncio.Task[None]] = set()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._faults: dict[str, str] = {}  # first message of each method
        self._lost_episodes = 0

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        """See `core.protocols.Environments`."""
        live = self._live.get(episode.sample_id)
        if live is None:
            live = self._live[episode.sample_id] = Live(next(self._keys))
        try:
            observation = await self._answer(live, episode, calls)
        except FailureError as error:
            self._counts["failures"] += 1
            given = self.config.failure_reward
            outcome = self.environment.lowest_reward if given is None else given
            observation = Observation(end="failure", reason=str(error), outcome=outcome)
        except FaultError as error:
            observation = self._fault(error)
        if observation.end:
            self._release(live)
        return observation

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for each in sample_ids:
            if (live := self._live.pop(each, None)) is not None:
                self._release(live)

    def take_counts(self) -> dict[str, int]:
        """Calls made, mistakes of agents, deadlines that fired, retries after lost processes, episodes that ended in
        failure and in fault, since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
        return counts

    async def first_message(self, task: dict[str, Any]) -> str:
        """What `reset` returns for a row.

        Raises:
            UserError: it cannot be reset.
        """
        live = Live(next(self._keys))
        try:
            async with self._hold(live, 1) as host:
                return (await self.reset(host, live.key, task)).text
        except (LostError, FaultError) as error:
            what = f"the environment {self._name} cannot be reset: {error}"
            raise UserError(what, where="env.name", hint=f"correct it for the task {task!r:.100}") from error
        finally:
            self._release(live)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for host in self._hosts:
            host.kill()
        await self._launcher.close()

    async def _answer(self, live: Live, episode: Episode, log: CallLog) -> Observation:
        """Raises FailureError, FaultError."""
        turn = episode.turns[-1]
        planned = self.planner.calls(turn)
        answer = self.planner.answer(planned, turn.text)
        left = self.config.calls - sum(len(each.calls) for each in episode.turns[:-1])
        over = self.planner.uses_tools and len(planned) > left
        if over:
            planned, answer = planned[:left], None
        done = self._already_done(episode, planned)
        await self._perform(live, episode, planned, done, log)
        outcomes = [done[call.index] for call in planned]
        late = sum(each.error == "late" for each in outcomes)
        self._counts["timeouts"] += late
        self._counts["mistakes"] += sum(each.error == "raised" for each in outcomes)
        end: EpisodeEnd = ""
        if over:
            end = "calls"
        elif answer is not None or any(each.done for each in outcomes):
            end = "done"
        elif len(episode.turns) >= self.config.turns:
            end = "turns"
        elif live.spent_s >= self.config.seconds:
            end = "seconds"
        reward = 0.0 if self.planner.uses_tools else outcomes[0].reward
        if answer is not None and self.planner.scores:
            score = self.planner.score(len(planned), answer)
            await self._perform(live, episode, [*planned, score], done, log)
            reward = done[score.index].reward
        if live.answered >= 0:
            live.answered = len(episode.turns)
        text = "\n".join(each.text for each in outcomes)
        token_ids, new_branch = ([], False) if end else self._encode(episode, outcomes)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Observation(
            text=text,
            token_ids=pack_tokens(token_ids),
            new_branch=new_branch,
            reward=reward,
            end=end,
            state_key=digest if self.planner.uses_tools else outcomes[0].state_key or digest,
            calls=tuple(map(partial(self._record, episode), planned, outcomes)) if self.planner.uses_tools else (),
            timeouts=late,
        )

    def _already_done(self, episode: Episode, planned: Sequence[Planned]) -> dict[int, Outcome]:
        """Outcomes of calls that are in the journal, and of those that are not made.

        Raises:
            FaultError: a call that must not be repeated was interrupted.
        """
        done: dict[int, Outcome] = {}
        for call in planned:
            if (finished := episode.finished.get(call.index)) is not None:
                done[call.index] = self.planner.recorded(call, finished)
            elif call.mistake:
                mistake = Outcome(index=call.index, text=call.mistake, error="raised")
                done[call.index] = self.planner.settle(call, mistake, len(planned))
            elif self.planner.finishes(call):
                done[call.index] = Outcome(index=call.index)
            elif call.index in episode.started:
                raise FaultError(f"{self._method(call)} was interrupted, and must not be repeated")
        return done

    def _encode(self, episode: Episode, outcomes: Sequence[Outcome]) -> tuple[list[int], bool]:
        role = "tool" if self.planner.uses_tools else "user"
        messages = [Message(role=role, content=each.text) for each in outcomes]
        try:
            return self._format.answer(episode, messages, tools=self.schemas)
        except UserError as error:
            raise FaultError(f"an observation cannot be encoded: {error.what}") from error

    async def _perform(
        self, live: Live, episode: Episode, planned: Sequence[Planned], done: dict[int, Outcome], log: CallLog
    ) -> None:
        """Make the calls that are not `done`, again in another host if theirs is lost.

        Raises:
            FailureError, FaultError: they could not be made.
        """
        attempt = 1
        while pending := [call for call in planned if call.index not in done][: self.config.concurrency]:
            try:
                async with self._hold(live, len(pending)) as host:
                    if live.answered != len(episode.turns) - 1:
                        await self._restore(host, live, episode, planned, done)
                    await self._make_calls(host, live, episode, pending, len(planned), done, log)
            except LostError as lost:
                if attempt >= self.config.attempts:
                    raise await self._blame(episode, str(lost), attempt) from lost
                self._counts["retries"] += 1
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                attempt += 1

    async def _make_calls(
        self,
        host: Host,
        live: Live,
        episode: Episode,
        pending: Sequence[Planned],
        shared: int,
        done: dict[int, Outcome],
        log: CallLog,
    ) -> None:
        """Make calls at the same time, and kill the host if one is late. Calls that still run then stay undone; one
        that must not be repeated is waited for.

        Raises:
            LostError: the host ended.
            FaultError: it ended during a call that must not be repeated, or a result is wrong.
        """
        for call in pending:
            if not call.idempotent:
                await log.started(call.index)
        self._counts["calls"] += len(pending)
        running = {call.index: call for call in pending}
        begun = asyncio.get_running_loop().time()
        try:
            host.send([self._work(live, episode, call) for call in pending])
            left_s = max(self.config.seconds - live.spent_s, 0.0)
            async for outcome in _outcomes(host, running, left_s):
                call = running[outcome.index]
                settled = outcome if outcome.error == "late" else self.planner.settle(call, outcome, shared)
                done[call.index] = settled
                if not call.idempotent:
                    await log.ended(call.index, self._record(episode, call, settled))
                del running[call.index]
            if any(done[call.index].error == "late" for call in pending if call.index in done):
                self._lose(host, live)
        except BaseException as error:
            self._lose(host, live)
            interrupted = next((call for call in running.values() if not call.idempotent), None)
            if isinstance(error, LostError) and interrupted is not None:
                raise FaultError(f"{self._method(interrupted)} must not be repeated, and {error}") from error
            raise
        finally:
            live.spent_s += asyncio.get_running_loop().time() - begun

    async def _restore(
        self, host: Host, live: Live, episode: Episode, planned: Sequence[Planned], done: dict[int, Outcome]
    ) -> None:
        """Reset the environment and repeat the earlier calls.

        Raises:
            LostError: the host ended.
            FaultError: a result differs, or the calls must not be repeated.
        """
        history = episode.turns[:-1]
        if history and self._exclusive:
            raise FaultError(f"{self._name}.step must not be repeated, and the state of the episode was lost")
        started = await self.reset(host, live.key, task_of(episode.prompt))
        if not first_text(episode.prompt).endswith(started.text):
            raise self._different(0, started.text, first_text(episode.prompt))
        repeated = [(turn, *pair) for turn, each in enumerate(history, 1) for pair in self.planner.earlier_calls(each)]
        finished = [(call, done[call.index]) for call in planned if call.index in done]
        repeated += [(len(episode.turns), *pair) for pair in finished if self.planner.restores(*pair)]
        for number, call, earlier in repeated:
            shared = len(episode.turns[number - 1].calls) or len(planned)
            again = await self.single(host, self._work(live, episode, call, number), call.timeout_s)
            again = self.planner.settle(call, again, shared)
            if again.text != earlier.text or again.reward != earlier.reward or again.done:
                raise self._different(number, again.text, earlier.text)
        live.answered = len(history)

    async def reset(self, host: Host, key: int, task: dict[str, Any]) -> Outcome:
        """Start an episode in a host.

        Raises:
            LostError: the host ended, or `reset` did not return in time.
            FaultError: `reset` failed.
        """
        arguments = json.dumps({"task": task, "seed": task_seed(task)})
        work = Work(index=0, episode=key, method="reset", arguments=arguments)
        outcome = await self.single(host, work, self.config.call_timeout_s)
        if outcome.error:
            raise FaultError(outcome.text, f"{self._name}.reset")
        return outcome

    async def single(self, host: Host, work: Work, timeout_s: float) -> Outcome:
        """Make one call.

        Raises:
            LostError: the host ended, also because the call did not return in time.
        """
        host.send([work])
        try:
            return await host.outcome(timeout_s)
        except TimeoutError:
            host.kill()
            raise LostError(f"{self._name}.{work.method} did not return within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            host.kill()
            raise

    @asynccontextmanager
    async def fresh_host(self) -> AsyncIterator[Host]:
        """A host that no other episode uses.

        Raises:
            LostError: it did not start.
        """
        host = self._launcher.host()
        try:
            await host.start()
            yield host
        finally:
            host.kill()

    @asynccontextmanager
    async def _hold(self, live: Live, calls: int) -> AsyncIterator[Host]:
        """The host of an episode, started, and permits for calls."""
        while True:
            if live.host is None or not live.host.alive:
                live.host, live.answered = self._place(), -1
                live.host.episodes.add(live.key)
            host = live.host
            await host.turn.acquire()
            if host.alive and live.host is host:
                break
            host.turn.release()
        acquired = 0
        try:
            async with self._acquiring:
                while acquired < calls:
                    await self._permits.acquire()
                    acquired += 1
            if not host.started:
                await host.start()
            yield host
        finally:
            for _ in range(acquired):
                self._permits.release()
            host.turn.release()

    def _place(self) -> Host:
        """A host for one more episode."""
        self._hosts = [host for host in self._hosts if host.alive]
        least = min(self._hosts, key=lambda host: len(host.episodes), default=None)
        full = len(self._hosts) >= HOSTS_PER_CALL * self.config.concurrency and not self._exclusive
        if least is None or (least.episodes and not full):
            least = self._launcher.host()
            self._hosts.append(least)
        return least

    def _lose(self, host: Host, live: Live) -> None:
        host.kill()
        live.host, live.answered = None, -1

    def _release(self, live: Live) -> None:
        """Discard the state of an episode."""
        host, stateful = live.host, live.answered >= 0
        live.host, live.answered = None, -1
        if host is None or not host.alive:
            return
        host.episodes.discard(live.key)
        if stateful:
            task = asyncio.get_running_loop().create_task(self._close_episode(host, live.key))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _close_episode(self, host: Host, key: int) -> None:
        async with host.turn:
            if host.alive:
                with contextlib.suppress(LostError):
                    await self.single(host, Work(index=0, episode=key, method="close"), self.config.call_timeout_s)

    async def _blame(self, episode: Episode, lost: str, attempts: int) -> Exception:
        """Whose fault it is that an episode lost all its hosts: the episode's, if its task can be reset elsewhere."""
        try:
            async with self.fresh_host() as host:
                await self.reset(host, 0, task_of(episode.prompt))
        except (LostError, FaultError) as error:
            return FaultError(f"{lost} ({attempts} attempts), and a new process fails too: {error}", "lost process")
        return FailureError(f"{lost} ({attempts} attempts), while a new process can be reset")

    def _fault(self, error: FaultError) -> Observation:
        """Raises GuardStop: too many episodes were lost."""
        self._counts["faults"] += 1
        self._lost_episodes += 1
        if error.name not in self._faults:
            self._faults[error.name] = str(error)
            self._report(str(error))
        if self._lost_episodes >= self.config.max_environment_errors:
            first = next(iter(self._faults.values()))
            raise GuardStop(
                f"{self._lost_episodes} episodes were lost to faults of the environment {self._name}; the first: "
                f"{first}\n  correct it and run the same command again: the run resumes from its checkpoint"
            )
        return Observation(end="fault", reason=str(error))

    def _different(self, turn: int, now: str, earlier: str) -> FaultError:
        what = f"the environment {self._name} is not deterministic: repeating turn {turn} gave"
        return FaultError(f"{what} {now!r:.60} instead of {earlier!r:.60}", "not deterministic")

    def _method(self, call: Planned) -> str:
        return f"{self._name}.{call.name}"

    def _work(self, live: Live, episode: Episode, call: Planned, turn: int = 0) -> Work:
        return Work(
            index=call.index,
            episode=live.key,
            method=call.name,
            arguments=call.arguments,
            call_id=self._call_id(episode, call, turn or len(episode.turns)),
        )

    def _call_id(self, episode: Episode, call: Planned, turn: int) -> str:
        return f"{self._run_id}-{episode.sample_id.key:016x}-{turn}-{call.index}"

    def _record(self, episode: Episode, call: Planned, outcome: Outcome) -> Call:
        return self.planner.record(call, outcome, self._call_id(episode, call, len(episode.turns)))


async def _outcomes(host: Host, running: Mapping[int, Planned], left_s: float) -> AsyncIterator[Outcome]:
    """Outcomes of running calls, from which the caller removes those that it received.

    Once a deadline has fired, only calls that must not be repeated are waited for.

    Raises:
        LostError: the host ended.
    """
    loop = asyncio.get_running_loop()
    deadlines = {index: loop.time() + min(call.timeout_s, left_s) for index, call in running.items()}
    late: set[int] = set()
    while waiting := [deadlines[index] for index in running if index not in late]:
        try:
            outcome = await host.outcome(min(waiting) - loop.time())
        except TimeoutError:
            late |= {index for index in running if deadlines[index] <= loop.time()}
            if all(call.idempotent or index in late for index, call in running.items()):
                break
        else:
            if outcome.index not in late:
                yield outcome
    for index in late:
        yield Outcome(index=index, text=running[index].late_text, error="late")


def make_launcher(environment: type[Environment], config: EnvConfig) -> Launcher:
    """Hosts for a class: processes, or threads if another process cannot import it."""
    longest = REFUSED_FACTOR * config.observation_tokens * CHARACTERS_PER_TOKEN
    if path := import_path(environment):
        return ProcessLauncher(path, config.params, longest)
    return ThreadLauncher(lambda: Instances(environment, config.params, longest))
