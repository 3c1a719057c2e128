"""Whether fault simulation finds defects planted in the controller, one by one.

    python -m benchmarks.simulator.planted_defects [--seeds 1000] [NAME ...]

Each defect replaces one function of the real controller by a plausible wrong one. Seeds are simulated from 0 until a
violation is found; the number of seeds and the violation are reported. Without a defect none of these seeds may have a
violation.
"""

from __future__ import annotations
import __future__

import argparse
import asyncio
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from tests.fault_simulation.seed_run import simulate_faults
from tests.fault_simulation.worker_ranks import RankedWorker, WorkerRanks
from tidemill.controller import ledger, publishing, run
from tidemill.controller.acting import TurnLog
from tidemill.controller.batching import BatchBuilder
from tidemill.controller.collector import SampleCollector
from tidemill.controller.dispatcher import Dispatcher
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.nominal_schedule import NominalSchedule
from tidemill.controller.rounds import Rounds
from tidemill.controller.run import TrainingRun
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.tail_batching import TailBatching
from tidemill.controller.turns import AgentLimits, Turns
from tidemill.controller.waiting import Mailbox
from tidemill.core.records import GenerateRequest, count
from tidemill.runtime.cluster.rank_group import RankGroup
from tidemill.weights import node_folder
from tidemill.weights.node_folder import NodePuller
from tidemill.weights.puller import PullerGroup

TARGET = 1000

Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a wrong variant of a function."""


@dataclass(frozen=True)
class Defect:
    owner: Any  # class or module
    name: str  # of the replaced function
    wrong: Wrong


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    right = getattr(defect.owner, defect.name)
    setattr(defect.owner, defect.name, defect.wrong(right))
    try:
        yield
    finally:
        setattr(defect.owner, defect.name, right)


def _edited(old: str, new: str) -> Wrong:
    """The same function, or property, with one part of its text replaced."""

    def make(right: Any) -> Any:
        function: Any = right.fget if isinstance(right, property) else right
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(old) != 1:
            raise ValueError(f"{function.__qualname__} contains {old!r} {source.count(old)} times, not once")
        names: dict[str, Any] = {}
        code = compile(source.replace(old, new), __file__, "exec", __future__.annotations.compiler_flag)
        exec(code, function.__globals__, names)
        return names[function.__name__]

    return make


def _now_and_then(right: Callable[..., Any], every: int) -> Callable[..., Any]:
    """Every `every`-th call does nothing."""
    calls = itertools.count(1)

    def wrong(*arguments: Any, **named: Any) -> Any:
        return None if next(calls) % every == 0 else right(*arguments, **named)

    return wrong


def _drop_messages(right: Callable[..., Any]) -> Callable[..., Any]:
    return _now_and_then(right, 7)


def _count_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: InFlight, delta: Any, source: str) -> Any:
        sample = right(self, delta, source)
        self.counters.tokens_accepted += sample is not None and delta.finish == "stop"
        return sample

    return wrong


def _take_for_applied(*verdicts: str) -> Wrong:
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Sample, delta: Any, newest: int) -> Any:
            verdict = right(self, delta, newest)
            return "applied" if verdict in verdicts else verdict

        return wrong

    return make


def _skip_journal(right: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)

    async def wrong(self: Ledger, blobs: Any) -> None:
        if next(calls) % 11:
            await right(self, blobs)

    return wrong


def _journal_later(right: Callable[..., Any]) -> Callable[..., Any]:
    """Entries are written with the next append, so they are acted on before they are durable."""

    async def wrong(self: Any, blobs: Any) -> None:
        late = getattr(self, "late_blobs", [])
        self.late_blobs = blobs
        await right(self, late)

    return wrong


def _forget_to_revoke(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, lease_id: []


def _learn_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    async def wrong(self: TrainingRun, position: int, trajectories: Any) -> None:
        await right(self, position, trajectories)
        if position % 5 == 4:
            await right(self, position, trajectories)

    return wrong


def _one_more(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: right(*arguments, **named) + 1


def _forget_prefix(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Sample, *arguments: Any) -> Any:
        return msgspec.structs.replace(right(self, *arguments), prefix_ids=b"")

    return wrong


def _begin_again_half(right: Callable[..., Any]) -> Callable[..., Any]:
    """A restarted sample keeps its first tokens."""

    def wrong(self: Sample) -> None:
        kept = bytes(self.token_ids[:4]), bytes(self.logprobs[:4]), self.version_starts[:1]
        right(self)
        self.token_ids, self.logprobs = bytearray(kept[0]), bytearray(kept[1])  # without these they are empty
        self.version_starts = kept[2]

    return wrong


def _swap_rewards(right: Callable[..., Any]) -> Callable[..., Any]:
    async def wrong(self: Ledger, in_flight: InFlight, rewards: Any) -> None:
        samples, values = [sample for sample, _ in rewards], [reward for _, reward in rewards]
        await right(self, in_flight, list(zip(samples, reversed(values), strict=True)))

    return wrong


def _round_too_late(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, position: right(self, position) + 1


def _nothing(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: None


async def _nothing_learned(
    self: Ledger, in_flight: InFlight, step: int, positions: Any, *, reward_mean: float | None
) -> list[Sample]:
    """A batch is not journalled."""
    return [sample for position in positions for sample in in_flight.close(position)]


def _forget_waiting(right: Callable[..., Any]) -> Callable[..., Any]:
    """Samples that return without a token are not assigned again."""

    def wrong(self: InFlight) -> list[Sample]:
        return [sample for sample in right(self) if sample.length or not sample.attempt]

    return wrong


def _overfill(right: Callable[..., Any]) -> Callable[..., Any]:
    """The dispatcher ignores the queue limit of a worker."""

    def wrong(self: Dispatcher, members: Any) -> bool:
        config = self._fleet.config
        self._fleet.config = config.model_copy(update={"queue_limit": config.queue_limit + 3})
        try:
            return bool(right(self, members))
        finally:
            self._fleet.config = config

    return wrong


def _in_any_order(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, complete, in_flight: right(self, list(reversed(complete)), in_flight)


def _as_they_come(right: Callable[..., Any]) -> Callable[..., Any]:
    """The first complete groups form the batch."""

    def wrong(self: BatchBuilder, complete: Any, in_flight: Any) -> list[int]:
        chosen = list(complete)[: self.size - len(self.taken)]
        self.taken += chosen
        return chosen

    return wrong


# Of agents.


def _journal_after_sending(right: Callable[..., Any]) -> Callable[..., Any]:
    """Engines may continue a sample before its observation is durable."""

    async def wrong(self: Ledger, in_flight: InFlight, answers: Any) -> None:
        append, held = self._append, list[Any]()

        async def hold(blobs: Any) -> None:
            held.extend(blobs)

        self._append = hold  # type: ignore[method-assign]
        try:
            await right(self, in_flight, answers)
        finally:
            self._append = append  # type: ignore[method-assign]
        if held:
            asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(self._append(held)))

    return wrong


def _skip_observations(right: Callable[..., Any]) -> Callable[..., Any]:
    async def wrong(self: Ledger, in_flight: InFlight, answers: Any) -> None:
        for sample, answer in answers:
            in_flight.observe(sample, answer)

    return wrong


def _offset_without_branch(right: Callable[..., Any]) -> Callable[..., Any]:
    """Positions are counted from the start of the branch's context instead of its end."""

    def wrong(self: Sample, *arguments: Any) -> Any:
        request = right(self, *arguments)
        return msgspec.structs.replace(request, offset=self.turns.base()[0])

    return wrong


def _forget_started_call(right: Callable[..., Any]) -> Callable[..., Any]:
    async def wrong(self: Ledger, in_flight: InFlight, sample: Sample, index: int) -> None:
        sample.turns.started_calls += (index,)

    return wrong


def _keep_older_rows(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: PullerGroup, pulled: Any, bind: Any) -> None:
        held = [puller._held.snapshot for puller in self._pullers if puller._held is not None]
        right(self, pulled, lambda parts: bind([parts[0], *(held or parts)[1:]]))

    return wrong


def _skip_last_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: WorkerRanks, rank: int, parts: Any) -> None:
        if rank == 0 or rank < len(self.versions) - 1 or self.versions[rank].number < 0:
            right(self, rank, parts)

    return wrong


def _observe_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    """The tokens of an observation are appended twice."""

    def wrong(self: Sample, answer: Any, *arguments: Any) -> None:
        right(self, answer, *arguments)
        if self.state is SampleState.WAITING:
            self.token_ids += answer.token_ids
            self.logprobs += bytes(len(answer.token_ids))

    return wrong


def _limit_of_attempt(right: Callable[..., Any]) -> Callable[..., Any]:
    """The limit of an interrupted turn counts from where it is continued."""

    def wrong(self: Sample, *arguments: Any) -> Any:
        request = right(self, *arguments)
        done = count(request.prefix_ids) - request.turn_start
        return msgspec.structs.replace(request, limit=request.limit + done) if request.limit else request

    return wrong


def _limit_of_turn(right: Callable[..., Any]) -> Callable[..., Any]:
    """Every turn may have as many tokens as the whole episode."""

    def wrong(self: Turns, max_new_tokens: int, limits: AgentLimits) -> Any:
        return int(right(self, max_new_tokens + self.generated(self.start), limits))

    return wrong


def _keep_calls(right: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a turn's calls are used for the next turn, too."""

    def wrong(self: Turns, *arguments: Any, **named: Any) -> Any:
        calls = self.finished_calls
        added = right(self, *arguments, **named)
        self.finished_calls = calls
        return added

    return wrong


# Of tail batching.


def _keep_returned_tokens(right: Callable[..., Any]) -> Callable[..., Any]:
    """The samples of a returned prompt keep their tokens."""

    def wrong(self: Any, *arguments: Any) -> None:
        right(self, *arguments)
        earlier = getattr(self, "earlier", {})
        for sample in self:
            before = earlier.get(sample.sample_id, sample)
            if before is not sample and before.length and not sample.length:
                sample.extend(bytes(before.token_ids), bytes(before.logprobs), before.version_starts[0][0])
        self.earlier = {sample.sample_id: sample for sample in self}

    return wrong


DEFECTS = {
    "drops a message": Defect(Mailbox, "put_reports", _drop_messages),
    "counts a token twice": Defect(InFlight, "apply", _count_twice),
    "ignores whose weights made it": Defect(Sample, "check", _take_for_applied("wrong_version")),
    "ignores who sent it": Defect(Sample, "check", _take_for_applied("stale_lease", "stale_attempt")),
    "ignores which attempt sent it": Defect(Sample, "check", _take_for_applied("stale_attempt")),
    "ignores where it begins": Defect(Sample, "check", _take_for_applied("overlap", "gap")),
    "takes what is malformed": Defect(Sample, "check", _take_for_applied("malformed")),
    "skips the journal": Defect(Ledger, "_append", _skip_journal),
    "acts before it is durable": Defect(Ledger, "_append", _journal_later),
    "does not journal a batch": Defect(Ledger, "record_batch", lambda right: _nothing_learned),
    "files entries under the next round": Defect(Ledger, "_round", _round_too_late),
    "forgets to revoke": Defect(InFlight, "revoke", _forget_to_revoke),
    "forgets a sample that waits": Defect(InFlight, "take_newly_waiting", _forget_waiting),
    "forgets the prefix": Defect(Sample, "request", _forget_prefix),
    "begins again by half": Defect(Sample, "restart", _begin_again_half),
    "learns from a group twice": Defect(TrainingRun, "_accumulate", _learn_twice),
    "lets groups grow a version older": Defect(run, "latest_step", _one_more),
    "begins one group too many": Defect(run, "may_start", _one_more),
    "gives rewards to others": Defect(Ledger, "record_rewards", _swap_rewards),
    "takes groups as they come": Defect(BatchBuilder, "take", _as_they_come),
    "believes any probe": Defect(publishing, "probe_difference", lambda right: lambda *_: 0.0),
    "fills queues beyond their end": Defect(Dispatcher, "_assign_waiting", _overfill),
    "moves a sample for ever": Defect(
        Dispatcher, "_enqueue", _edited("sample.stalls >= MAX_STALLS", "sample.stalls >= 1000")
    ),
    "keeps machines it does not use": Defect(Fleet, "_remove", _nothing),
    "sends observations before they are durable": Defect(Ledger, "observe", _journal_after_sending),
    "does not journal observations": Defect(Ledger, "observe", _skip_observations),
    "continues a branch at a wrong offset": Defect(Sample, "request", _offset_without_branch),
    "does not journal that a call started": Defect(Ledger, "record_call_started", _forget_started_call),
    "appends observations twice": Defect(Sample, "observe", _observe_twice),
    "limits the attempt, not the turn": Defect(Sample, "request", _limit_of_attempt),
    "limits the turn, not the episode": Defect(Turns, "limit", _limit_of_turn),
    "reuses calls of an earlier turn": Defect(Turns, "observe", _keep_calls),
    # Written without knowledge of the checks:
    "replays only the last started call": Defect(
        ledger,
        "_replay_acting",
        _edited("turns.started_calls += (entry.index,)", "turns.started_calls = (entry.index,)"),
    ),
    "starts a call before that is durable": Defect(
        TurnLog,
        "started",
        _edited(
            "await self._ledger.record_call_started(self._in_flight, self._sample, index)",
            "self.starting = asyncio.create_task("
            "self._ledger.record_call_started(self._in_flight, self._sample, index))",
        ),
    ),
    "keeps environments of ended episodes": Defect(
        SampleCollector,
        "_finish",
        _edited(
            "if self._rollout.environments is not None:",
            'if self._rollout.environments is not None and sample.turns.episode_end in ("tokens", "context"):',
        ),
    ),
    "calls a broken episode truncated": Defect(
        Sample, "observe", _edited('case "tokens" | "context":', 'case "tokens" | "context" | "failure":')
    ),
    "takes faults for a signal": Defect(
        run, "has_signal", _edited("if t.weight > 0 and t.reward is not None", "if t.reward is not None")
    ),
    "lets acting episodes mix versions": Defect(
        TrainingRun,
        "_may_not_continue",
        _edited(
            "started = sample.length > 0 or sample.state is SampleState.RUNNING",
            "started = sample.length > 0 and sample.state is SampleState.WAITING"
            " or sample.state is SampleState.RUNNING",
        ),
    ),
    "searches stop strings in the attempt": Defect(
        GenerateRequest,
        "turn_start",
        _edited("return self.observations[-1][1] if self.observations else 0", "return count(self.prefix_ids)"),
    ),
    "counts the prompt in every branch": Defect(
        Turns, "context_length", _edited("(0 if self.contexts else prompt_tokens)", "prompt_tokens")
    ),
    # Of tail batching:
    "loses a returned prompt": Defect(
        TailBatching, "_apply", _edited("for returned in closed.returned:", "for returned in closed.returned[1:]:")
    ),
    "trains on a returned prompt twice": Defect(
        TailBatching,
        "_apply",
        _edited("self._long = [group for group in self._long if group.place not in places]", "pass"),
    ),
    "keeps a redrawn prompt in the queue": Defect(
        TailBatching, "_apply", _edited("places |= set(closed.redrawn)", "pass")
    ),
    "closes a round early": Defect(
        NominalSchedule, "advance", _edited("if sample.finish is None:", "if sample.finish is None and end == start:")
    ),
    "ranks groups by arrival": Defect(
        BatchBuilder, "take", _edited("for position in self._ranked if", "for position in complete if")
    ),
    "forgets a closed round when it resumes": Defect(
        Ledger,
        "_load_rounds",
        _edited(
            "if isinstance(entry, RoundClosed):",
            "if isinstance(entry, RoundClosed) and entry.step <= self._checkpoint:",
        ),
    ),
    "starts a closed round again": Defect(
        Rounds, "begin", _edited("if closed is None and not positions:", "if not positions:")
    ),
    "keeps tokens of a returned prompt": Defect(InFlight, "open", _keep_returned_tokens),
    "counts attempts of a returned sample anew": Defect(
        InFlight, "open", _edited("self._attempts.pop(sample_id, 0)", "0")
    ),
    "trains on samples that were set aside": Defect(
        Rounds,
        "_keep",
        _edited("self._assembly.keep(position, [sample.sample_id for sample in samples if sample.needed])", "pass"),
    ),
    "takes groups of an old ranking": Defect(TailBatching, "begin", _edited("self.ranked.clear()", "self.ranked = []")),
    # In the calls to a sharded trainer, and in what its ranks publish:
    "takes the answer of one rank for that of all": Defect(
        RankGroup, "_call_each", _edited("if all(call", "if any(call")
    ),
    "lets the other ranks run on": Defect(RankGroup, "kill", _edited("self._ranks", "self._ranks[:1]")),
    "blames the rank that noticed": Defect(
        RankGroup, "_failure", _edited("isinstance(error, kind)", "isinstance(error, kind) != (kind is TrainerLost)")
    ),
    "takes a late rank for a failure of the others": Defect(
        RankGroup, "_failure", _edited("not late or seconds < self._late_s", "raised")
    ),
    "puts rows of ranks together in another order": Defect(
        PullerGroup, "swap", _edited("bind([", "(lambda parts: bind(parts[::-1]))([")
    ),
    "keeps rows of an older version": Defect(PullerGroup, "swap", _keep_older_rows),
    # In the ranks of a worker, and in the files that they read:
    "leaves a rank of a worker at its version": Defect(WorkerRanks, "load", _skip_last_rank),
    "steps while ranks load": Defect(RankedWorker, "_swap", _edited("self.engine.halt(self._loop.time())", "pass")),
    "does not notice that a rank of a worker failed": Defect(RankedWorker, "_block", _nothing),
    "generates without a rank": Defect(
        RankedWorker, "_fail_in_step", _edited("self.engine.halt(self._loop.time())", "pass")
    ),
    "deletes files that are in use": Defect(
        node_folder, "_remove_if_unused", _edited("fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass")
    ),
    "does not lock what it pulled": Defect(NodePuller, "_keep", _edited("self._files[digest] = file", "file.close()")),
}


def found(defect: Defect, seeds: range) -> tuple[int, str] | None:
    """The number of `seeds` needed and the violation; None if they find none.

    Raises:
        RuntimeError: the seed has a violation without the defect, too.
    """
    with planted(defect):
        outcomes = ((seed, simulate_faults(seed).violation) for seed in seeds)
        seed, violation = next((each for each in outcomes if each[1]), (0, ""))
    if not violation:
        return None
    if other := simulate_faults(seed).violation:
        raise RuntimeError(f"seed {seed} has a violation without a defect: {other}")
    return seeds.index(seed) + 1, violation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a defect; by default all")
    parser.add_argument("--seeds", type=int, default=TARGET, help="at most")
    arguments = parsed(parser)
    table = Table("the controller …", "seeds", "it showed as")
    results: dict[str, Any] = {}
    for name in arguments.names or DEFECTS:
        result = found(DEFECTS[name], range(arguments.seeds))
        seeds, shown = result or (0, "")
        results[name] = {"seeds": seeds, "shown": shown}
        table.add_row(name, str(seeds or "not found"), shown)
        print(f"{name}: {seeds or 'not found'} {shown[:120]}", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    if not arguments.names:
        write_result("planted_defects", {"most_seeds": arguments.seeds, "defects": results})
    return 0 if all(result["seeds"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
