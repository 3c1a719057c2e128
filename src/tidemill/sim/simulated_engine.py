"""Simulated engines: they take the time of a real engine and compute nothing.

`SimulatedEngine` is event driven: between two changes (a sample arrives, leaves or finishes, weights are swapped) all
running samples advance in lockstep, so the time of the next change has a closed form; the state is updated on access.
`SteppedEngine` advances pass by pass, for engines that share a machine with the trainer.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import (
    ITEM_BYTES,
    EngineWork,
    Finish,
    GenerateRequest,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
    count,
)
from tidemill.hardware.measured_profile import MeasuredEngine
from tidemill.sim.costs import EngineCosts
from tidemill.sim.workload import Completions

EPSILON_S = 1e-6
"""Tolerance of time comparisons: a timer may fire slightly early."""

WATERMARK = 0.01
"""Share of the cache that stays free when a sample is admitted, so that it is not preempted at once."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    offset: int  # completion tokens = engine steps - offset
    flushed: int  # reported tokens
    end: int  # final number of completion tokens
    finish: Finish
    gone: bool = False


class SimulatedEngine:
    """The state of one engine; `now_s` never decreases.

    Args:
        keep_cache: running samples keep their keys and values when a version is loaded.
    """

    def __init__(self, costs: EngineCosts, completions: Completions, *, now_s: float, keep_cache: bool = False) -> None:
        self.costs, self._cache_tokens, self._keep_cache = costs, costs.cache_tokens, keep_cache
        self.version = PolicyVersion(number=-1, digest="")
        self.computes_with = self.version
        self.generated = 0
        self.prefilled = self.reused = 0  # prompt tokens
        self.put_back = self.recomputed = 0  # samples preempted by a full cache, and their tokens
        self._completions = completions
        self._until_s = now_s  # simulated so far
        self._steps = 0  # decode steps so far
        self._context = 0  # total context of running samples
        self._running: dict[SampleId, _Running] = {}
        self._ends: list[tuple[int, int, _Running]] = []  # heap by final step; includes samples that left
        self._serial = 0
        self._queue: deque[GenerateRequest] = deque()
        self._prompts: OrderedDict[str, None] = OrderedDict()  # prompts still in the cache
        self._paused = False
        self._deltas: list[TokenDelta] = []  # of finished or recalled samples

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        """Whether final deltas are waiting to be reported."""
        return bool(self._deltas)

    @property
    def tokens_per_s(self) -> float:
        """Current decoding rate."""
        running = len(self._running)
        return running / self.costs.decode_s(running, self._context, 1) if running else 0.0

    def next_change_s(self) -> float:
        """Time when the next sample finishes or the cache is full; infinite without samples."""
        steps = self._steps_to_change()
        if steps is None:
            return math.inf
        return self._until_s + self.costs.decode_s(len(self._running), self._context, steps)

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        self.advance(now_s)
        for request in requests:
            if request.exact_version is not None and request.exact_version != self.version.number:
                self._report_unstarted(
                    request, f"request needs version {request.exact_version}, engine has {self.version.number}"
                )
            else:
                self._queue.append(request)
        self._admit()

    def abort(self, sample_ids: Sequence[SampleId], now_s: float) -> None:
        self.advance(now_s)
        gone = set(sample_ids)
        for request in self._queue:
            if request.sample_id in gone:
                self._report_unstarted(request)
        self._queue = deque(request for request in self._queue if request.sample_id not in gone)
        for sample_id in sample_ids:
            if (one := self._running.get(sample_id)) is not None:
                self._deltas.append(self._flush(one, "aborted"))
                self._leave(one)
        self._admit()

    def load(self, version: PolicyVersion, *, computes_with: PolicyVersion, swap_s: float, now_s: float) -> None:
        """Swap weights between two tokens; the KV cache of running samples is recomputed unless it is kept."""
        self.advance(now_s)
        self._deltas += self.flush(now_s)
        self.version, self.computes_with = version, computes_with
        self._prompts.clear()
        recompute_s = 0.0 if self._keep_cache else self.costs.prefill_s(self._context, len(self._running))
        self._until_s = max(self._until_s, now_s) + swap_s + recompute_s
        self._admit()

    def pause(self, now_s: float) -> None:
        """Stop an idle engine; new requests wait until `resume`."""
        self.advance(now_s)
        assert not self._running, "only an idle engine can be paused"
        self._paused = True

    def resume(self, now_s: float) -> None:
        self._paused, self._until_s = False, max(self._until_s, now_s)
        self._admit()

    def flush(self, now_s: float) -> list[TokenDelta]:
        """Unreported tokens of running samples."""
        self.advance(now_s)
        return [self._flush(one, None) for one in self._running.values() if self._steps - one.offset > one.flushed]

    def take_ended(self) -> list[TokenDelta]:
        """Final deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def advance(self, now_s: float) -> None:
        """Decode up to `now_s` in whole steps; freed slots are refilled at once."""
        while (steps := self._steps_to_change()) is not None:
            if self._until_s + self.costs.decode_s(len(self._running), self._context, steps) > now_s + EPSILON_S:
                seconds = partial(self.costs.decode_s, len(self._running), self._context)  # of a number of steps
                self._decode(bisect_right(range(1, steps + 1), now_s - self._until_s + EPSILON_S, key=seconds))
                return
            self._decode(steps)
            self._end()
            self._make_room()
            self._admit()
        self._until_s = max(self._until_s, now_s)

    def _steps_to_change(self) -> int | None:
        """Steps until the next sample finishes or the cache is full; None if idle."""
        steps, running = self._steps_to_end(), len(self._running)
        if steps is None or self._cache_tokens == math.inf or running == 1:
            return steps
        return min(steps, int((self._cache_tokens - self._context) // running))

    def _steps_to_end(self) -> int | None:
        """Steps until the next sample finishes; None if idle."""
        while self._ends and self._ends[0][2].gone:
            heapq.heappop(self._ends)
        return max(0, self._ends[0][0] - self._steps) if self._ends else None

    def _decode(self, steps: int) -> None:
        if steps:
            running = len(self._running)
            self._until_s += self.costs.decode_s(running, self._context, steps)
            self._steps += steps
            self._context += running * steps
            self.generated += running * steps

    def _end(self) -> None:
        """Remove finished samples."""
        while self._steps_to_end() == 0:
            one = self._ends[0][2]
            self._deltas.append(self._flush(one, one.finish))
            self._leave(one)

    def _make_room(self) -> None:
        """Preempt the newest samples before a step that does not fit the cache: report them, queue them first, and
        recompute them later (vLLM's preemption by recomputation, arXiv 2309.06180, section 4.5).

        A single sample always continues; `check_cost_model` refuses samples that cannot fit.
        """
        while len(self._running) > 1 and self._context + len(self._running) > self._cache_tokens:
            one = next(reversed(self._running.values()))
            have, prompt = max(one.flushed, self._steps - one.offset), count(one.request.prompt_ids)
            if have > one.flushed:
                self._deltas.append(self._flush(one, None))
            self._leave(one)
            self._prompts.pop(one.request.sample_id.prompt_id, None)
            self._queue.appendleft(msgspec.structs.replace(one.request, prefix_ids=bytes(have * ITEM_BYTES)))
            self.put_back += 1
            self.recomputed += prompt + have

    def _admit(self) -> None:
        """Fill free slots; prefill of prompt and prefix delays decoding.

        A sample beside others needs room in the cache for itself and one more step.
        """
        while self._queue and len(self._running) < self.costs.slots and not self._paused:
            request = self._queue[0]
            context = self._context + count(request.prompt_ids) + count(request.prefix_ids)
            fits = not self._running or context + len(self._running) + 1 <= (1 - WATERMARK) * self._cache_tokens
            if request.min_version > self.version.number or not fits:
                return
            self._until_s += self.costs.prefill_s(self._start(self._queue.popleft()))

    def _start(self, request: GenerateRequest) -> int:
        """Assign a slot; return the tokens to prefill."""
        have, kept = count(request.prefix_ids), self._kept(request)
        end, finish = self._ending(request)
        one = _Running(request, self._steps - kept, have, max(have, end), finish)
        tokens = self._uncached(request) + kept
        self._running[request.sample_id] = one
        self._context += count(request.prompt_ids) + kept
        heapq.heappush(self._ends, (one.offset + one.end, self._serial, one))
        self._serial += 1
        if one.end == kept:
            self._end()
        return tokens

    def _ending(self, request: GenerateRequest) -> tuple[int, Finish]:
        """Prefix and new tokens at which it ends, and why."""
        limit, length = request.sampling.max_new_tokens, self._completions.length(request.sample_id)
        return min(limit, length), "stop" if length <= limit else "length"

    def _drawn(self, request: GenerateRequest, start: int, end: int) -> tuple[TokenBuffer, LogprobBuffer]:
        """Tokens [start, end) after the prompt, and their logprobs."""
        return self._completions.tokens(request.sample_id, self.computes_with, start, end)

    def _kept(self, request: GenerateRequest) -> int:
        """Prefix tokens to keep; the others are regenerated and not reported."""
        return count(request.prefix_ids)

    def _leave(self, one: _Running) -> None:
        one.gone = True
        del self._running[one.request.sample_id]
        self._context -= count(one.request.prompt_ids) + self._steps - one.offset

    def _uncached(self, request: GenerateRequest) -> int:
        """Prompt tokens to prefill: 0 if the prompt is cached."""
        name, tokens = request.sample_id.prompt_id, count(request.prompt_ids)
        known = name in self._prompts
        self._prompts[name] = None
        self._prompts.move_to_end(name)
        while len(self._prompts) > self.costs.slots:
            self._prompts.popitem(last=False)
        self.reused += tokens if known else 0
        self.prefilled += 0 if known else tokens
        return 0 if known else tokens

    def _flush(self, one: _Running, finish: Finish | None) -> TokenDelta:
        start, one.flushed = one.flushed, max(one.flushed, self._steps - one.offset)
        return self._delta(one.request, start, self._drawn(one.request, start, one.flushed), finish)

    def _delta(
        self,
        request: GenerateRequest,
        start: int,
        tokens: tuple[TokenBuffer, LogprobBuffer],
        finish: Finish | None,
        error: str = "",
    ) -> TokenDelta:
        return TokenDelta(
            sample_id=request.sample_id,
            lease_id=request.lease_id,
            attempt=request.attempt,
            start=request.offset + start,
            token_ids=tokens[0],
            logprobs=tokens[1],
            version=self.version,
            finish=finish,
            error=error,
        )

    def _report_unstarted(self, request: GenerateRequest, error: str = "") -> None:
        """The only delta of a sample that never started."""
        self._deltas.append(self._delta(request, count(request.prefix_ids), (b"", b""), "aborted", error))


class SteppedState(SimulatedEngine):
    """State that advances only by `step`."""

    def __init__(self, costs: MeasuredEngine, completions: Completions, *, budget_tokens: int) -> None:
        super().__init__(costs, completions, now_s=0.0)
        self._measured, self._budget = costs, budget_tokens
        self._siblings = Counter[int]()  # running samples of groups, by offset
        self.work = EngineWork()

    @property
    def runnable(self) -> bool:
        ready = bool(self._queue) and self._queue[0].min_version <= self.version.number
        return ready or bool(self._running)

    @property
    def cached_tokens(self) -> int:
        return self._context

    def advance(self, now_s: float) -> None:
        pass

    def step(self) -> float:
        """Run one forward pass, including new samples; return its seconds."""
        running, prefilled = len(self._running), 0.0
        rows = running - sum(
            siblings * (1 - self._measured.distinct(self._steps - offset))
            for offset, siblings in self._siblings.items()
        )
        context = self._context * rows / running if running else 0.0
        while self._queue and len(self._running) < self.costs.slots and prefilled < self._budget:
            if self._queue[0].min_version > self.version.number:
                break
            before = len(self._prompts)
            tokens = self._start(self._queue.popleft())
            prefilled += tokens * (self._measured.new_prompt_share if len(self._prompts) > before else 1.0)
        drawn = len(self._running)
        seconds = self._measured.forward_s(rows=rows, context_tokens=context, drawn=drawn, prefilled=prefilled)
        self._steps += 1
        self._context += drawn
        self.generated += drawn
        self.work = EngineWork(
            passes=self.work.passes + 1,
            rows=self.work.rows + round(rows),
            context_tokens=self.work.context_tokens + round(context),
            drawn=self.work.drawn + drawn,
            prefilled=self.work.prefilled + round(prefilled),
            busy_s=self.work.busy_s + seconds,
            cpu_s=self.work.cpu_s + seconds,
        )
        self._end()
        return seconds

    def _admit(self) -> None:
        """New samples start with the next pass."""

    def _start(self, request: GenerateRequest) -> int:
        if request.sample_id.purpose == "train":
            self._siblings[self._steps - self._kept(request)] += 1
        return super()._start(request)

    def _leave(self, one: _Running) -> None:
        super()._leave(one)
        if one.request.sample_id.purpose == "train":
            self._siblings[one.offset] -= 1
            if not self._siblings[one.offset]:
                del self._siblings[one.offset]


class SteppedEngine:
    """Implements `core.protocols.Engine`.

    Args:
        spend: called with the seconds of each call that takes time.
    """

    def __init__(
        self,
        costs: MeasuredEngine,
        completions: Completions,
        *,
        budget_tokens: int,
        swap_s: float,
        spend: Callable[[float], None],
        keep_cache: bool = False,
    ) -> None:
        self._state = SteppedState(costs, completions, budget_tokens=budget_tokens)
        self._costs, self._swap_s, self._spend, self._keep_cache = costs, swap_s, spend, keep_cache

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="simulated",
            batch_invariant=False,
            logprobs=True,
            keeps_kv=self._keep_cache,
            lora=False,
            draws="stream",
        )

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._state.submit(requests, 0.0)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        spent_s = 0.0
        while self._state.runnable:
            spent_s += self._state.step()
            if spent_s >= deadline_s:
                break
        self._spend(spent_s)
        ended = self._state.take_ended()
        return [*ended, *self._state.flush(0.0)]

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        self._state.abort(sample_ids, 0.0)
        return self._state.take_ended()

    def load(self, version: PolicyVersion) -> None:
        """Load a version; the cache of running samples is recomputed unless it is kept."""
        recompute_s = 0.0 if self._keep_cache else self._state.cached_tokens * self._costs.prefill_token_s
        self._state.load(version, computes_with=version, swap_s=0.0, now_s=0.0)
        self._spend(self._swap_s + recompute_s)

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return b""

    def status(self) -> EngineStatus:
        state = self._state
        return EngineStatus(
            version=state.version,
            running=state.running,
            queued=state.queued,
            free_slots=state.costs.slots - state.running,
            tokens_generated=state.generated,
            prompt_tokens_computed=state.work.prefilled,
            prompt_tokens_reused=max(0, state.prefilled + state.reused - state.work.prefilled),
            work=state.work,
        )
