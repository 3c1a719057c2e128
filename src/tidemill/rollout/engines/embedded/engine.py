"""The embedded engine: continuous batching over slots, on the parameters of the trained model.

A step admits waiting samples into free slots, runs the model once (see `forwards`), draws one token for each sample
whose prompt is computed, and frees the slots of finished samples. On a GPU the host reads tokens one step later (see
`static_scheduler`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers import PreTrainedModel

from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import (
    EngineWork,
    GenerateRequest,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
)
from tidemill.kernels.availability import missing
from tidemill.models.loading import probe_logprobs
from tidemill.rollout.engines.embedded.scheduler import FixedScheduler, PackedScheduler, TreeScheduler
from tidemill.rollout.sampling import NOISE
from tidemill.rollout.sequence import Sequence

if TYPE_CHECKING:
    from tidemill.rollout.engines.embedded.static_decode import StepKernels

Scheduler: TypeAlias = FixedScheduler | TreeScheduler
log = logging.getLogger(__name__)


def scheduler_kind(kernels: StepKernels | None, device: torch.device) -> Callable[..., Scheduler]:
    """The scheduler of an engine whose results may depend on the batch."""
    if kernels is None and device.type != "cuda":
        return PackedScheduler
    if kernels is None and (reason := missing(device)) is not None:
        log.warning("%s: the engine decodes without kernels of its own, which is slower", reason)
        return PackedScheduler
    from tidemill.rollout.engines.embedded.static_decode import StepKernels
    from tidemill.rollout.engines.embedded.static_scheduler import StaticScheduler

    return partial(StaticScheduler, kernels=kernels or StepKernels())


class EmbeddedEngine:
    """Implements `core.protocols.Engine` with `model` in this process. Not thread-safe: one call at a time.

    Args:
        model: with packed attention; its parameters are read at every step, never copied.
        decode: converts token ids to text, for stop strings.
        slots: samples decoded concurrently.
        context: limit of prompt plus completion, tokens.
        prefill_chunk_tokens: prompt tokens computed per step.
        batch_invariant: compute with fixed shapes; results do not depend on batch composition, chunks and restarts.
        keep_cache: a running sample keeps its keys and values when a version is loaded.
        refresh: called at every load, if `model` is a copy of the trained model (in bf16, for example).
        kernels: decode in static memory with these; by default on a GPU that has Triton.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Callable[[Seq[int]], str],
        slots: int,
        context: int,
        version: PolicyVersion,
        prefill_chunk_tokens: int = 512,
        batch_invariant: bool = False,
        keep_cache: bool = False,
        refresh: Callable[[], None] | None = None,
        kernels: StepKernels | None = None,
    ) -> None:
        self._model = model
        self._decode, self._context, self._version, self._refresh = decode, context, version, refresh
        self._waiting: deque[Sequence] = deque()
        self._ended: list[Sequence] = []
        self._generated = 0
        self._passes = self._rows = self._context_tokens = 0
        self._busy_s = self._cpu_s = 0.0
        self._batch_invariant, self._keep_cache = batch_invariant, keep_cache
        kind: Callable[..., Scheduler] = FixedScheduler
        if not batch_invariant:
            kind = scheduler_kind(kernels, next(model.parameters()).device)
        self._new_scheduler: Callable[[], Scheduler] = partial(
            kind, model, slots=slots, context=context, prefill_chunk_tokens=prefill_chunk_tokens
        )
        self._scheduler = self._new_scheduler()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="embedded",
            batch_invariant=self._batch_invariant,
            logprobs=True,
            keeps_kv=self._keep_cache,
            lora=True,
            draws=NOISE,
        )

    def submit(self, requests: Seq[GenerateRequest]) -> None:
        """Raises UserError: a prompt is empty, or fills the context; no sample of the call is queued."""
        for sequence in [Sequence(request, self._context) for request in requests]:
            ended = sequence.abort_if_other_version(self._version)
            (self._ended if ended else self._waiting).append(sequence)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        until = time.monotonic() + deadline_s
        version = self._version.number
        while self._scheduler.running or (self._waiting and self._waiting[0].request.min_version <= version):
            started_s, started_cpu_s = time.monotonic(), time.thread_time()
            self._step()
            now_s = time.monotonic()
            self._busy_s += now_s - started_s
            self._cpu_s += time.thread_time() - started_cpu_s
            if now_s >= until:
                break
        ended, self._ended = self._ended, []
        deltas = (sequence.flush(self._version) for sequence in [*ended, *self._scheduler.running])
        return [delta for delta in deltas if delta is not None]

    @torch.inference_mode()
    def abort(self, sample_ids: Seq[SampleId]) -> list[TokenDelta]:
        ids = set(sample_ids)
        aborted = [s for s in (*self._waiting, *self._scheduler.running) if s.request.sample_id in ids]
        self._waiting = deque(s for s in self._waiting if s.request.sample_id not in ids)
        for sequence in aborted:
            sequence.finish = "aborted"
        self._scheduler.release()
        return [delta for delta in (sequence.flush(self._version) for sequence in aborted) if delta is not None]

    def load(self, version: PolicyVersion) -> None:
        """Swap weights between two tokens. Running samples keep their tokens, and recompute their keys and values
        unless the engine keeps caches. A sample without a new token starts again with either setting.

        Tokens of the old version must have been polled before.
        """
        restarted = self._scheduler.keep_running() if self._keep_cache else self._scheduler.forget()
        for sequence in reversed(restarted):
            sequence.computed = 0
            self._waiting.appendleft(sequence)
        if self._refresh is not None:
            self._refresh()
        self._version = version
        unfinished = (*self._scheduler.running, *self._waiting)
        self._ended.extend(sequence for sequence in unfinished if sequence.abort_if_other_version(version))
        with torch.inference_mode():
            self._scheduler.release()
        self._waiting = deque(sequence for sequence in self._waiting if sequence.finish is None)

    def drop_caches(self) -> None:
        """Free the memory of the caches until the next step. No sample may be running."""
        before, self._scheduler = self._scheduler, self._new_scheduler()
        self._scheduler.prompt_tokens_computed = before.prompt_tokens_computed
        self._scheduler.prompt_tokens_reused = before.prompt_tokens_reused

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        return probe_logprobs(self._model, token_ids)

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            running=len(self._scheduler.running),
            queued=len(self._waiting),
            free_slots=self._scheduler.free,
            tokens_generated=self._generated,
            prompt_tokens_computed=self._scheduler.prompt_tokens_computed,
            prompt_tokens_reused=self._scheduler.prompt_tokens_reused,
            work=EngineWork(
                passes=self._passes,
                rows=self._rows,
                context_tokens=self._context_tokens,
                drawn=self._generated,
                prefilled=self._scheduler.prompt_tokens_computed,
                busy_s=self._busy_s,
                cpu_s=self._cpu_s,
            ),
        )

    @torch.inference_mode()
    def _step(self) -> None:
        step = self._scheduler.step(self._waiting, self._version.number)
        self._passes += step.passes
        self._rows += len(step.contexts)
        self._context_tokens += sum(step.contexts)
        if not step.drawn:
            return
        for sequence, token_id, logprob in step.drawn:
            sequence.append(token_id, logprob, self._decode)
        self._generated += len(step.drawn)
        self._ended.extend(sequence for sequence, *_ in step.drawn if sequence.finish is not None)
        self._scheduler.release()
