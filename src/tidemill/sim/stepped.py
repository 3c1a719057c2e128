"""An engine that goes on pass by pass when it is polled, as the embedded one does: its time is its caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.core.buffers import LogprobBuffer, TokenBuffer
from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import EngineWork, GenerateRequest, PolicyVersion, SampleId, TokenDelta
from tidemill.sim.completions import Completions
from tidemill.sim.engine import SimulatedEngine
from tidemill.sim.profiles.measured import MeasuredEngine


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
