"""Small deterministic stand-ins for everything the training loop talks to, and a disk that outlives them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tidemill.config.schema import RunSpec
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import InFlight, Plan, plan_groups
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.memory_journal import MemoryJournal, PowerCut
from tidemill.controller.reading import Reading
from tidemill.controller.waiting import Patience
from tidemill.core.buffers import LogprobBuffer, TokenBuffer, count, pack_logprobs, pack_tokens, unpack_tokens
from tidemill.core.clock import LoopClock
from tidemill.core.protocols import EngineCapabilities, EngineStatus
from tidemill.core.records import (
    Completion,
    Finish,
    FleetRow,
    GenerateRequest,
    Group,
    Growth,
    Message,
    PolicyVersion,
    Prompt,
    Read,
    Reward,
    SampleId,
    SamplingParams,
    StepMetrics,
    TokenDelta,
    Trajectory,
    WorkerReport,
    WorkerStatus,
)
from tidemill.rollout.worker import EngineWorker

T = TypeVar("T")

VOCABULARY = 50
MAX_NEW = 12
V3 = PolicyVersion(number=3, digest="a")
V3_AGAIN = PolicyVersion(number=3, digest="b")  # made again after a restart, a little different


def digest_of(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def number(*parts: object) -> int:
    return int(digest_of(*parts), 16)


def make_prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, token_ids=pack_tokens(list(name.encode())), text=name, answer="7")


def make_id(name: str = "p0", index: int = 0) -> SampleId:
    return SampleId(run_seed=0, purpose="train", prompt_id=name, epoch=0, index=index)


def make_delta(**changes: Any) -> TokenDelta:
    tokens = changes.pop("tokens", [1, 2])
    fields: dict[str, Any] = {
        "sample_id": make_id(),
        "lease_id": "lease",
        "attempt": 1,
        "start": 0,
        "token_ids": pack_tokens(tokens),
        "logprobs": pack_logprobs([-1.0] * len(tokens)),
        "version": V3,
    }
    return TokenDelta(**{**fields, **changes})


SAMPLING = SamplingParams(max_new_tokens=8)
PROMPTS = [(0, make_prompt("p0")), (0, make_prompt("p1")), (1, make_prompt("p0"))]


def make_report(*deltas: TokenDelta) -> WorkerReport:
    status = WorkerStatus(worker_id="w", version=3, running=0, queued=0, free_slots=1, tokens_per_s=0.0)
    return WorkerReport(lease_id="lease", deltas=deltas, status=status)


GROUPS = plan_groups(PROMPTS, first_position=9, from_version=3)
"""Of step 4: three groups of two samples each."""
FIRST = 18
"""The ordinal of the first of their samples."""


def make_plan(group_size: int = 2, seed: int = 0, *, exact: bool = True) -> Plan:
    return Plan(purpose="train", run_seed=seed, group_size=group_size, sampling=SAMPLING, exact_version=exact)


def make_prompts() -> list[Prompt]:
    return [prompt for _, prompt in PROMPTS]


def make_in_flight(**changes: Any) -> InFlight:
    in_flight = InFlight(make_plan(**changes), version_number=3)
    in_flight.open(GROUPS, make_prompts())
    return in_flight


def prompt_of(position: int) -> tuple[int, Prompt]:
    """The (epoch, prompt) at a position, as the journal asks for it."""
    epoch, prompt = PROMPTS[position % 3]
    return epoch + 2 * (position // 3 - 3), prompt


def completion(sample_id: SampleId, version: PolicyVersion, limit: int = MAX_NEW) -> tuple[list[int], Finish]:
    """What the fake model says: a function of the sample and of the weights."""
    length = 1 + number("length", sample_id.key, version.digest) % (limit + limit // 3)
    tokens = [number(sample_id.key, version.digest, at) % VOCABULARY for at in range(min(length, limit))]
    return tokens, "stop" if length <= limit else "length"


def logprob(token: int) -> float:
    return -token / 16  # exact in float32


def said_of(completion: Completion, version: PolicyVersion) -> LogprobBuffer:
    """What the fake trainer says of a completion: each token by itself."""
    return pack_logprobs(
        logprob(number(version.digest, at, token) % VOCABULARY)
        for at, token in enumerate(unpack_tokens(completion.token_ids))
    )


class FakeCompute:
    """One call at a time in the order asked for; each takes `seconds` of the loop's time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self.seconds)
            return function()


class FakeEngine:
    """Decodes `completion`, `per_poll` tokens of each of its `slots` a poll."""

    def __init__(self, version: PolicyVersion, *, slots: int = 3, per_poll: int = 2, keeps_jobs: bool = False) -> None:
        self.version, self.slots, self.per_poll = version, slots, per_poll
        self.logprobs = True  # it returns those of the tokens it samples
        self.keeps_jobs = keeps_jobs  # samples under way go on under new weights
        self.jobs: dict[SampleId, tuple[GenerateRequest, int]] = {}  # request, tokens so far
        self.generated = 0
        self.submitted: list[SampleId] = []
        self.handed_back: dict[SampleId, int] = {}  # with the tokens they had
        self.on_poll: Callable[[], None] = lambda: None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            batch_invariant=True, logprobs=self.logprobs, keeps_kv=False, lora=False, own_sampler=False
        )

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            if request.exact_version is not None:
                assert request.exact_version == self.version.number, "asked for weights that are not loaded"
            assert request.min_version <= self.version.number, "asked for weights that are not loaded"
            assert request.sample_id not in self.jobs, "submitted twice"
            self.jobs[request.sample_id] = (request, count(request.prefix_ids))
            self.submitted.append(request.sample_id)

    def poll(self, deadline_s: float) -> list[TokenDelta]:
        self.on_poll()
        return [self._decode(sample_id) for sample_id in list(self.jobs)[: self.slots]]

    def _decode(self, sample_id: SampleId) -> TokenDelta:
        request, at = self.jobs[sample_id]
        tokens, ending = completion(sample_id, self.version, request.sampling.max_new_tokens)
        end = max(at, min(at + self.per_poll, len(tokens)))  # other weights may have wanted more
        self.jobs[sample_id] = (request, end)
        finish = ending if end >= len(tokens) else None
        if finish:
            del self.jobs[sample_id]
        self.generated += end - at
        return self.delta(request, at, tokens[at:end], finish)

    def delta(self, request: GenerateRequest, at: int, tokens: Sequence[int], finish: Finish | None) -> TokenDelta:
        return TokenDelta(
            sample_id=request.sample_id,
            lease_id=request.lease_id,
            attempt=request.attempt,
            start=at,
            token_ids=pack_tokens(tokens),
            logprobs=pack_logprobs(logprob(token) for token in tokens),
            version=self.version,
            finish=finish,
        )

    def abort(self, sample_ids: Sequence[SampleId]) -> list[TokenDelta]:
        known = [self.jobs.pop(sample_id) for sample_id in sample_ids if sample_id in self.jobs]
        self.handed_back |= {request.sample_id: at for request, at in known}
        return [self.delta(request, at, [], "aborted") for request, at in known]

    def load(self, version: PolicyVersion) -> None:
        assert self.keeps_jobs or not self.jobs, "weights changed under a running sample"
        self.version = version

    def probe(self, token_ids: TokenBuffer) -> LogprobBuffer:
        """A function of the weights, like what it generates."""
        tokens = unpack_tokens(token_ids)[1:]
        return pack_logprobs(logprob(number(self.version.digest, token) % VOCABULARY) for token in tokens)

    def status(self) -> EngineStatus:
        running = min(self.slots, len(self.jobs))
        return EngineStatus(
            version=self.version,
            running=running,
            queued=len(self.jobs) - running,
            free_slots=self.slots - running,
            tokens_generated=self.generated,
            prompt_tokens_computed=2 * len(self.submitted),
            prompt_tokens_reused=0,
        )


@dataclass
class Disk:
    """What survives a kill."""

    journal: bytes = b""
    checkpoints: dict[int, TrainerState] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """Its history is its weights: every batch learned from, group by group."""

    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(number=0, digest="init"))
    history: tuple[tuple[object, ...], ...] = ()


def seen(group: Group) -> tuple[object, ...]:
    """All of a group that a trainer learns from."""
    return (
        group.position,
        group.prompt_id,
        tuple(
            (
                t.sample_id,
                tuple(unpack_tokens(t.completion_ids)),
                t.rollout_logprobs,
                t.finish,
                t.text,
                t.reward and (t.reward.value, t.reward.valid),
                t.weight,
                t.versions,
                *t.publish_logprobs,
                *([t.ref_logprobs] if t.ref_logprobs else []),  # last, where a reference reads
            )
            for t in group.trajectories
        ),
    )


class FakeTrainer:
    def __init__(self, compute: FakeCompute, engine: Callable[[], FakeEngine] | None = None) -> None:
        self.state = TrainerState()
        self.open: list[tuple[object, ...]] = []
        self.positions: list[list[int]] = []  # in the order learned from, batch by batch
        self.salt = ""  # as if another machine rounded differently
        self._compute, self._engine = compute, engine

    @property
    def version(self) -> PolicyVersion:
        return self.state.version

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.open.append(seen(group)))

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._compute.run(lambda: [said_of(completion, self.version) for completion in completions])

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self._commit(step))

    def _commit(self, step: int) -> StepMetrics:
        assert self._engine is None or self._engine().keeps_jobs or not self._engine().jobs, (
            "the weights moved while samples were in flight"
        )
        assert step == self.state.version.number + 1
        batch, self.open = tuple(self.open), []
        self.positions.append([group[0] for group in batch])  # type: ignore[misc]
        digest = digest_of(self.state.version.digest, batch, self.salt)
        self.state = TrainerState(PolicyVersion(number=step, digest=digest), (*self.state.history, batch))
        return StepMetrics(step=step, version=self.version, optimizer_steps=1, values={"loss": 1.0})

    async def save(self, directory: Path) -> None:
        raise NotImplementedError

    async def restore(self, directory: Path) -> None:
        raise NotImplementedError


class FakeCheckpoints:
    """`power` is asked before and after every write; it may cut."""

    def __init__(self, disk: Disk, trainer: FakeTrainer, power: Callable[[], None] = lambda: None) -> None:
        self.disk, self.trainer, self.power = disk, trainer, power
        self.saved: list[tuple[int, float | None]] = []

    async def save(self, step: int, *, score: float | None) -> None:
        self.power()
        await asyncio.sleep(0.5)
        assert self.trainer.version.number == step
        self.disk.checkpoints[step] = self.trainer.state
        self.saved.append((step, score))
        self.power()

    async def restore_latest(self) -> int:
        step = max(self.disk.checkpoints, default=0)
        self.trainer.state = self.disk.checkpoints.get(step, TrainerState())
        return step


class FakeScorer:
    """Takes a moment; the reward depends on the tokens, and every 17th sample's is invalid."""

    def __init__(self) -> None:
        self.scored: list[SampleId] = []

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        key = number("score", trajectory.sample_id.key)
        await asyncio.sleep(key % 7 / 100)
        self.scored.append(trajectory.sample_id)
        if key % 17 == 0:
            return Reward(value=0.0, valid=False, reason="unlucky")
        return Reward(value=float(sum(unpack_tokens(trajectory.completion_ids)) % 2), components={"odd": 1.0})

    async def close(self) -> None:
        pass


class FakeReader:
    """Implements `Reader`; what it says of a token depends on all before it. `grow` checks that nothing is missing."""

    def __init__(self, *, chunk_tokens: int = 4) -> None:
        self.chunk_tokens = chunk_tokens
        self.known: dict[SampleId, bytes] = {}
        self.growths: list[Growth] = []
        self.was_read: list[SampleId] = []
        self.forgotten: list[SampleId] = []
        self.failure: Exception | None = None

    def reading(self) -> Reading:
        return Reading([self], reference=self, chunk_tokens=self.chunk_tokens)

    def grow(self, grown: Sequence[Growth]) -> None:
        for growth in grown:
            before = self.known.get(growth.sample_id, b"") if growth.start else b""
            assert count(before) == growth.start, "something in between was not told"
            self.known[growth.sample_id] = before + growth.token_ids
        self.growths += grown

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        await asyncio.sleep(0.05)
        if self.failure is not None:
            raise self.failure
        ahead = self.known.pop(sample_id, b"")
        assert token_ids.startswith(ahead), "it was told of other tokens"
        self.was_read.append(sample_id)
        tokens = unpack_tokens(token_ids)
        said = [logprob(number(tokens[: at + 1]) % VOCABULARY) for at in range(prompt_tokens, len(tokens))]
        return Read(numbers=pack_logprobs(said))

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self.forgotten += sample_ids
        for sample_id in sample_ids:
            self.known.pop(sample_id)

    def take_counts(self) -> tuple[int, int]:
        return 3, 5

    async def close(self) -> None: ...


class FakeCodec:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (0,)


class FakeSource:
    """An endless supply: the prompts of a step are named after it."""

    def __init__(self, prompts: int, held_out: int = 4) -> None:
        self.prompts, self._held_out = prompts, held_out

    def train_batch(self, step: int) -> Sequence[tuple[int, Prompt]]:
        return [(step // 3, make_prompt(f"q{(step * 7 + at) % 23}")) for at in range(self.prompts)]

    def held_out(self) -> Sequence[Prompt]:
        return [make_prompt(f"h{at}") for at in range(self._held_out)]


class FakeTelemetry:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[StepMetrics] = []
        self.sample_files: dict[tuple[int, str], list[SampleId]] = {}
        self.progressed: list[tuple[str, int, int]] = []
        self.fleet_rows: tuple[FleetRow, ...] = ()

    def resume(self, step: int) -> None:
        self.event("resume", step=step)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            assert trajectory.sample_id.prompt_id == prompt.prompt_id
        self.sample_files[step, trajectories[0].sample_id.purpose] = [t.sample_id for t in trajectories]

    def progress(self, phase: str, done: int, total: int) -> None:
        self.progressed.append((phase, done, total))

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        self.fleet_rows = tuple(rows)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == name]


def small_spec(**sections: Any) -> RunSpec:
    defaults: dict[str, Any] = {
        "batch": {"prompts": 3, "group_size": 2},
        "sampling": {"max_new_tokens": MAX_NEW},
        "trainer": {"steps": 4},
        "eval": {"every_steps": 2, "prompts": 4},
        "checkpoint": {"every_steps": 2},
    }
    return RunSpec.model_validate(
        {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in defaults}
        | {name: value for name, value in sections.items() if name not in defaults}
    )


@dataclass
class Session:
    """One process's life: everything but the disk is new."""

    disk: Disk = field(default_factory=Disk)
    spec: RunSpec = field(default_factory=small_spec)
    power_cut_after: int | None = None
    patience: Patience = field(default_factory=Patience)
    slots: int = 3
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reader: FakeReader | None = None  # of the reference
    result: LoopResult | None = None

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(self.disk.journal, power_cut_after=self.power_cut_after)
        self.compute = FakeCompute(0.1)
        self.trainer = FakeTrainer(self.compute, lambda: self.engine)
        ahead = self.spec.schedule.max_policy_lag > 0
        self.engine = FakeEngine(self.trainer.version, slots=self.slots, keeps_jobs=ahead)
        self.worker = EngineWorker(self.engine, self.compute, clock=LoopClock(), tick_s=0.1)
        self.scorer, self.eval_scorer = FakeScorer(), FakeScorer()
        self.telemetry = FakeTelemetry()
        self.checkpoints = FakeCheckpoints(self.disk, self.trainer)
        self.source = FakeSource(self.spec.batch.prompts)
        self.ledger = Ledger(self.journal, round_size=self.spec.batch.prompts)
        self.fleet = Fleet(
            self.worker,
            slots=self.slots,
            clock=LoopClock(),
            telemetry=self.telemetry,
            patience=self.patience,
            needs_logprobs=self.spec.algorithm.needs_rollout_logprobs,
        )

    async def run(self) -> LoopResult:
        """Train; whatever happens, the disk has what it had at the end."""
        try:
            async with self.fleet:
                return await train_loop(
                    spec=self.spec,
                    source=self.source,
                    fleet=self.fleet,
                    trainer=self.trainer,
                    scorer=self.scorer,
                    eval_scorer=self.eval_scorer,
                    ledger=self.ledger,
                    checkpoints=self.checkpoints,
                    telemetry=self.telemetry,
                    codec=FakeCodec(),
                    clock=LoopClock(),
                    stop=self.stop,
                    reading=self.reader.reading() if self.reader else None,
                    patience=self.patience,
                )
        finally:
            self.disk.journal = self.journal.disk
            await self.worker.close()

    async def run_until_power_cut(self) -> LoopResult | None:
        """None when the power went."""
        try:
            return await self.run()
        except PowerCut:
            return None
