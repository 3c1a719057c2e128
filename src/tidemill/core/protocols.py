"""The interfaces between layers, and the clock. Implementations live below or above; nobody imports across."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from tidemill.core.errors import DeadlineError
from tidemill.core.records import (
    Completion,
    EngineWork,
    FleetRow,
    GenerateRequest,
    Group,
    Growth,
    Lease,
    LeaseEvent,
    Loaded,
    LogprobBuffer,
    Message,
    PolicyVersion,
    Prompt,
    Pulled,
    Read,
    Record,
    Reward,
    SampleId,
    StepMetrics,
    TokenBuffer,
    TokenDelta,
    Trajectory,
    WeightManifest,
    WorkerReport,
)

T = TypeVar("T")


class Clock(Protocol):
    """Seconds since an arbitrary origin, never going back."""

    def now(self) -> float: ...


class LoopClock:
    """The running event loop's own clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def within(awaitable: Awaitable[T], *, timeout_s: float, awaited: str, look_at: str) -> T:
    """Await with a deadline. (Not by `asyncio.wait_for`: Python 3.11's loses a cancellation that meets the result.)

    Raises:
        DeadlineError: naming `awaited` and `look_at` when `timeout_s` seconds pass first.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(awaited, waited_s=timeout_s, look_at=look_at) from error


class Compute(Protocol):
    """Where blocking numerical work runs, off the controller's loop, one call at a time in the order asked for."""

    async def run(self, function: Callable[[], T]) -> T: ...


class EngineCapabilities(Record):
    """What an engine declares about itself."""

    batch_invariant: bool  # a sample's tokens do not depend on its neighbours, slot or restarts
    logprobs: bool  # of sampled tokens; an engine without fills their places with NaN
    keeps_kv: bool  # the cache survives a weight load
    lora: bool  # a version may be an adapter alone
    own_sampler: bool  # True: the engine's own random numbers; False: Tidemill's counter-based sampling


class EngineStatus(Record):
    """Counts of samples and slots at a token boundary."""

    version: PolicyVersion
    running: int
    queued: int
    free_slots: int
    tokens_generated: int  # since the engine started
    prompt_tokens_computed: int
    prompt_tokens_reused: int  # served from a shared prefix instead of being computed
    work: EngineWork = EngineWork()


class Engine(Protocol):
    """Generates tokens: ids in, ids out. Every call happens on one thread or one task at a time."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue samples in the order given."""

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        """Decode for about `deadline_s` seconds (at least one step); return what was made, at most one delta a sample.

        Returns at once when nothing is queued or running.
        """

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        """Forget samples; returns their last deltas with finish "aborted"."""

    def load(self, version: PolicyVersion) -> None:
        """Swap to the weights of `version` at a token boundary; cached keys and values of older weights are dropped."""

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """Logprobs (float32 [N - 1], temperature 1) of the tokens after the first of a fixed sequence (int32 [N])."""

    def status(self) -> EngineStatus: ...


class WeightSource(Protocol):
    """Where an engine that does not share the trainer's parameters has its weights from: one buffer is in use while
    another is filled."""

    async def prepare(self, version: PolicyVersion) -> Pulled:
        """Pull a version and verify it, while the engine goes on with the one it has.

        Raises:
            WeightsError: it cannot be had whole; the version in use stays in use.
        """

    def swap(self, pulled: Pulled) -> None:
        """Put what was prepared under the engine's model. On the engine's compute, at a token boundary."""

    def close(self) -> None:
        """Give up whatever is held, when neither the engine nor this will be called again."""


class Worker(Protocol):
    """The process (or task) around an engine: takes requests, flushes one report per tick.

    Every call raises `WorkerLost` once the worker is known to be gone.
    """

    async def submit(self, requests: Sequence[GenerateRequest]) -> None: ...

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        """Stop generating samples; their last tokens and the finish "aborted" come with the next report."""

    async def load(self, version: PolicyVersion) -> Loaded:
        """Pull a published version, verify it, and swap to it at a token boundary."""

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        """The next tick's report, or None when `timeout_s` seconds pass without one.

        A worker with nothing to generate says so now and then: any report is a heartbeat.
        """

    async def close(self) -> None:
        """End it after the tick that is running."""

    def kill(self) -> None:
        """End it now, as an eviction does: nothing that was not reported survives. Harmless when it is already gone."""


class WorkerHost(Protocol):
    """Starts workers on leased machines."""

    async def start(self, lease: Lease) -> Worker:
        """Raises WorkerLost: the machine went away, or the worker does not come up on it."""

    async def close(self) -> None:
        """Stop whatever `start` started and is still there."""


class Provider(Protocol):
    """Where leases come from."""

    def want(self, workers: int) -> None:
        """How many preemptible workers would be of use from now on. Never waits; the provider gives what it can."""

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        """The next thing that happened, or None when `timeout_s` seconds pass without one."""

    async def release(self, lease_id: str) -> None:
        """The lease is of no more use: its worker was lost, quarantined or is superfluous."""

    async def close(self) -> None: ...


class Publisher(Protocol):
    """Makes the trainer's current weights available to workers."""

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        """Returns when the version can be pulled. Readers of older versions are not disturbed."""

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Turns groups into gradients as they come, and a batch into one new version."""

    @property
    def version(self) -> PolicyVersion: ...

    async def accumulate(self, group: Group) -> None:
        """Take the next group of the open batch; a microbatch runs as soon as its token budget is full."""

    async def commit(self, step: int) -> StepMetrics:
        """Finish the batch: remaining microbatches, optimizer step(s), and the next version, now current."""

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        """Of each completion's tokens (float32 [N]) under the current version, at their own temperature."""


class Checkpoints(Protocol):
    """Durable trainer states, by step."""

    async def save(self, step: int, *, score: float | None) -> None:
        """Write the trainer's state atomically; `score` (held-out mean reward, if just measured) decides the best."""

    async def restore_latest(self) -> int:
        """Restore the newest complete state into the trainer; returns its step, 0 when there is none."""


class PromptSource(Protocol):
    """The prompts of a run, addressed by position so that nothing about data order needs to be saved but a number."""

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`, in canonical order: a pure function of the seed and the step."""

    def held_out(self) -> Sequence[Prompt]:
        """Evaluation prompts, disjoint from every training prompt, always the same."""


class Scorer(Protocol):
    """Judges a finished sample; never raises for a fault of the reward function, but returns an invalid reward. Only
    what no sample can be judged without any more is raised (`ReaderLost`)."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward: ...

    async def close(self) -> None: ...


class Reader(Protocol):
    """A frozen model that reads samples: a reward model, or the reference."""

    def grow(self, grown: Sequence[Growth]) -> None:
        """Advice that never waits: these tokens are certain, and may be computed ahead. No result depends on it."""

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        """What the model makes of a finished sample (int32 [P + T]).

        Raises:
            ReaderLost: the model is gone and does not come back.
        """

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        """Samples that will not be read as they were: they begin again, or were given up. Never waits."""

    def take_counts(self) -> tuple[int, int]:
        """Tokens of training samples computed before and after their samples were finished, since the last call."""

    async def close(self) -> None: ...


class Codec(Protocol):
    """Between text and token ids."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Apply the model's chat template with the generation prompt; returns the text and its token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, special tokens left out."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


class CompletionCodec(Codec, Protocol):
    """Also encodes completions that come as text: those of data files. (Sampled ones are ids, and stay so.)"""

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text alone, whatever prompt it follows."""

    def end_token_id(self, *, chat: bool) -> int:
        """The token that ends the model's turn after a plain prompt, or in its chat template."""


class Journal(Protocol):
    """Durable, ordered storage for the ledger. An entry is accepted when `append` returns."""

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        """Entries, each with the step it is filed under; all of them survive or only the first so many."""

    async def load(self) -> list[tuple[int, bytes]]:
        """Every surviving (step, blob), in order of appending. A torn last entry is dropped, never returned."""

    async def prune(self, through_step: int) -> None:
        """Forget the entries of steps up to and including `through_step`."""

    async def close(self) -> None: ...


class Telemetry(Protocol):
    """Where the run's story goes. Never raises for a failing optional sink."""

    def resume(self, step: int) -> None:
        """Training starts, or goes on, after `step`: what an earlier session told of later ones will be told again."""

    def event(self, name: str, **fields: Any) -> None:
        """One line in events.jsonl."""

    def step(self, metrics: StepMetrics) -> None:
        """One line in metrics.jsonl, the live view and the optional sinks."""

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """Completed samples, trajectory i answering prompt i."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far the current phase ("rollout", "training", "evaluation", "checkpoint") is."""

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        """The workers there are, for the live view; nothing of it is written."""
