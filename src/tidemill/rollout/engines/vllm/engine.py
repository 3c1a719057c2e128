"""Generates with vLLM's `LLMEngine` in this process, so that weights change between two of its steps.

At most `slots` samples are inside vLLM; the others wait here, as in the embedded engine. Tokens are ended by the same
code, and samples draw the same noise.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tidemill.core.errors import UserError
from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import (
    EngineWork,
    GenerateRequest,
    LogprobBuffer,
    PolicyVersion,
    SampleId,
    TokenBuffer,
    TokenDelta,
    pack_logprobs,
    unpack_tokens,
)
from tidemill.models.snapshots import Part, joined_views
from tidemill.models.weight_stream import WeightStream
from tidemill.rollout.engines.vllm.adapters import Adapters, AdapterSettings
from tidemill.rollout.engines.vllm.rank_watch import RankWatch
from tidemill.rollout.sampling import NOISE
from tidemill.rollout.sequence import Sequence
from tidemill.rollout.weight_sources import rows_of
from tidemill.weights.snapshot import Snapshot

PROBE_STEPS = 10_000
"""Steps after which a probe counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of an engine.

    Args:
        model: folder with the model's configuration; or a source of weights that `load_format` reads.
        dtype: of the weights: "float32", "bfloat16" or "float16".
        context: maximum prompt plus completion, in tokens.
        ranks: parts of the model, each a process if there are several.
        args: further arguments of vLLM's `EngineArgs`.
        keep_cache: a running sample keeps its keys and values when a version is loaded.
        adapter: None if versions are whole models.
        sleeps: whether the engine frees its GPU memory between two versions; on a CPU it never does.
        cache_gb: memory of the KV cache of all ranks on a CPU; on a GPU `memory_fraction` of its memory is used in all.
    """

    model: str
    dtype: str
    slots: int
    context: int
    ranks: int = 1
    batch_invariant: bool = False
    keep_cache: bool = False
    prefill_chunk_tokens: int = 512
    cache_gb: float = 1.0
    memory_fraction: float = 0.9
    load_format: str = "dummy"
    args: Mapping[str, Any] = field(default_factory=dict)
    adapter: AdapterSettings | None = None
    sleeps: bool = False


def set_environment(settings: VllmSettings) -> None:
    """vLLM reads these variables when it is imported."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # on GPUs too, where V2 was never tried with Tidemill
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(settings.cache_gb / settings.ranks))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_BATCH_INVARIANT": str(int(settings.batch_invariant)),
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.ranks > 1:
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of each rank


def start_vllm(settings: VllmSettings, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """An `LLMEngine` that loads snapshots and draws position-addressed noise.

    Args:
        changes: other values of arguments of vLLM's `EngineArgs`.

    Raises:
        UserError: vLLM would schedule asynchronously, so that weights could change in the middle of a step, or with a
            model runner that was not tested.
    """
    set_environment(settings)
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    usual = engine_arguments(
        settings, on_cpu=current_platform.is_cpu(), can_sleep=current_platform.is_sleep_mode_available()
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**usual | dict(changes)))
    config = engine.vllm_config
    if config.scheduler_config.async_scheduling or config.use_v2_model_runner:
        what = "this vLLM schedules asynchronously, or with Model Runner V2"
        raise UserError(what, where="engine.vllm", hint="use a model that vLLM's first model runner (V1) can run")
    if settings.ranks > 1:
        from tidemill.rollout.engines.vllm.rank import unlink_queue

        engine.collective_rpc("unlink_shared_memory")
        unlink_queue(engine.model_executor.rpc_broadcast_mq.buffer)
    return engine


def engine_arguments(settings: VllmSettings, *, on_cpu: bool, can_sleep: bool) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`. On GPUs vLLM compiles the model and captures CUDA graphs.

    Graphs read the weights where a new version is copied to: vLLM's reload keeps the storage of every parameter, as its
    sleep mode keeps addresses. Logits, noise and logprobs are computed outside of the graphs.
    """
    return {
        "model": settings.model,
        "load_format": settings.load_format,
        "runner": "generate",
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "enforce_eager": on_cpu,
        "max_model_len": settings.context,
        "max_num_seqs": settings.slots,
        "max_num_batched_tokens": max(settings.prefill_chunk_tokens, settings.slots),
        "gpu_memory_utilization": settings.memory_fraction,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": [f"{__package__}.noise:PositionNoise"],
        "worker_extension_cls": f"{__package__}.rank.Rank",
        "tensor_parallel_size": settings.ranks,
        "distributed_executor_backend": "mp" if settings.ranks > 1 else None,
        "seed": 0,
        "enable_sleep_mode": settings.sleeps and can_sleep,
        **(settings.adapter.engine_args() if settings.adapter else {}),
        **settings.args,
    }


def watch_ranks(llm: Any) -> RankWatch:
    """Watch the ranks of an `LLMEngine` that are processes."""
    workers = getattr(getattr(llm, "model_executor", None), "workers", ())
    return RankWatch([each.proc for each in workers])


class VllmEngine:
    """Implements `core.protocols.Engine`. Not thread-safe: one call at a time.

    Args:
        decode: converts token ids to text, for stop strings.
    """

    def __init__(
        self, settings: VllmSettings, *, decode: Callable[[Seq[int]], str], version: PolicyVersion, llm: Any = None
    ) -> None:
        self._settings, self._decode, self._version = settings, decode, version
        self._llm: Any = llm or start_vllm(settings)
        self._watch = watch_ranks(self._llm)
        self._whole = True  # False after weights were loaded in part
        self._adapters = Adapters(settings.adapter) if settings.adapter else None
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}  # by vLLM's request id
        self._ended: list[Sequence] = []
        self._probe_name = ""
        self._probe_logprobs: list[float] = []  # of its tokens after the first, when it has ended
        self._requests = self._loads = self._steps = self._generated = self._rows = self._context_tokens = 0
        self._prompt_computed = self._prompt_reused = 0
        self._busy_s = self._cpu_s = 0.0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="vllm",
            batch_invariant=self._settings.batch_invariant and self._adapters is None,
            logprobs=True,
            keeps_kv=self._settings.keep_cache,
            lora=self._adapters is not None,
            draws=NOISE,
        )

    def submit(self, requests: Seq[GenerateRequest]) -> None:
        """Raises UserError: a prompt is empty or fills the context, or the sampling is not supported."""
        for request in requests:
            if request.sampling.top_k or request.sampling.top_p < 1:
                what = "top-k and top-p are not supported by this engine"
                raise UserError(what, where="sampling", hint='remove them, or set engine.kind = "embedded"')
        for sequence in [Sequence(request, self._settings.context) for request in requests]:
            ended = sequence.abort_if_other_version(self._version)
            (self._ended if ended else self._waiting).append(sequence)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        until = time.monotonic() + deadline_s
        self._admit()
        while self._running:
            self._step()
            self._admit()
            if time.monotonic() >= until:
                break
        ended, self._ended = self._ended, []
        deltas = (sequence.flush(self._version) for sequence in [*ended, *self._running.values()])
        return [delta for delta in deltas if delta is not None]

    def abort(self, sample_ids: Seq[SampleId]) -> list[TokenDelta]:
        ids = set(sample_ids)
        inside = {name: each for name, each in self._running.items() if each.request.sample_id in ids}
        aborted = [*(each for each in self._waiting if each.request.sample_id in ids), *inside.values()]
        self._waiting = deque(each for each in self._waiting if each.request.sample_id not in ids)
        self._remove(inside)
        for sequence in aborted:
            sequence.finish = "aborted"
        return [delta for delta in (each.flush(self._version) for each in aborted) if delta is not None]

    def load(self, version: PolicyVersion) -> None:
        """Use the weights of `bind`. Running samples keep their tokens, and recompute their keys and values unless the
        engine keeps caches. A sample without a new token starts again with either setting.

        Tokens of the old version must have been polled before.
        """
        self._loads += 1
        inside = {name: each for name, each in self._running.items() if each.abort_if_other_version(version)}
        self._remove(inside)
        waiting = [each for each in self._waiting if each.abort_if_other_version(version)]
        self._ended += [*inside.values(), *waiting]
        self._waiting = deque(each for each in self._waiting if each.finish is None)
        if self._settings.keep_cache and self._running:
            # vLLM cannot clear the prefix cache while requests run; later requests cannot read it: their salt differs.
            self._add_again({name: each for name, each in self._running.items() if not each.has_drawn})
        else:
            if self._adapters is not None:  # a request of vLLM keeps its adapter until it ends
                self._add_again(dict(self._running))
            with self._watch.calls():
                cleared = self._llm.reset_prefix_cache(reset_running_requests=True)
            if not cleared:
                raise RuntimeError("vLLM did not clear its prefix cache after new weights")
        self._version = version

    def bind(self, parts: Seq[Snapshot], part: Part) -> None:
        """Copy verified snapshots into the model, or add their adapter; `load` must follow.

        Implements `rollout.weight_sources.SnapshotUser`.

        Raises:
            WorkerLost: a rank has ended.
            RuntimeError: it was not loaded whole. Nothing can be generated in either case.
        """
        if self._settings.ranks == 1 or self._is_adapter(part):
            self.receive(joined_views(rows_of(parts)), part)
            return
        digests = [each.manifest.digest for each in parts]
        loaded = self._load("load_files", [(str(each.file), each.manifest) for each in parts])
        if any(each != digests for each in loaded):
            raise RuntimeError(f"the ranks of vLLM loaded {loaded} instead of {digests}")
        self._whole = True

    @property
    def device_type(self) -> str:
        from vllm.platforms import current_platform

        return str(current_platform.device_type)

    def receive(self, tensors: WeightStream, part: Part) -> None:
        """As `bind`, tensor by tensor. Implements `rollout.weight_sources.StreamUser`, as do the next methods."""
        if self._adapters is not None and self._is_adapter(part):
            adapter = self._adapters.write(tensors)
            with self._watch.calls():
                self._llm.add_lora(adapter)
            return
        self._load("load_stream", tensors)
        self._whole = True

    def sleep(self) -> None:
        """Does nothing on a CPU, which has no sleep mode; neither do the next two methods."""
        if self._sleeps:
            self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])

    def wake_caches(self) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])

    @property
    def _sleeps(self) -> bool:
        return bool(self._llm.vllm_config.model_config.enable_sleep_mode)

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """Logprobs float32 [N - 1] of a fixed sequence int32 [N]. Tokens that samples draw meanwhile are kept."""
        self._probe_name, self._probe_logprobs = self._name(), []
        self._add_request(self._probe_name, unpack_tokens(token_ids), prompt_logprobs_only())
        for _ in range(PROBE_STEPS):
            self._step()
            if self._probe_logprobs:
                return pack_logprobs(self._probe_logprobs)
        raise RuntimeError(f"vLLM did not finish a probe in {PROBE_STEPS} steps")

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            running=len(self._running),
            queued=len(self._waiting),
            free_slots=self._settings.slots - len(self._running),
            tokens_generated=self._generated,
            prompt_tokens_computed=self._prompt_computed,
            prompt_tokens_reused=self._prompt_reused,
            work=EngineWork(
                passes=self._steps,
                rows=self._rows,
                context_tokens=self._context_tokens,
                drawn=self._generated,
                prefilled=self._prompt_computed,
                busy_s=self._busy_s,
                cpu_s=self._cpu_s,
            ),
        )

    def release(self, part: Part) -> None:
        """Release the model and its caches, and end its ranks."""
        if self._settings.ranks > 1 and self._llm is not None:
            self._watch.end(self._llm.model_executor.shutdown)
        self._llm = None
        if self._adapters is not None:
            self._adapters.close()

    def _name(self) -> str:
        self._requests += 1
        return str(self._requests)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.slots:
            if self._waiting[0].request.min_version > self._version.number:
                break
            self._add(self._waiting.popleft())

    def _add(self, sequence: Sequence) -> None:
        name = self._name()
        self._add_request(name, sequence.tokens.tolist(), _params(sequence))
        self._running[name] = sequence

    def _add_again(self, inside: Mapping[str, Sequence]) -> None:
        """Replace requests by new ones, without keys and values."""
        self._remove(inside)
        for sequence in inside.values():
            self._add(sequence)

    def _add_request(self, name: str, token_ids: list[int], params: Any) -> None:
        adapter = self._adapters.newest if self._adapters else None
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if self._settings.keep_cache:
            prompt["cache_salt"] = str(self._loads)
        self._llm.add_request(name, prompt, params, lora_request=adapter)

    def _remove(self, inside: Mapping[str, Sequence]) -> None:
        if inside:
            self._llm.abort_request(list(inside))
            for name in inside:
                del self._running[name]

    def _is_adapter(self, part: Part) -> bool:
        return self._adapters is not None and part == "learned"

    def _load(self, method: str, weights: object) -> list[Any]:
        """Call a method of every `Rank`; their answers."""
        self._whole = False
        with self._watch.calls():
            return self._llm.collective_rpc(method, args=(weights,))  # type: ignore[no-any-return]

    def _step(self) -> None:
        if not self._whole:
            raise RuntimeError("vLLM has weights of two versions: the last one was not loaded whole")
        started_s, started_cpu_s = time.monotonic(), time.thread_time()
        self._steps += 1
        self._rows += len(self._running)
        self._context_tokens += sum(sequence.known for sequence in self._running.values())
        with self._watch.calls():
            outputs = self._llm.step()
            drawn = self._drawn_logprobs()
        for output in outputs:
            self._take(output, drawn)
        self._busy_s += time.monotonic() - started_s
        self._cpu_s += time.thread_time() - started_cpu_s

    def _drawn_logprobs(self) -> dict[tuple[int, int], float]:
        """Of the last step, at temperatures that vLLM has none for; see `noise.drawn_logprobs`."""
        if all(_is_plain(sequence) for sequence in self._running.values()):
            return {}
        return self._llm.collective_rpc("logprobs_of_last_step")[0]  # type: ignore[no-any-return]

    def _take(self, output: Any, drawn: Mapping[tuple[int, int], float]) -> None:
        name = output.request_id
        if name == self._probe_name:
            rows = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
            self._probe_logprobs = [float(each[token].logprob) for each, token in rows if each]  # all but the first
            return
        sequence = self._running.get(name)
        if sequence is None:  # ended by us, and not yet known to vLLM
            return
        (completion,) = output.outputs
        if not sequence.computed:  # its first tokens
            reused = output.num_cached_tokens or 0
            self._prompt_reused += reused
            self._prompt_computed += sequence.known - reused
            sequence.computed = sequence.known
        for at, token_id in enumerate(completion.token_ids):
            if sequence.finish is None:  # tokens after a stop are dropped
                if _is_plain(sequence):
                    logprob = float(completion.logprobs[at][token_id].logprob)
                else:
                    logprob = drawn[sequence.seed, sequence.known - 1]
                sequence.append(token_id, logprob, self._decode)
                self._generated += 1
        if sequence.finish is None and output.finished:
            raise RuntimeError(f"vLLM ended a sample ({completion.finish_reason}) with room for {sequence.room} tokens")
        if sequence.finish is not None:
            if not output.finished:
                self._llm.abort_request([name])
            del self._running[name]
            self._ended.append(sequence)


def prompt_logprobs_only() -> Any:
    """vLLM's parameters of a request whose result is the logprobs of its prompt; vLLM draws at least one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _params(sequence: Sequence) -> Any:
    """vLLM's parameters of a sample: it stops where we stop it, and the noise decides the token."""
    from tidemill.rollout.engines.vllm.noise import SEED
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    temperature = sequence.request.sampling.temperature
    return SamplingParams(
        temperature=temperature,
        top_k=1,
        max_tokens=sequence.room,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if _is_plain(sequence) else None,
        output_kind=RequestOutputKind.DELTA,
        extra_args={SEED: sequence.seed},
    )


def _is_plain(sequence: Sequence) -> bool:
    """Whether vLLM itself computes its logprobs: at temperature 1, and of greedy tokens as at temperature 1."""
    return sequence.request.sampling.temperature in (0.0, 1.0)
