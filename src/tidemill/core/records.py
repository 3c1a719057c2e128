"""Frozen records that cross every boundary, the packed buffers in them, and reading records from JSON files."""

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

ITEM_BYTES = 4
assert sys.byteorder == "little", "packed buffers are little-endian; this machine is not"


def pack_tokens(token_ids: Iterable[int]) -> TokenBuffer:
    return array("i", token_ids).tobytes()


def unpack_tokens(buffer: TokenBuffer) -> list[int]:
    return array("i", buffer).tolist()


def view_tokens(buffer: TokenBuffer | bytearray) -> Sequence[int]:
    """As `unpack_tokens`, but nothing is copied; a buffer cannot grow while somebody holds a view of it."""
    return memoryview(buffer).cast("i")


def pack_logprobs(logprobs: Iterable[float]) -> LogprobBuffer:
    return array("f", logprobs).tobytes()


def unpack_logprobs(buffer: LogprobBuffer) -> list[float]:
    return array("f", buffer).tolist()


def count(buffer: bytes) -> int:
    """Items in a packed buffer."""
    return len(buffer) // ITEM_BYTES


Finish: TypeAlias = Literal["stop", "length", "aborted", "error"]
"""Why a sample ended: a stop token or string; the token limit or the context; called back; the engine failed."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, slotted, keyword-only record that msgspec can serialise.

    Those of which a batch has tens of thousands say `gc=False`: they hold nothing that could refer back to them.
    """


class Message(Record):
    """One chat message."""

    role: str
    content: str


class Prompt(Record):
    """A model input and what its answer is judged by."""

    prompt_id: str  # names the prompt for ever: equal content, equal id
    token_ids: TokenBuffer  # int32 [P]
    text: str  # as the model sees it, after any chat template
    answer: str
    metadata: dict[str, Any] = {}
    messages: tuple[Message, ...] = ()  # what a chat template was given; none where `text` is the prompt itself


class Demonstration(Record, gc=False):
    """A prompt and the completion that a model should learn to give: what supervised fine-tuning learns from."""

    id: str  # names the pair of texts for ever: equal content, equal id
    prompt_ids: TokenBuffer  # int32 [P], as `Prompt.token_ids`
    completion_ids: TokenBuffer  # int32 [C], C >= 1, with the token that ends it


class PreferencePair(Record, gc=False):
    """Two completions of one prompt, of which `chosen` was found the better."""

    id: str  # names prompt and both completions for ever: equal content, equal id
    prompt_ids: TokenBuffer  # int32 [P], as `Prompt.token_ids`
    chosen_ids: TokenBuffer  # int32 [C], C >= 1, with the token that ends it
    rejected_ids: TokenBuffer  # int32 [R], R >= 1, another sequence than `chosen_ids`
    margin: float = 0.0  # by how much chosen should beat rejected, in units of the reward (Llama 2's m(r))


class SampleId(Record, gc=False):
    """Names a sample and its random numbers for ever."""

    run_seed: int
    purpose: str  # "train", "eval:<name>", a stage's name
    prompt_id: str
    epoch: int
    index: int  # within the group

    @property
    def key(self) -> int:
        """A 64-bit number that seeds this sample's random stream: a hash of every field."""
        fields = (self.run_seed, self.purpose, self.prompt_id, self.epoch, self.index)
        return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little")

    @property
    def group(self) -> tuple[str, str, int]:
        """What the samples of one group share."""
        return (self.purpose, self.prompt_id, self.epoch)


class PolicyVersion(Record, gc=False):
    """One published set of weights: `number` rises by one per published batch, `digest` is of the weights' bytes."""

    number: int
    digest: str


class Completion(Record, gc=False):
    """A prompt and tokens that follow it: a whole completion, or as much of one as there is."""

    prompt_ids: TokenBuffer  # int32 [P]
    token_ids: TokenBuffer  # int32 [N], N >= 1


class SamplingParams(Record, gc=False):
    """How the next token is drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class GenerateRequest(Record, gc=False):
    """One sample to generate, or to go on generating from `prefix_ids`."""

    sample_id: SampleId
    lease_id: str
    attempt: int
    prompt_ids: TokenBuffer  # int32 [P]
    sampling: SamplingParams
    prefix_ids: TokenBuffer = b""  # int32 [start], tokens generated in earlier attempts
    exact_version: int | None = None  # refuse to run under any other version
    min_version: int = 0


class TokenDelta(Record, gc=False):
    """New tokens of one sample. Applied only if lease and attempt are current and `start` is the ledger's length."""

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
    """What an engine has computed since it started, and how long that took it."""

    passes: int = 0  # forward passes
    rows: int = 0  # running samples that these took one token further; those being admitted not counted
    context_tokens: int = 0  # that these samples attended to
    drawn: int = 0  # tokens
    prefilled: int = 0  # tokens of samples being admitted
    busy_s: float = 0.0  # in these passes and in drawing from them
    cpu_s: float = 0.0  # of that, on a processor


class WorkerStatus(Record):
    """What a worker is doing."""

    worker_id: str
    version: int
    running: int
    queued: int
    free_slots: int
    tokens_per_s: float  # over the tick just reported
    prompt_tokens_computed: int = 0  # since the engine started
    prompt_tokens_reused: int = 0  # served from a shared prefix instead of being computed
    tokens_generated: int = 0  # since the engine started
    work: EngineWork = EngineWork()


class WorkerReport(Record):
    """One worker's message of one tick: the deltas of all its samples, and its state."""

    lease_id: str
    deltas: tuple[TokenDelta, ...]
    status: WorkerStatus
    notice_s: float | None = None  # the worker was told that its machine goes in so many seconds


LeaseKind: TypeAlias = Literal["reserved", "preemptible"]


class Lease(Record):
    """The right to one worker on one machine for a time. A machine that comes back comes with a new lease."""

    lease_id: str  # never used twice in a run
    worker_id: str  # what people call it: "local", "spot-3"
    kind: LeaseKind
    price_usd_per_hour: float
    start_s: float  # on the run's clock
    node: str = ""  # where the worker must be started; empty for anywhere


class LeaseGranted(Record):
    """A machine is there; a worker may be started on it."""

    lease: Lease


class LeaseNoticed(Record):
    """The machine will be taken at `deadline_s` on the run's clock."""

    lease_id: str
    deadline_s: float
    cause: str = ""


class LeaseEnded(Record):
    """The machine is gone, and everything on it."""

    lease_id: str
    cause: str  # in words


class FleetRow(Record):
    """One worker as people watch it."""

    lease_id: str
    worker_id: str
    kind: LeaseKind
    state: str  # starting, loading, serving or leaving
    version: int | None  # None until its first weights are there
    running: int
    queued: int
    tokens_per_s: float
    price_usd_per_hour: float
    age_s: float


LeaseEvent: TypeAlias = LeaseGranted | LeaseNoticed | LeaseEnded


class TensorEntry(Record):
    """Where one tensor lies in a snapshot."""

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int
    checksum: int  # xxh3_64 of its bytes


class DeltaEntry(Record):
    """A lossless difference from another version, stored beside the snapshot."""

    base: PolicyVersion
    base_digest: str  # of the snapshot it applies to
    nbytes: int
    checksum: int  # xxh3_64 of its bytes


class WeightManifest(Record):
    """One published version: what its snapshot holds, and how a puller knows that it got it whole."""

    version: PolicyVersion
    digest: str  # of the snapshot's bytes: in bf16 another one than the version's, which is of the trained weights
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    delta: DeltaEntry | None = None
    base_digest: str = ""  # of the snapshot that this one is an adapter of, where that was published, too
    probe_ids: TokenBuffer = b""  # int32 [N], a fixed sequence
    probe_logprobs: LogprobBuffer = b""  # float32 [N - 1], of its tokens after the first, by the publisher's own model


class Pulled(Record):
    """A version fetched and verified, not yet in use."""

    manifest: WeightManifest
    nbytes: int
    full: bool  # a whole snapshot rather than deltas
    pull_s: float
    retries: int


class Loaded(Record):
    """What it took a worker to change weights, in seconds, and what it now says of the probe."""

    version: PolicyVersion
    nbytes: int = 0  # pulled
    full: bool = True  # a whole snapshot rather than deltas
    pull_s: float = 0.0  # fetched and verified, while generation went on
    swap_s: float = 0.0  # generation stood still
    retries: int = 0  # transfers found torn or corrupt and pulled again
    probe_logprobs: LogprobBuffer = b""  # float32 [N - 1]; empty where the weights are the trainer's own
    rollout_logprobs: bool = True  # its engine returns those of the tokens it samples


class VersionRun(Record, gc=False):
    """Completion tokens [start, end) were made by `version`."""

    version: PolicyVersion
    start: int
    end: int


class Segment(Record):
    """Tokens [start, end) of a trajectory's buffer; only `trained` ones carry loss and rollout logprobs."""

    role: Literal["prompt", "action", "observation"]
    start: int
    end: int
    trained: bool


class Reward(Record, omit_defaults=True):
    """A sample's score. An invalid one has weight 0 and is left out of its group's statistics; `reason` says why."""

    value: float
    components: dict[str, float] = {}
    valid: bool = True
    reason: str = ""
    correct: bool | None = None  # whether the answer is right; None where the reward does not compare with an answer


RIGHT = 1.0 - 1e-6
"""A reward that gives 1 for a right answer is at least this for one, after rounding."""


class Trajectory(Record):
    """A finished sample: one token buffer, cut into segments."""

    sample_id: SampleId
    token_ids: TokenBuffer  # int32 [P + T]
    segments: tuple[Segment, ...]
    rollout_logprobs: (
        LogprobBuffer  # float32 [T], one per trained token, in buffer order; empty if the engine gave none
    )
    versions: tuple[VersionRun, ...]
    finish: Finish
    text: str = ""  # the completion, decoded
    reward: Reward | None = None
    weight: float = 1.0
    # float32 [T] each: of the trained tokens under versions published after they were made, oldest first. A token that
    # was not made yet has its rollout logprob there.
    publish_logprobs: tuple[LogprobBuffer, ...] = ()
    ref_logprobs: LogprobBuffer = b""  # float32 [T], of the trained tokens; empty where the reference has not read it

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
    def truncated(self) -> bool:
        """Cut by the token limit rather than ended by the model."""
        return self.finish == "length"


class Growth(Record, gc=False):
    """Tokens of a sample under way that are certain, for whoever can read them before it is finished."""

    sample_id: SampleId
    prompt_tokens: int
    start: int  # position of the first of them in prompt and completion; 0 also where the sample begins again
    token_ids: TokenBuffer  # int32 [N]


class Read(Record, gc=False):
    """What a frozen model makes of a finished sample, and what it took."""

    numbers: LogprobBuffer  # float32: a reward model's score [1], or the reference's logprobs [T] after the prompt
    tokens_ahead: int = 0  # computed for it before it was finished
    tokens_late: int = 0  # computed for it afterwards


class Group(Record):
    """All samples of one prompt, in index order; `position` is the group's canonical place among all of the run."""

    position: int
    prompt_id: str
    trajectories: tuple[Trajectory, ...]


class StepMetrics(Record):
    """What one published batch taught, reduced once: scalars by name (see docs/metrics.md)."""

    step: int
    version: PolicyVersion
    optimizer_steps: int  # taken by this batch
    values: dict[str, float]


T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """The JSON document as a `kind`.

    Raises:
        msgspec.DecodeError: not UTF-8, not JSON, nested too deeply, or not a `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_msgpack(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The same for MessagePack, with a decoder that knows the type."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
