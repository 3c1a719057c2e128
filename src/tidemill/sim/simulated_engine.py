"""An engine that takes the time of a real one and computes nothing.

Nothing happens tick by tick. Between two changes (a sample comes, goes or ends, weights are swapped) all running
samples advance in step, so that the time of the next end is a formula; the state is brought up to date when somebody
looks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
"""Times closer than this are the same: a timer may wake its waiter a little early."""

WATERMARK = 0.01
"""Of the cache, what is left free when another sample comes in, or it would soon have to go again."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    offset: int  # its completion tokens are the engine's steps less this
    flushed: int  # of its tokens, how many were told
    end: int  # completion tokens it will have
    finish: Finish
    gone: bool = False


class SimulatedEngine:
    """The state of one engine; `now_s` never goes back.

    Args:
        computes_with: the weights that make its tokens, by the version it was told to load; another one is a fault.
    """

    def __init__(self, costs: EngineCosts, completions: Completions, *, now_s: float) -> None:
        self.costs, self._cache_tokens = costs, costs.cache_tokens
        self.version = PolicyVersion(number=-1, digest="")
        self.computes_with = self.version
        self.generated = 0
        self.prefilled = self.reused = 0  # prompt tokens
        self.put_back = self.recomputed = 0  # samples that lost their cache when it was full, and their tokens
        self._completions = completions
        self._until_s = now_s  # what was simulated so far
        self._steps = 0  # decode steps so far
        self._context = 0  # tokens that all running samples have
        self._running: dict[SampleId, _Running] = {}
        self._ends: list[tuple[int, int, _Running]] = []  # a heap: the step at which each ends; the ended ones too
        self._serial = 0
        self._queue: deque[GenerateRequest] = deque()
        self._prompts: OrderedDict[str, None] = OrderedDict()  # whose keys and values some slot still has
        self._paused = False
        self._deltas: list[TokenDelta] = []  # of samples that ended or were called back

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        """Whether there are last deltas of samples to tell."""
        return bool(self._deltas)

    @property
    def tokens_per_s(self) -> float:
        """As it decodes now."""
        running = len(self._running)
        return running / self.costs.decode_s(running, self._context, 1) if running else 0.0

    def next_change_s(self) -> float:
        """When the next sample ends or the cache is full, if nothing else happens; infinite without any sample."""
        steps = self._steps_to_change()
        if steps is None:
            return math.inf
        return self._until_s + self.costs.decode_s(len(self._running), self._context, steps)

    def submit(self, requests: Iterable[GenerateRequest], now_s: float) -> None:
        self.advance(now_s)
        for request in requests:
            if request.exact_version is not None and request.exact_version != self.version.number:
                error = f"asked for version {request.exact_version}, the engine has {self.version.number}"
                self._deltas.append(self._last_words(request, error))
            else:
                self._queue.append(request)
        self._admit()

    def abort(self, sample_ids: Sequence[SampleId], now_s: float) -> None:
        self.advance(now_s)
        gone = set(sample_ids)
        queued = [request for request in self._queue if request.sample_id in gone]
        if queued:
            self._deltas += [self._last_words(request) for request in queued]
            self._queue = deque(request for request in self._queue if request.sample_id not in gone)
        for sample_id in sample_ids:
            if (one := self._running.get(sample_id)) is not None:
                self._deltas.append(self._flush(one, "aborted"))
                self._leave(one)
        self._admit()

    def load(self, version: PolicyVersion, *, computes_with: PolicyVersion, swap_s: float, now_s: float) -> None:
        """Swap weights between two tokens; cached keys and values of older ones are dropped and computed again."""
        self.advance(now_s)
        self._deltas += self.flush(now_s)
        self.version, self.computes_with = version, computes_with
        self._prompts.clear()
        self._until_s = max(self._until_s, now_s) + swap_s + self.costs.prefill_s(self._context, len(self._running))
        self._admit()

    def pause(self, now_s: float) -> None:
        """Its GPUs are taken for something else, nothing running on them: what comes waits."""
        self.advance(now_s)
        assert not self._running, "an engine is paused when it has nothing to do"
        self._paused = True

    def resume(self, now_s: float) -> None:
        self._paused, self._until_s = False, max(self._until_s, now_s)
        self._admit()

    def flush(self, now_s: float) -> list[TokenDelta]:
        """What running samples have beyond what was told."""
        self.advance(now_s)
        return [self._flush(one, None) for one in self._running.values() if self._steps - one.offset > one.flushed]

    def take_ended(self) -> list[TokenDelta]:
        """The last deltas of samples that ended since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def advance(self, now_s: float) -> None:
        """Decode up to `now_s`: as many whole steps as fit, the slot of a sample that ends being filled at once."""
        while (steps := self._steps_to_change()) is not None:
            if self._until_s + self.costs.decode_s(len(self._running), self._context, steps) > now_s + EPSILON_S:
                self._decode(self._steps_within(now_s - self._until_s, steps))
                return
            self._decode(steps)
            self._end()
            self._make_room()
            self._admit()
        self._until_s = max(self._until_s, now_s)

    def _steps_to_change(self) -> int | None:
        """Until the next sample ends or the cache is full; None when none is running."""
        steps, running = self._steps_to_end(), len(self._running)
        if steps is None or self._cache_tokens == math.inf or running == 1:
            return steps
        return min(steps, int((self._cache_tokens - self._context) // running))

    def _steps_to_end(self) -> int | None:
        """Until the next sample ends; None when none is running."""
        while self._ends and self._ends[0][2].gone:
            heapq.heappop(self._ends)
        return max(0, self._ends[0][0] - self._steps) if self._ends else None

    def _steps_within(self, seconds: float, most: int) -> int:
        """Whole steps that fit into so many seconds."""
        low, high = 0, most
        while low < high:
            steps = (low + high + 1) // 2
            if self.costs.decode_s(len(self._running), self._context, steps) <= seconds + EPSILON_S:
                low = steps
            else:
                high = steps - 1
        return low

    def _decode(self, steps: int) -> None:
        if steps:
            running = len(self._running)
            self._until_s += self.costs.decode_s(running, self._context, steps)
            self._steps += steps
            self._context += running * steps
            self.generated += running * steps

    def _end(self) -> None:
        """Samples that have all their tokens leave."""
        while self._steps_to_end() == 0:
            one = self._ends[0][2]
            self._deltas.append(self._flush(one, one.finish))
            self._leave(one)

    def _make_room(self) -> None:
        """Before a step that the cache has no room for, the samples begun last lose theirs: they are told of, wait
        before all others, and are computed again (vLLM's preemption by recomputation, arXiv 2309.06180, section 4.5).

        One sample alone goes on in any case: whoever asks for one that cannot fit is told so before.
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

    def _fits(self, request: GenerateRequest) -> bool:
        """Whether the cache has room for a sample that comes in, and for a step then; always where it is alone."""
        context = self._context + count(request.prompt_ids) + count(request.prefix_ids)
        return not self._running or context + len(self._running) + 1 <= (1 - WATERMARK) * self._cache_tokens

    def _admit(self) -> None:
        """Fill free slots. A prompt and the tokens brought along are computed before decoding goes on."""
        while self._queue and len(self._running) < self.costs.slots and not self._paused:
            if self._queue[0].min_version > self.version.number or not self._fits(self._queue[0]):
                return
            self._until_s += self.costs.prefill_s(self._begin(self._queue.popleft()))

    def _begin(self, request: GenerateRequest) -> int:
        """Give it a slot; returns the tokens to compute before its next one."""
        have, kept = count(request.prefix_ids), self._kept(request)
        limit, length = request.sampling.max_new_tokens, self._completions.length(request.sample_id)
        one = _Running(
            request,
            self._steps - kept,
            have,
            max(have, min(limit, length)),
            "stop" if length <= limit else "length",
        )
        tokens = self._uncached(request) + kept
        self._running[request.sample_id] = one
        self._context += count(request.prompt_ids) + kept
        heapq.heappush(self._ends, (one.offset + one.end, self._serial, one))
        self._serial += 1
        if one.end == kept:
            self._end()
        return tokens

    def _kept(self, request: GenerateRequest) -> int:
        """Completion tokens with which a sample begins here, at most those it brings along; the others are made again,
        and told to nobody."""
        return count(request.prefix_ids)

    def _leave(self, one: _Running) -> None:
        one.gone = True
        del self._running[one.request.sample_id]
        self._context -= count(one.request.prompt_ids) + self._steps - one.offset

    def _uncached(self, request: GenerateRequest) -> int:
        """Prompt tokens to compute: none when a sibling came lately."""
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
        request = one.request
        token_ids, logprobs = self._completions.tokens(request.sample_id, self.computes_with, start, one.flushed)
        return TokenDelta(
            sample_id=request.sample_id,
            lease_id=request.lease_id,
            attempt=request.attempt,
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            version=self.version,
            finish=finish,
        )

    def _last_words(self, request: GenerateRequest, error: str = "") -> TokenDelta:
        """Of a sample that was never begun."""
        return TokenDelta(
            sample_id=request.sample_id,
            lease_id=request.lease_id,
            attempt=request.attempt,
            start=count(request.prefix_ids),
            token_ids=b"",
            logprobs=b"",
            version=self.version,
            finish="aborted",
            error=error,
        )


class SteppedState(SimulatedEngine):
    """Time does not move it: only `step` does."""

    def __init__(self, costs: MeasuredEngine, completions: Completions, *, budget_tokens: int) -> None:
        super().__init__(costs, completions, now_s=0.0)
        self._measured, self._budget = costs, budget_tokens
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
        """One forward pass, new samples in it; its seconds."""
        rows, context, prefilled = len(self._running), self._context, 0.0
        while self._queue and len(self._running) < self.costs.slots and prefilled < self._budget:
            if self._queue[0].min_version > self.version.number:
                break
            before = len(self._prompts)
            tokens = self._begin(self._queue.popleft())
            prefilled += tokens * (self._measured.new_prompt_share if len(self._prompts) > before else 1.0)
        drawn = len(self._running)
        seconds = self._measured.forward_s(rows=rows, context_tokens=context, drawn=drawn, prefilled=prefilled)
        self._steps += 1
        self._context += drawn
        self.generated += drawn
        self.work = EngineWork(
            passes=self.work.passes + 1,
            rows=self.work.rows + rows,
            context_tokens=self.work.context_tokens + context,
            drawn=self.work.drawn + drawn,
            prefilled=self.work.prefilled + round(prefilled),
            busy_s=self.work.busy_s + seconds,
            cpu_s=self.work.cpu_s + seconds,
        )
        self._end()
        return seconds

    def _admit(self) -> None:
        """New samples come in with the next pass."""


class SteppedEngine:
    """Implements `core.protocols.Engine`.

    Args:
        spend: called, within every call that takes time, with its seconds.
    """

    def __init__(
        self,
        costs: MeasuredEngine,
        completions: Completions,
        *,
        budget_tokens: int,
        swap_s: float,
        spend: Callable[[float], None],
    ) -> None:
        self._state = SteppedState(costs, completions, budget_tokens=budget_tokens)
        self._costs, self._swap_s, self._spend = costs, swap_s, spend

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(batch_invariant=False, logprobs=True, keeps_kv=False, lora=False, own_sampler=True)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._state.submit(requests, 0.0)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        spent_s = 0.0
        while self._state.runnable:
            spent_s += self._state.step()
            if spent_s >= deadline_s:
                break
        self._spend(spent_s)
        return self._news()

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        self._state.abort(sample_ids, 0.0)
        return self._state.take_ended()

    def load(self, version: PolicyVersion) -> None:
        """What running samples have in the cache is computed again."""
        again_s = self._state.cached_tokens * self._costs.prefill_token_s
        self._state.load(version, computes_with=version, swap_s=0.0, now_s=0.0)
        self._spend(self._swap_s + again_s)

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

    def _news(self) -> list[TokenDelta]:
        ended = self._state.take_ended()
        return [*ended, *self._state.flush(0.0)]
