"""Interfaces between layers, and the clock. Implementations are in other layers, which do not import each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from tidemill.core.errors import DeadlineError
from tidemill.core.evidence import Evidence, GuardDecision, MachineHealth
from tidemill.core.records import (
    Call,
    Completion,
    EngineWork,
    Episode,
    FleetRow,
    GenerateRequest,
    Group,
    Lease,
    LeaseEvent,
    Loaded,
    LogprobBuffer,
    Message,
    ModelScores,
    NewTokens,
    Observation,
    ParsedTurn,
    PolicyVersion,
    Prompt,
    Pulled,
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
    """Monotonic seconds since an arbitrary origin."""

    def now(self) -> float: ...


class LoopClock:
    """The running event loop's clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


async def with_deadline(awaitable: Awaitable[T], *, timeout_s: float, awaited: str, look_at: str) -> T:
    """Await with a deadline. (`asyncio.wait_for` of Python 3.11 can lose a cancellation.)

    Raises:
        DeadlineError: `timeout_s` seconds passed; names `awaited` and `look_at`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(awaited, waited_s=timeout_s, look_at=look_at) from error


class Compute(Protocol):
    """Runs blocking computations off the event loop, one at a time, in call order."""

    async def run(self, function: Callable[[], T]) -> T: ...


class EngineCapabilities(Record):
    """Properties of an engine."""

    name: str  # as in `engine.kind`
    batch_invariant: bool  # a sample's tokens do not depend on other samples, its slot or restarts
    logprobs: bool  # returns logprobs of sampled tokens; otherwise NaN
    keeps_kv: bool  # keeps its cache when it loads weights
    lora: bool  # loads adapters without their base
    draws: str  # name of its noise, a function of sample, position and token; or "stream": in the order of the calls


class EngineStatus(Record):
    """Counts of samples and slots at a token boundary."""

    version: PolicyVersion
    running: int
    queued: int
    free_slots: int
    tokens_generated: int  # since the engine started
    prompt_tokens_computed: int
    prompt_tokens_reused: int  # read from a shared prefix cache
    work: EngineWork = EngineWork()


class Engine(Protocol):
    """Generates tokens. Calls are never concurrent."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue samples in the order given."""

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        """Decode for about `deadline_s` seconds (at least one step); returns at most one delta per sample.

        Returns at once if nothing is queued or running.
        """

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        """Stop generating samples; returns their last deltas, with finish "aborted"."""

    def load(self, version: PolicyVersion) -> None:
        """Swap to the weights of `version` at a token boundary, and clear the KV cache."""

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """Logprobs (float32 [N - 1], temperature 1) of the tokens after the first of a fixed sequence (int32 [N])."""

    def status(self) -> EngineStatus: ...


class WeightSource(Protocol):
    """Double-buffered weights of an engine that does not share the trainer's parameters."""

    async def prepare(self, version: PolicyVersion) -> Pulled:
        """Pull and verify a version while the engine continues with its current one.

        Raises:
            WeightsError: it is incomplete or damaged; the current version stays in use.
        """

    def swap(self, pulled: Pulled) -> None:
        """Use the pulled weights in the engine's model. Called on the engine's `Compute`, at a token boundary."""

    def close(self) -> None:
        """Release all buffers; neither the engine nor this object is used afterwards."""


class Worker(Protocol):
    """The process or task around an engine: accepts requests and sends a report per tick.

    Every call raises `WorkerLost` if the worker is gone.
    """

    async def submit(self, requests: Sequence[GenerateRequest]) -> None: ...

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        """Stop generating samples; the next report has their last tokens and the finish "aborted"."""

    async def load(self, version: PolicyVersion) -> Loaded:
        """Pull a published version, verify it, and swap to it at a token boundary."""

    async def run_probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """`Engine.probe` with the weights in use, between two tokens."""

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        """The next report, or None after `timeout_s` seconds.

        Idle workers report, too: every report is a heartbeat.
        """

    async def close(self) -> None:
        """Stop after the current tick."""

    def kill(self) -> None:
        """Stop immediately, as an eviction does: unreported tokens are lost. Does nothing if it is already gone."""


class WorkerHost(Protocol):
    """Starts workers on leased machines."""

    async def start(self, lease: Lease) -> Worker:
        """Raises WorkerLost: the machine is gone, or the worker did not start on it."""

    async def close(self) -> None:
        """Stop all workers that are still running."""


class Provider(Protocol):
    """Source of leases."""

    def request_workers(self, workers: int) -> None:
        """Set the number of preemptible workers wanted. Never waits; the provider grants as many as are available."""

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        """The next event, or None after `timeout_s` seconds."""

    async def release(self, lease_id: str) -> None:
        """End a lease that is not used any more."""

    def avoid(self, machine: str, seconds: float) -> None:
        """Do not lease this machine (`Lease.machine`) again for `seconds`. Never waits."""

    async def close(self) -> None: ...


class Publisher(Protocol):
    """Makes the trainer's current weights available to workers."""

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        """Return when the version can be pulled. Older versions that are being read stay available."""

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Accumulates gradients group by group, and updates the weights once per batch."""

    @property
    def version(self) -> PolicyVersion: ...

    async def accumulate(self, group: Group) -> None:
        """Add a group to the current batch; a microbatch runs as soon as its token budget is full."""

    async def commit(self, step: int) -> StepMetrics:
        """Finish the batch: run remaining microbatches and optimizer steps; `version` rises by one."""

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        """Logprobs of each completion's tokens (float32 [N]) under the current version, at the sampling temperature."""


class Checkpoints(Protocol):
    """Trainer states on disk, by step."""

    async def save(self, step: int, *, score: float | None, pinned: int | None = None) -> None:
        """Write the trainer's state atomically.

        Args:
            score: held-out mean reward, if known; ranks checkpoints.
            pinned: also keep the newest checkpoint up to this step.
        """

    async def steps(self) -> Sequence[int]:
        """Steps of the complete checkpoints, ascending."""

    async def restore_latest(self) -> int:
        """Restore the newest complete state into the trainer; returns its step, 0 without one."""


class PromptSource(Protocol):
    """The prompts of a run, by step: a checkpoint needs no data state but the step."""

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`, in canonical order: a pure function of the seed and the step."""

    def held_out(self, limit: int | None = None) -> Sequence[Prompt]:
        """The first `limit` evaluation prompts, or all: always the same, and disjoint from the training prompts."""


class Scorer(Protocol):
    """Scores a finished sample. An error of the reward function gives an invalid reward; only `ScorerLost` is raised,
    when no sample can be scored any more."""

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward: ...

    async def close(self) -> None: ...


class TurnFormat(Protocol):
    """Converts between an agent's turns and token ids. Text of users and environments never becomes special tokens."""

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[int]]:
        """Text and token ids up to the start of the first turn; `tools` are JSON schemas of functions to call."""

    def parse(self, text: str) -> ParsedTurn:
        """The calls in a generated text. An unreadable call is returned with its error."""

    def answer(
        self, episode: Episode, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], bool]:
        """Token ids after the episode's last turn: messages of the roles "user" and "tool", and the start of the next
        turn; and whether they are instead the whole context of the next turn (a new branch)."""

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as text: `<|im_end|>` gives several ordinary tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token, special ones included; a token may have only a part of a character's bytes."""


class CallLog(Protocol):
    """Journals the calls of one turn."""

    async def started(self, index: int) -> None:
        """Return when it is durable that a call which must not be repeated is about to start."""

    async def ended(self, index: int, call: Call) -> None:
        """Return when a call's result is durable."""


class Environments(Protocol):
    """The environments of agents. They keep the state of an episode between two turns, and restore it if they have
    lost it: reset, then repeat all earlier turns."""

    async def act(self, episode: Episode, calls: CallLog) -> Observation:
        """Answer the episode's last turn.

        A call in `episode.finished` has this result and is not made again; one that `started` only gives a fault.

        Raises:
            GuardStop: too many episodes were lost to faults of the environment.
        """

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        """Discard the state of episodes that ended, restarted or were dropped. Never waits."""

    def take_counts(self) -> dict[str, int]:
        """Calls, mistakes of agents, timeouts, failures, faults and retries since the last call, by name."""

    async def close(self) -> None:
        """End all calls and processes."""


class FrozenScorer(Protocol):
    """A frozen model that scores samples: a reward model, or the reference."""

    def receive(self, new_tokens: Sequence[NewTokens]) -> None:
        """Receive tokens of unfinished samples, which may be computed ahead. Never waits; no result depends on it."""

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        """Score a finished sample (int32 [P + T]).

        Raises:
            ScorerLost: the model's process is gone and could not be restarted.
        """

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        """Discard tokens of restarted and dropped samples. Never waits."""

    def take_counts(self) -> tuple[int, int]:
        """Tokens of training samples computed before and after the samples finished, since the last call."""

    async def close(self) -> None: ...


class Guard(Protocol):
    """Watches whether a rising reward still means rising quality. Its decisions follow from the evidence in order."""

    def add(self, evidence: Evidence) -> None:
        """Add the evidence of the next step."""

    @property
    def decision(self) -> GuardDecision | None:
        """What follows from the evidence; `number`, `action` and `target` are not set. Evidence that is added
        afterwards does not change it."""

    @property
    def earliest_onset(self) -> int:
        """The first step that a later decision may blame; a checkpoint before it must be kept."""

    def begin(self, step: int, samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float]) -> None:
        """A batch was trained on: start to score some of its samples with gold. Never waits."""

    def measure(self, canaries: Sequence[tuple[Prompt, Trajectory]]) -> None:
        """Start to score canaries, generated by the newest weights, as evidence of the next step that begins."""

    async def evidence(self, *, at_once: bool = False) -> Evidence:
        """Of the step begun last. Samples without gold `guard.gold_timeout_s` after it began are counted as missing.
        Called again if it was cancelled.

        Args:
            at_once: do not wait.
        """

    def forget(self) -> None:
        """Start again without evidence: the run continues after a decision."""

    async def close(self) -> None: ...


class MachineGuard(Protocol):
    """Judges the health of workers and their machines. No method waits; times are on the run's clock."""

    def joined(self, lease: Lease, now_s: float) -> None: ...

    def join_failed(self, lease: Lease, cause: str, now_s: float) -> None: ...

    def loaded(self, lease: Lease, loaded: Loaded, now_s: float) -> None: ...

    def reported(self, lease: Lease, report: WorkerReport, now_s: float) -> None: ...

    def probed(self, lease: Lease, difference: float, limit: float, now_s: float) -> None:
        """Logprobs of the probe differ from the publisher's by this many nats on average."""

    def trained(self, metrics: StepMetrics, now_s: float) -> None:
        """A batch was trained on."""

    def ended(self, lease: Lease, now_s: float) -> None:
        """The lease of a worker that had joined ended."""

    def wants_probe(self, lease: Lease, now_s: float, *, idle_s: float) -> bool:
        """Whether a worker should compute the probe now; counted as asked."""

    def take_changes(self) -> list[MachineHealth]:
        """New judgements since the last call."""


class Codec(Protocol):
    """Converts between text and token ids."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Apply the model's chat template with the generation prompt, and the schemas of `tools` as in `TurnFormat`;
        returns the text and its token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without special tokens."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


class CompletionCodec(Codec, Protocol):
    """A codec that also encodes completions of data files. (Sampled completions are kept as token ids.)"""

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, independent of the prompt."""

    def end_token_id(self, *, chat: bool) -> int:
        """The token that ends a completion of a plain prompt, or a turn of the chat template."""


@runtime_checkable
class ReplyCodec(CompletionCodec, Protocol):
    """A codec in which the assistant's content of a chat can have other tokens than the same completion of a plain
    prompt."""

    def encode_reply(self, text: str) -> list[int]:
        """Token ids of the assistant's content: special tokens are text, except for a stop token at its end."""


class Journal(Protocol):
    """Durable, ordered storage of the ledger. An entry is durable when `append` returns."""

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        """Append (step, blob) pairs. A kill may lose any number of the last ones."""

    async def load(self) -> list[tuple[int, bytes]]:
        """All durable (step, blob) pairs in append order, without a torn last entry."""

    async def prune(self, through_step: int) -> None:
        """Delete the entries of steps up to and including `through_step`."""

    async def close(self) -> None: ...


class Telemetry(Protocol):
    """Receives a run's events, metrics and samples. Never raises for a failing optional sink."""

    def resume(self, step: int) -> None:
        """Training starts or resumes after `step`: lines of later steps are removed and logged again."""

    def event(self, name: str, **fields: Any) -> None:
        """One line in events.jsonl."""

    def step(self, metrics: StepMetrics) -> None:
        """One line in metrics.jsonl, the live view and the optional sinks."""

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """Completed samples, trajectory i answering prompt i."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Progress of the current phase: "rollout", "training", "evaluation" or "checkpoint"."""

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        """The current workers, for the live view; not logged."""
