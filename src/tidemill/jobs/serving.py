"""Serves a model over the workers of a run: every request is a sample, which continues when its worker vanishes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.config.task import ServedTask
from tidemill.controller.collector import SampleCollector, collect_samples
from tidemill.controller.in_flight import InFlight, SamplingPlan, sampling_params
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.controller.samples import Sample, TokenObserver
from tidemill.controller.waiting import Timeouts
from tidemill.core.protocols import LoopClock, TurnFormat
from tidemill.core.records import ITEM_BYTES, Finish, Prompt, Reward, SampleId, SamplingParams, Trajectory
from tidemill.gateway.backend import CompletionRequest, TokenChunk
from tidemill.gateway.errors import SERVER, ApiError
from tidemill.gateway.requests import CompletionParams
from tidemill.models.codec import TextCodec
from tidemill.models.model_source import ModelSource, exact_models, locate
from tidemill.models.turn_format import turn_format
from tidemill.runtime.backend import OpenBackend, fleet_of
from tidemill.runtime.runtimes import runtime_of
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

NEVER_S = 1e9
PURPOSE = "serve"


def serving_spec(spec: RunSpec, model: ModelSource | None, *, template_given: bool = False) -> RunSpec:
    """The configuration of a served model: the sections about models, engines and machines. A model that a run trained
    on chats is served with its template.

    Args:
        model: replaces the configured one; an adapter is merged.
        template_given: `model.chat_template` decides, whatever the run did.

    Raises:
        UserError: there is no such model.
    """
    machines = ("pool", "fleet", "ray", "deploy", "placement", "weights")
    kept = ("runtime", "run", "model", "sampling", "engine", *machines, "gateway")
    sections: dict[str, Any] = {name: getattr(spec, name) for name in kept}
    served = model or locate(spec.model.source)
    config = exact_models(spec).model if model is None else model.merged_config(spec.model)
    if served.prompts.chat and not template_given:
        config = config.model_copy(update={"chat_template": True})
    sections["model"] = config
    return RunSpec(**sections, task=ServedTask(kind="served"), trainer=spec.trainer, telemetry=spec.telemetry)


class NoReward:
    """Implements `core.protocols.Scorer` for samples that nobody learns from."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=0.0)

    async def close(self) -> None:
        """Nothing to do."""


@dataclass(slots=True)
class Listener:
    """Who waits for the tokens of a sample."""

    index: int
    chunks: asyncio.Queue[TokenChunk | Exception]
    sent: int = 0  # tokens

    def send(self, sample: Sample) -> None:
        finish = cast("Finish | None", sample.finish)  # no limit of an episode: clients' samples have no environment
        start, end = self.sent * ITEM_BYTES, len(sample.token_ids)
        if end > start or finish is not None:
            self.sent = end // ITEM_BYTES
            self.chunks.put_nowait(
                TokenChunk(
                    index=self.index,
                    token_ids=bytes(sample.token_ids[start:end]),
                    logprobs=bytes(sample.logprobs[start:end]),
                    finish=finish,
                )
            )


class TokenFeed(TokenObserver):
    """Hands the tokens of samples in flight to those who wait for them, report by report."""

    def __init__(self) -> None:
        self.listeners: dict[SampleId, Listener] = {}

    def tokens_added(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if (listener := self.listeners.get(sample.sample_id)) is not None:
                listener.send(sample)

    def fail(self, error: Exception) -> None:
        for listener in self.listeners.values():
            listener.chunks.put_nowait(error)


class ServedModel:
    """The half of `gateway.backend.Served` that is about the model."""

    def __init__(
        self, name: str, codec: TextCodec, turns: TurnFormat, *, context_tokens: int, defaults: SamplingParams
    ) -> None:
        self.name, self.format = name, turns
        self.context_tokens, self.defaults = context_tokens, defaults
        self.vocabulary, self.longest_token = codec.token_count, codec.longest_token
        self.encode = codec.encode


class ServedFleet(ServedModel):
    """Implements `gateway.backend.Served`."""

    def __init__(
        self,
        name: str,
        codec: TextCodec,
        turns: TurnFormat,
        collector: SampleCollector,
        in_flight: InFlight,
        rollout: RolloutContext,
        feed: TokenFeed,
        *,
        context_tokens: int,
        defaults: SamplingParams,
        stall_s: float,
    ) -> None:
        super().__init__(name, codec, turns, context_tokens=context_tokens, defaults=defaults)
        self._collector, self._in_flight = collector, in_flight
        self._rollout, self._feed, self._stall_s = rollout, feed, stall_s
        self._positions: dict[SampleId, int] = {}
        self._next, self._unseeded = 0, secrets.randbits(62)
        self._same: WeakValueDictionary[SampleId, asyncio.Lock] = WeakValueDictionary()
        self._failure: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._failure is None and self._rollout.fleet.engine_count > 0

    @property
    def figures(self) -> dict[str, float]:
        return {
            "samples_assigned": float(self._in_flight.running),
            "samples_waiting": float(self._in_flight.unfinished - self._in_flight.running),
            "workers": float(self._rollout.fleet.engine_count),
        }

    def refuse(self, params: CompletionParams, key: str) -> None:
        """Nothing: every parameter is obeyed."""

    async def generate(self, requested: CompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Served`."""
        chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        prompt = Prompt(prompt_id=PURPOSE, token_ids=requested.prompt_ids, text="", answer="")
        ids = self._ids(requested)
        async with AsyncExitStack() as stack:
            if requested.params.seed is not None:  # an equal request in flight has the same ids
                await stack.enter_async_context(self._same.setdefault(ids[0], asyncio.Lock()))
            stack.callback(self._end, ids)
            for index, sample_id in enumerate(ids):
                self._feed.listeners[sample_id] = Listener(index, chunks)
                self._positions[sample_id] = self._next
                self._in_flight.open_alone(sample_id, prompt, requested.sampling, position=self._next)
                self._next += 1
            self._collector.mailbox.notify()
            left = requested.params.n
            while left:
                if self._failure is not None:
                    raise self._unavailable()
                try:
                    async with asyncio.timeout(self._stall_s):
                        chunk = await chunks.get()
                except TimeoutError as error:
                    message = f"no worker generated a token for {self._stall_s:g} s; ask again"
                    raise ApiError(503, message, kind=SERVER, code="unavailable", retry_s=10) from error
                if isinstance(chunk, Exception):
                    raise self._unavailable()
                left -= chunk.finish is not None
                yield chunk

    async def collect(self) -> None:
        """Close finished samples until the run is to stop.

        Raises:
            Exception: what ended the engine or the fleet; every request fails.
        """
        try:
            while True:
                trajectory = await self._collector.next()
                if (position := self._positions.pop(trajectory.sample_id, None)) is not None:
                    self._in_flight.close(position)
        except StopRequested:
            self._fail(RuntimeError("the gateway stops"))
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._feed.fail(error)

    def _unavailable(self) -> ApiError:
        return ApiError(503, "the model is not served any more", kind=SERVER, code="unavailable", retry_s=10)

    def _ids(self, requested: CompletionRequest) -> list[SampleId]:
        """Equal for equal requests with a seed; otherwise new."""
        digest = hashlib.blake2b(requested.prompt_ids, digest_size=12)
        seed, epoch = requested.params.seed, 0
        if seed is None:
            seed, epoch = self._unseeded, self._next
        return [
            SampleId(run_seed=seed, purpose=PURPOSE, prompt_id=digest.hexdigest(), epoch=epoch, index=index)
            for index in range(requested.params.n)
        ]

    def _end(self, ids: Sequence[SampleId]) -> None:
        """End what is still generated: the client has left, or all has arrived."""
        running = defaultdict[str, list[SampleId]](list)
        for sample_id in ids:
            self._feed.listeners.pop(sample_id, None)
            sample = self._in_flight.get(sample_id)
            position = self._positions.pop(sample_id, None)
            if sample is None or position is None:
                continue
            if sample.lease_id and sample.finish is None:
                running[sample.lease_id].append(sample_id)
            self._in_flight.close(position)
        for lease_id, samples in running.items():
            self._rollout.fleet.abort(lease_id, samples)


@asynccontextmanager
async def served_fleet(
    spec: RunSpec,
    run: RunDirectory,
    recorder: Recorder,
    stop: asyncio.Event,
    *,
    open_backend: OpenBackend | None = None,
) -> AsyncIterator[ServedFleet]:
    """Start the engines of a configuration of `serving_spec`, and serve its model while the block runs.

    Args:
        open_backend: replaces the backend of `spec.runtime`.

    Raises:
        UserError: the model, the device or the pool cannot be used.
    """
    clock = LoopClock()
    async with AsyncExitStack() as stack:
        opened = (open_backend or runtime_of(spec).open)(spec, run, recorder, clock)
        backend = await stack.enter_async_context(opened)
        recorder.event("machine", **backend.device_info)
        fleet = fleet_of(spec, backend, recorder, clock)
        await stack.enter_async_context(fleet)
        feed, version = TokenFeed(), backend.trainer.version
        rollout = RolloutContext(
            fleet=fleet,
            ledger=Ledger(None),
            scorer=NoReward(),
            codec=backend.codec,
            telemetry=recorder,
            clock=clock,
            stop=stop,
            timeouts=Timeouts(notice_s=3600.0, scorer_s=NEVER_S, pool_s=NEVER_S),
            gives_up=False,  # a request gives up after `gateway.stall_s`, and others may be shorter
            observers=(feed,),
        )
        defaults = msgspec.structs.replace(sampling_params(spec, backend.codec, ()), max_new_tokens=0)
        plan = SamplingPlan(purpose=PURPOSE, run_seed=0, group_size=1, sampling=defaults)
        in_flight = InFlight(plan, version_number=version.number)
        await fleet.publishing.publish(version)
        collector = await stack.enter_async_context(collect_samples(in_flight, rollout, endless=True))
        served = ServedFleet(
            spec.gateway.name or spec.run.name,
            backend.codec,
            turn_format(backend.codec, spec.env, chat_template=spec.model.chat_template),
            collector,
            in_flight,
            rollout,
            feed,
            context_tokens=backend.context_tokens,
            defaults=defaults,
            stall_s=spec.gateway.stall_s,
        )
        yield served
