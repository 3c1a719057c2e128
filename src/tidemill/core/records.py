"""Frozen records that cross boundaries, packed buffers of tokens and logprobs, and decoding of JSON records.

Buffers are little-endian bytes, which serialise without conversion. numpy and torch read them with `frombuffer`, this
module with the standard library's `array`.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, dataclass_transform

import msgspec

TokenBuffer: TypeAlias = bytes
"""Token ids, little-endian int32 [T]."""

LogprobBuffer: TypeAlias = bytes
"""Natural-log probabilities, little-endian float32 [T]."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [start, end) of positions."""

ITEM_BYTES = 4
assert sys.byteorder == "little", "packed buffers are little-endian; this machine is not"


def pack_tokens(token_ids: Iterable[int]) -> TokenBuffer:
    return array("i", token_ids).tobytes()


def unpack_tokens(buffer: TokenBuffer) -> list[int]:
    return array("i", buffer).tolist()


def view_tokens(buffer: TokenBuffer | bytearray | memoryview) -> Sequence[int]:
    """As `unpack_tokens` without a copy; a bytearray cannot grow while a view of it exists."""
    return memoryview(buffer).cast("i")


def pack_logprobs(logprobs: Iterable[float]) -> LogprobBuffer:
    return array("f", logprobs).tobytes()


def unpack_logprobs(buffer: LogprobBuffer) -> list[float]:
    return array("f", buffer).tolist()


def count(buffer: bytes) -> int:
    """Items in a packed buffer."""
    return len(buffer) // ITEM_BYTES


Finish: TypeAlias = Literal["stop", "length", "aborted", "error"]
"""Why an engine ended a sample: a stop token or string; the token limit or context length; aborted; an engine error."""
EpisodeLimit: TypeAlias = Literal["turns", "calls", "seconds"]
"""Limits that end an agent's episode between two turns, and cut no text."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted, keyword-only record that msgspec can serialise.

    Records that exist by the thousand use `gc=False`; they cannot be part of a reference cycle.
    """


class Message(Record):
    """One chat message."""

    role: str
    content: str


class Prompt(Record):
    """A model input and the reference for scoring its completions."""

    prompt_id: str  # a hash of the content
    token_ids: TokenBuffer  # int32 [P]
    text: str  # after any chat template
    answer: str | None  # None: the row has none
    metadata: dict[str, Any] = {}
    messages: tuple[Message, ...] = ()  # before the chat template; empty without one


class Demonstration(Record, gc=False):
    """A prompt and its target completion, for supervised fine-tuning."""

    id: str  # a hash of the content
    prompt_ids: TokenBuffer  # int32 [P], as `Prompt.token_ids`
    completion_ids: TokenBuffer  # int32 [C], C >= 1, including the end token; of several turns, all after the prompt
    trained: Ranges = ()  # of the completion; empty: all of it
    branches: tuple[int, ...] = ()  # starts of new contexts in the completion, which replace all tokens before
    chat: bool = False  # whether the prompt is in a chat template


class PreferencePair(Record, gc=False):
    """Two completions of one prompt, `chosen` being preferred."""

    id: str  # a hash of the content
    prompt_ids: TokenBuffer  # int32 [P], as `Prompt.token_ids`
    chosen_ids: TokenBuffer  # int32 [C], C >= 1, including the end token
    rejected_ids: TokenBuffer  # int32 [R], R >= 1, different from `chosen_ids`
    margin: float = 0.0  # target difference of their rewards (Llama 2's m(r))
    chosen_trained: Ranges = ()  # as `Demonstration.trained`
    chosen_branches: tuple[int, ...] = ()  # as `Demonstration.branches`
    rejected_trained: Ranges = ()
    rejected_branches: tuple[int, ...] = ()
    chat: bool = False  # as `Demonstration.chat`


class SampleId(Record, gc=False):
    """Identifies a sample and its random stream."""

    run_seed: int
    purpose: str  # "train", "eval:<name>", a stage's name
    prompt_id: str
    epoch: int
    index: int  # within the group

    @property
    def key(self) -> int:
        """A 64-bit hash of all fields."""
        fields = (self.run_seed, self.purpose, self.prompt_id, self.epoch, self.index)
        return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little")

    def seed(self, branch: int = 0) -> int:
        """63-bit seed of the sampling noise: a hash of all fields and of the branch."""
        fields = (self.run_seed, self.purpose, self.prompt_id, self.epoch, self.index, branch)
        return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little") >> 1

    @property
    def group(self) -> tuple[str, str, int]:
        """The fields that the samples of a group share."""
        return (self.purpose, self.prompt_id, self.epoch)


class PolicyVersion(Record, gc=False):
    """A published set of weights: `number` rises by one per batch, `digest` is a hash of the weights' bytes."""

    number: int
    digest: str


class Completion(Record, gc=False):
    """A prompt and a whole or partial completion."""

    prompt_ids: TokenBuffer  # int32 [P]
    token_ids: TokenBuffer  # int32 [N], N >= 1


class SamplingParams(Record, gc=False):
    """Sampling settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class GenerateRequest(Record, gc=False):
    """A request to generate a sample, or one turn of it, continuing from `prefix_ids`.

    Positions in the completion are those of the whole sample. `prompt_ids` and `prefix_ids` are the context of one
    branch; the first token of the prefix has the position `offset`.
    """

    sample_id: SampleId
    lease_id: str
    attempt: int
    prompt_ids: TokenBuffer  # int32 [P]
    sampling: SamplingParams
    prefix_ids: TokenBuffer = b""  # int32 [N], generated in earlier attempts and turns, and observations
    exact_version: int | None = None  # the only version that may generate it; None: any from `min_version` on
    min_version: int = 0
    branch: int = 0  # part of the noise's seed
    offset: int = 0
    observations: tuple[tuple[int, int], ...] = ()  # ranges [start, end) of the prefix that were not generated
    limit: int = 0  # tokens after the prompt, prefix included, at which it ends; 0: `sampling.max_new_tokens`
    resumes: bool = False  # another turn may follow, so that the engine should keep its keys and values

    @property
    def turn_start(self) -> int:
        """Index in prefix and completion of the turn's first token: stop strings are searched from there."""
        return self.observations[-1][1] if self.observations else 0


class TokenDelta(Record, gc=False):
    """New tokens of one sample. Applied only if lease and attempt are current and `start` is the sample's length."""

    sample_id: SampleId
    lease_id: str
    attempt: int
    start: int  # completion position of the first new token
    token_ids: TokenBuffer  # int32 [N]
    logprobs: LogprobBuffer  # float32 [N], of the distribution sampled from
    version: PolicyVersion
    finish: Finish | None = None
    error: str = ""


class EngineWork(Record):
    """Totals of an engine's computation since its start."""

    passes: int = 0  # forward passes
    rows: int = 0  # tokens computed for running samples, without prefill; samples with equal tokens share them
    context_tokens: int = 0  # attended to by these rows
    drawn: int = 0  # tokens sampled
    prefilled: int = 0  # prompt and prefix tokens computed
    busy_s: float = 0.0  # time in forward passes and sampling
    cpu_s: float = 0.0  # CPU time in them


class WeightsSum(Record):
    """Sum of the 64-bit words of one part of the weights in a worker's memory, modulo 2^64."""

    version: int
    part: int
    total: int


class GpuStatus(Record):
    """Health of a worker's GPU."""

    temperature_c: float = 0.0
    clock_mhz: float = 0.0  # of the multiprocessors
    power_w: float = 0.0
    hot: bool = False  # its hardware lowers the clock because of temperature or power supply
    uncorrected_errors: int = 0  # of its memory, since the driver was loaded
    error: str = ""  # why it does not answer; a driver that hangs is asked once


class WorkerStatus(Record):
    """Status of a worker."""

    worker_id: str
    version: int
    running: int
    queued: int
    free_slots: int
    tokens_per_s: float = 0.0  # in the report interval
    prompt_tokens_computed: int = 0  # since the engine started
    prompt_tokens_reused: int = 0  # read from a shared prefix cache
    tokens_generated: int = 0  # since the engine started
    work: EngineWork = EngineWork()
    engine: str = ""  # name of its engine
    weights: WeightsSum | None = None  # of one part, in turn; not in every report
    gpu: GpuStatus | None = None  # new since the last report

    @property
    def source(self) -> str:
        """Names the worker in `Trajectory.sources`: "vllm/spot-3"."""
        return f"{self.engine}/{self.worker_id}"


class WorkerReport(Record):
    """One worker's report: new tokens of its samples, and its status."""

    lease_id: str
    deltas: tuple[TokenDelta, ...]
    status: WorkerStatus
    notice_s: float | None = None  # seconds until the machine goes, if the worker received a notice


LeaseKind: TypeAlias = Literal["reserved", "preemptible"]


class Lease(Record):
    """The right to run one worker on a machine for a time. A machine that comes back has a new lease."""

    lease_id: str  # unique in a run
    worker_id: str  # displayed name: "local", "spot-3"
    kind: LeaseKind
    price_usd_per_hour: float
    start_s: float  # on the run's clock
    node: str = ""  # node to start the worker on; empty for any
    ends_s: float | None = None  # on the run's clock, if the provider knows it in advance, as by a job's time limit

    @property
    def machine(self) -> str:
        """Names the machine in all leases of it: the node, or the place of a simulated machine."""
        return self.node or self.worker_id


class LeaseGranted(Record):
    """A machine is available; a worker may be started on it."""

    lease: Lease


class LeaseNoticed(Record):
    """The machine will be taken at `deadline_s` on the run's clock."""

    lease_id: str
    deadline_s: float
    cause: str = ""


class LeaseEnded(Record):
    """The machine is gone."""

    lease_id: str
    cause: str


class FleetRow(Record):
    """One worker in the live view."""

    lease_id: str
    worker_id: str
    kind: LeaseKind
    state: str  # starting, loading, serving or leaving
    version: int | None  # None before its first weights
    running: int
    queued: int
    tokens_per_s: float
    price_usd_per_hour: float
    age_s: float


LeaseEvent: TypeAlias = LeaseGranted | LeaseNoticed | LeaseEnded


class TensorEntry(Record):
    """Location of a tensor in a snapshot."""

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int
    checksum: int  # xxh3_64 of its bytes


class DeltaEntry(Record):
    """A lossless difference from another version's snapshot."""

    base: PolicyVersion
    base_digest: str  # of the snapshot it applies to
    nbytes: int
    checksum: int  # xxh3_64 of its bytes
    parts: tuple[int, ...] = ()  # bytes of its consecutive parts, which are applied independently of each other


class WeightManifest(Record):
    """A published version: the contents of its snapshot, with checksums."""

    version: PolicyVersion
    digest: str  # of the snapshot's bytes; differs from the version's if the snapshot is in bf16
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    delta: DeltaEntry | None = None
    base_digest: str = ""  # of the base model's snapshot, if this is an adapter and the base was published
    probe_ids: TokenBuffer = b""  # int32 [N], a fixed sequence that checks a worker's model
    probe_logprobs: LogprobBuffer = b""  # float32 [N - 1], of its tokens after the first, by the publisher's model
    probe_slack: float = 0.0  # nats by which they may differ more, because the publisher computes in another precision
    part_sums: tuple[int, ...] = ()  # see `WeightsSum`; of this snapshot


class Pulled(Record):
    """A version that was pulled and verified."""

    manifest: WeightManifest
    nbytes: int
    full: bool  # a snapshot, not deltas
    pull_s: float
    retries: int


class Loaded(Record):
    """Result of loading a version: times in seconds, and logprobs of the probe."""

    version: PolicyVersion
    nbytes: int = 0  # pulled
    full: bool = True  # a snapshot, not deltas
    pull_s: float = 0.0  # pulling and verifying, while generation continued
    swap_s: float = 0.0  # generation was interrupted
    retries: int = 0  # transfers repeated because they were damaged
    probe_logprobs: LogprobBuffer = b""  # float32 [N - 1]; empty if the engine uses the trainer's parameters
    rollout_logprobs: bool = True  # the engine returns logprobs of sampled tokens
    part_sums: tuple[int, ...] = ()  # of the weights as they were published; empty if the worker reports no sums
    last_sums: tuple[int, ...] = ()  # of the version before in memory, when it was replaced; empty if it took too long


class VersionRun(Record, gc=False):
    """Completion tokens [start, end) were generated by `version`."""

    version: PolicyVersion
    start: int
    end: int


class SourceRun(Record, gc=False):
    """Completion tokens [start, end) came from `source`: engine and worker, "vllm/spot-3"."""

    source: str
    start: int
    end: int
    lease: str = ""


class Segment(Record):
    """Tokens [start, end) of a trajectory; only `trained` segments have a loss and rollout logprobs.

    A `context` starts a new branch: it is the whole input of the next action, and replaces all tokens before it.
    """

    role: Literal["prompt", "action", "observation", "context"]
    start: int
    end: int
    trained: bool


class Call(Record, omit_defaults=True):
    """One call of a tool."""

    call_id: str  # the same when it is repeated: run, episode, its restarts, turn and index
    name: str
    arguments: str  # JSON
    result: str = ""
    error: bool = False  # `result` is an error that the agent caused
    late: bool = False  # its deadline fired


class ToolRequest(Record):
    """A call that a generated text asks for."""

    name: str
    arguments: str  # a JSON object
    error: str = ""  # why it cannot be executed: not JSON, no name
    source: str = ""  # the part of the text that was read, with its marks


class ParsedTurn(Record):
    """A generated text: what it says besides calls, and the calls in order."""

    text: str
    calls: tuple[ToolRequest, ...] = ()


class Turn(Record, omit_defaults=True):
    """One turn of a trajectory: what the policy generated, and what the environment answered."""

    start: int  # completion position of its first generated token
    end: int  # after its last generated token
    text: str  # decoded
    finish: Literal["stop", "length"] = "stop"
    observation: str = ""  # the answer's text; empty until the environment has answered
    final: str | None = None  # the agent's final answer, which ended the episode
    observation_end: int = 0  # completion position after the answer's tokens; 0 without one
    reward: float = 0.0
    state_key: str = ""  # of the state that the policy saw; equal states have equal keys
    calls: tuple[Call, ...] = ()
    timeouts: int = 0  # deadlines that ended one of its calls


EpisodeEnd: TypeAlias = Literal["", "done", "tokens", "context", "turns", "calls", "seconds", "failure", "fault"]
"""Why an episode ended: not yet; the environment ended it; a budget is used up; the agent broke the environment, and
gets its failure reward; an infrastructure fault, after which the episode is left out of its group."""


class Observation(Record, omit_defaults=True):
    """An environment's answer to a turn."""

    text: str = ""
    token_ids: TokenBuffer = b""  # int32, appended after the turn; empty if the episode has ended
    new_branch: bool = False  # `token_ids` are the whole context of the next turn instead
    reward: float = 0.0  # of the turn
    end: EpisodeEnd = ""
    reason: str = ""  # of a failure or fault
    final: str | None = None  # see `Turn.final`
    outcome: float | None = None  # reward of the whole trajectory, instead of the sum of its turns' rewards
    state_key: str = ""  # of the state that it shows
    calls: tuple[Call, ...] = ()
    timeouts: int = 0
    unchosen: tuple[int, ...] = ()  # turns that were not continued, by index: they are not trained
    turn_rewards: dict[int, float] = {}  # of turns by index, instead of those of their answers


class Episode(Record):
    """What an environment needs to answer the last turn of a sample."""

    sample_id: SampleId
    prompt: Prompt
    turns: tuple[Turn, ...]  # the last of them has no observation yet
    token_ids: TokenBuffer  # int32, context of the last turn, and the turn
    finished: dict[int, Call] = {}  # calls of the last turn with a result in the journal, by index
    started: tuple[int, ...] = ()  # calls of the last turn that started, and must not be repeated
    restarts: int = 0  # times that the episode was started again, under newer weights; part of the ids of its calls
    completion_ids: TokenBuffer = b""  # int32 [T], of all branches
    completion_logprobs: LogprobBuffer = b""  # float32 [T]; 0 for tokens that were not generated
    branch_starts: tuple[int, ...] = ()  # completion positions at which branches start, but for the first


class Reward(Record, omit_defaults=True):
    """A sample's reward. An invalid one has weight 0 and is excluded from its group's statistics."""

    value: float
    components: dict[str, float] = {}
    valid: bool = True
    reason: str = ""  # why it is invalid
    correct: bool | None = None  # whether the answer is correct; None if the kind of the reward does not tell


class SampleUpdate(Record, gc=False):
    """What an update computed for one of its samples, which has T trained tokens."""

    sample_id: SampleId
    advantage: float  # as trained; of different advantages per token, their mean
    token_advantages: LogprobBuffer = b""  # float32 [T]; empty if all tokens have the same
    signal: bool = True  # False: its group has no reward signal
    trainer_logprobs: LogprobBuffer = b""  # float32 [T], of the first forward pass; empty without details
    entropies: LogprobBuffer = b""  # float32 [T], likewise, in nats


class Trajectory(Record, omit_defaults=True):
    """A finished sample: one token buffer with segments."""

    sample_id: SampleId
    token_ids: TokenBuffer  # int32 [P + T]
    segments: tuple[Segment, ...]
    rollout_logprobs: (
        LogprobBuffer  # float32 [T], one per trained token, in buffer order; empty if the engine gave none
    )
    versions: tuple[VersionRun, ...]
    finish: Finish | EpisodeLimit
    text: str = ""  # the completion, decoded
    turns: tuple[Turn, ...] = ()  # of an agent; otherwise empty
    episode_end: EpisodeEnd = ""
    outcome: float | None = None  # see `Observation.outcome`
    fault: str = ""  # why it has no reward and is left out of its group
    reward: Reward | None = None
    weight: float = 1.0
    # float32 [T] each, oldest version first: logprobs of the trained tokens under versions published while the sample
    # was generated. Tokens generated after that publish have their rollout logprob.
    publish_logprobs: tuple[LogprobBuffer, ...] = ()
    ref_logprobs: LogprobBuffer = b""  # float32 [T], of the trained tokens; empty if the trainer computes them
    sources: tuple[SourceRun, ...] = ()
    update: SampleUpdate | None = None  # in samples files; None if it was not trained on

    @property
    def prompt_length(self) -> int:
        return self.segments[0].end

    @property
    def completion_length(self) -> int:
        return count(self.token_ids) - self.prompt_length

    @property
    def prompt_ids(self) -> TokenBuffer:
        return self.token_ids[: self.prompt_length * ITEM_BYTES]

    @property
    def completion_ids(self) -> TokenBuffer:
        return self.token_ids[self.prompt_length * ITEM_BYTES :]

    @property
    def trained_length(self) -> int:
        """Number of trained tokens."""
        return sum(segment.end - segment.start for segment in self.segments if segment.trained)

    @property
    def final(self) -> str:
        """The final answer of an agent with tools, else the text of the last turn; of a single completion, its text."""
        if not self.turns:
            return self.text
        last = self.turns[-1]
        return last.text if last.final is None else last.final

    @property
    def truncated(self) -> bool:
        """Whether the token limit or the context length cut it."""
        return self.finish == "length"


class NewTokens(Record, gc=False):
    """New tokens of an unfinished sample, for models that read ahead."""

    sample_id: SampleId
    prompt_tokens: int
    start: int  # position of the first of them in prompt and completion; 0 for a new or restarted sample
    token_ids: TokenBuffer  # int32 [N]


class ModelScores(Record, gc=False):
    """Output of a frozen model for a finished sample, and its cost."""

    values: LogprobBuffer  # float32: a reward model's score [1], or the reference's logprobs [T] after the prompt
    tokens_ahead: int = 0  # computed before the sample finished
    tokens_late: int = 0  # computed afterwards


class Group(Record):
    """All samples of one prompt, in index order; `position` is the group's canonical index in the run."""

    position: int
    prompt_id: str
    trajectories: tuple[Trajectory, ...]


class StepMetrics(Record):
    """Metrics of one step: scalars by name (see docs/reference/metrics.md)."""

    step: int
    version: PolicyVersion
    optimizer_steps: int  # of this batch
    values: dict[str, float]
    mismatch: dict[str, tuple[float, float]] = {}  # Σ of mismatch KL and tokens, by the lease that generated them
    ranks: dict[str, dict[str, float]] = {}  # figures of each rank of a sharded trainer: "rank 0", ...
    updates: tuple[SampleUpdate, ...] = ()  # of the samples that were trained on


T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a JSON document as a `kind`.

    Raises:
        msgspec.DecodeError: not UTF-8, not JSON, or not a `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
