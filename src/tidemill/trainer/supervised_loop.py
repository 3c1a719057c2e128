"""The loop that supervised fine-tuning, reward models and preference optimisation share.

```
 minibatch(step) ──microbatches──▶ loss, backward ──▶ normalise, clip, optimizer step ──▶ metrics
       ▲                                                                                     │
       └──────────── the next step ◀── checkpoint (if due) ◀── held-out examples (if due) ◀──┘
```
A step's examples are a function of the data, the seed and the step, so that a checkpoint needs nothing but its number:
a run killed at any instant goes on from its newest checkpoint and ends with the bits of one that was not.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.guards import UpdateGuard
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import PolicyVersion, Record, StepMetrics
from tidemill.models.loading import weights_digest
from tidemill.models.reward_model import ScalarHead
from tidemill.models.token_tree import Tokens, common_prefix
from tidemill.telemetry.events import ALREADY_FINISHED, CHECKPOINT, EVALUATION, MonotonicClock, span
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.update import build_optimizer, clip_and_step, learning_rate, set_learning_rate


class Example(Protocol):
    """A demonstration or a preference pair."""

    @property
    def id(self) -> str: ...


E = TypeVar("E", bound=Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What some examples cost: sums over them, so that microbatches add up."""

    loss: Tensor  # [], with gradient where enabled
    weight: float  # what sums are divided by: trained tokens, or pairs
    figures: dict[str, Tensor] = field(default_factory=dict)  # [] each, further sums by metric name
    tokens_trained: int
    tokens_packed: int  # computed in the forward pass
    tokens_unpacked: int  # what they would have been without sharing


class Objective(Generic[E]):
    """A loss over examples. `trained` is the model, and the head where there is one."""

    trained: nn.Module
    head: ScalarHead | None = None

    def sequences(self, example: E) -> Sequence[Tokens]:
        """The token sequences that the example's forward pass computes."""
        raise NotImplementedError

    def outcome(self, examples: Sequence[E]) -> Outcome:
        """Their loss and figures, in one token tree."""
        raise NotImplementedError

    def prepare(self, examples: Sequence[E]) -> None:
        """Measure what must be known of the initial model, before anything is learned or restored."""

    def write(self, directory: Path) -> None:
        """What belongs into the model's folder beside the model."""

    def read(self, directory: Path) -> None:
        """Take over what `write` wrote."""


@dataclass(slots=True)
class Totals:
    """Outcomes added up."""

    loss: float = 0.0
    weight: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    tokens_trained: int = 0
    tokens_packed: int = 0
    tokens_unpacked: int = 0

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        self.weight += outcome.weight
        for name, value in outcome.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + float(value)
        self.tokens_trained += outcome.tokens_trained
        self.tokens_packed += outcome.tokens_packed
        self.tokens_unpacked += outcome.tokens_unpacked

    def means(self) -> dict[str, float]:
        """The loss and every figure, per unit of weight; empty of nothing."""
        if not self.weight:
            return {}
        return {"loss": self.loss / self.weight} | {name: each / self.weight for name, each in self.figures.items()}


ItemT = TypeVar("ItemT")
Sequences = Callable[[ItemT], Sequence[Tokens]]
"""The token sequences (int32 [T] each) that an example is made of."""


class TreeSize:
    """Nodes of the tree of sequences added one by one, without building it."""

    def __init__(self) -> None:
        self.nodes = 0
        self._keys: list[bytes] = []  # big-endian, so that bytes sort as token ids do
        self._sequences: list[Tokens] = []

    def growth(self, sequences: Sequence[Tokens]) -> int:
        """Nodes that these would add together."""
        twin = TreeSize()
        added = 0
        for sequence in sequences:
            shared = max(self._shared(sequence), twin._shared(sequence))
            twin.add([sequence])
            added += len(sequence) - shared
        return added

    def add(self, sequences: Sequence[Tokens]) -> None:
        for sequence in sequences:
            self.nodes += len(sequence) - self._shared(sequence)
            key = sequence.astype(">i4").tobytes()
            at = bisect.bisect_left(self._keys, key)
            self._keys.insert(at, key)
            self._sequences.insert(at, sequence)

    def _shared(self, sequence: Tokens) -> int:
        """The longest prefix that is there already: one of its neighbours in sorted order has it."""
        at = bisect.bisect_left(self._keys, sequence.astype(">i4").tobytes())
        return max((common_prefix(sequence, each) for each in self._sequences[max(at - 1, 0) : at + 1]), default=0)


def split_by_tokens(examples: Sequence[ItemT], sequences: Sequences[ItemT], budget: int) -> list[list[ItemT]]:
    """Consecutive runs of examples, each of at most `budget` packed tokens (or a single example)."""
    runs: list[list[ItemT]] = []
    size = TreeSize()
    for example in examples:
        parts = sequences(example)
        if not runs or size.nodes + size.growth(parts) > budget:
            runs.append([])
            size = TreeSize()
        runs[-1].append(example)
        size.add(parts)
    return runs


class Minibatches(Generic[ItemT]):
    """The minibatch of every step. Each epoch has its own order and is cut anew.

    Args:
        name: what an example is called for ever; with the seed and the epoch it decides the order.
        budget: packed tokens of a minibatch.
        epochs: passes over the examples; 0 for as many as `steps` need.
        steps: the number of minibatches, where epochs do not say it.
    """

    def __init__(
        self,
        examples: Sequence[ItemT],
        sequences: Sequences[ItemT],
        *,
        name: Callable[[ItemT], str],
        seed: int,
        budget: int,
        epochs: int,
        steps: int,
    ) -> None:
        self._examples, self._sequences, self._name = examples, sequences, name
        self._seed, self._budget = seed, budget
        self._ends: list[int] = []  # the last step of each epoch seen
        self._epoch, self._runs = -1, list[list[ItemT]]()
        for epoch in range(epochs):
            self._look_at(epoch)
        self.total = self._ends[-1] if epochs else steps

    def at(self, step: int) -> tuple[int, list[ItemT]]:
        """(epoch from 0, examples) of a 1-based step."""
        while not self._ends or self._ends[-1] < step:
            self._look_at(len(self._ends))
        epoch = bisect.bisect_left(self._ends, step)
        self._look_at(epoch)
        first = self._ends[epoch - 1] if epoch else 0
        return epoch, self._runs[step - first - 1]

    def _look_at(self, epoch: int) -> None:
        if epoch != self._epoch:
            ordered = sorted(self._examples, key=lambda example: self._rank(epoch, example))
            self._epoch, self._runs = epoch, split_by_tokens(ordered, self._sequences, self._budget)
        if epoch == len(self._ends):
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._runs))

    def _rank(self, epoch: int, example: ItemT) -> tuple[bytes, str]:
        name = self._name(example)
        return hashlib.blake2b(f"{self._seed}:{epoch}:{name}".encode(), digest_size=16).digest(), name


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """What a supervised run works with."""

    model: PreTrainedModel  # trained in place, with packed attention
    source: Path  # the folder it came from; its tokenizer goes into checkpoints
    directory: Path  # of the run
    checkpoints: CheckpointStore
    telemetry: Telemetry
    autocast: torch.dtype | None = None  # of the forward and backward passes; None computes in the weights' own
    stop: Callable[[], bool] = lambda: False  # asked before each step: end early, with a checkpoint
    expect: Callable[[int], None] = lambda _: None  # told the number of steps as soon as it is known
    warn: Callable[[str], None] = lambda _: None  # told of a damaged checkpoint that was passed over
    clock: Clock = field(default_factory=MonotonicClock)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def autocasting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)


class FitResult(Record):
    """How a call of `fit` ended."""

    steps: int  # optimizer steps, over all sessions
    total_steps: int
    resumed_from: int  # the checkpoint this session began at; 0 for none
    interrupted: bool
    stopped_early: bool  # the held-out loss had stopped falling
    already_finished: bool  # there was nothing left to do
    model: Path | None  # the folder of the best checkpoint where that is kept, else of the last; None without any
    held_out: dict[str, float]  # the newest figures by name; empty without held-out examples


def fit(
    spec: RunSpec, objective: Objective[E], *, train: Sequence[E], held_out: Sequence[E], bench: FitContext
) -> FitResult:
    """Learn from `train` until the configured steps or epochs are done, going on from wherever the run stands.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
        GuardStop: no gradient is finite any more.
    """
    if not train:
        raise UserError("no training examples", where="data", hint="give more data, or hold out a smaller share of it")
    return _Fit(spec, objective, train, held_out, bench).run()


class _Fit(Generic[E]):
    """The state of one run."""

    def __init__(
        self, spec: RunSpec, objective: Objective[E], train: Sequence[E], held_out: Sequence[E], bench: FitContext
    ) -> None:
        self.spec, self.objective, self.bench = spec, objective, bench
        self.settings = spec.supervised
        self.plan = Minibatches(
            train,
            objective.sequences,
            name=lambda example: example.id,
            seed=spec.run.seed if spec.data.seed is None else spec.data.seed,
            budget=self.settings.minibatch_tokens,
            epochs=self.settings.epochs,
            steps=spec.trainer.steps,
        )
        self.held_out = split_by_tokens(held_out, objective.sequences, self.settings.microbatch_tokens)
        self.optimizer = build_optimizer(objective.trained, spec.optimizer)
        self.step = self.saved = 0
        self.evaluated: dict[str, float] = {}  # newest held-out figures
        self.evaluated_at = -1
        self.lowest = math.inf
        self.worse = 0  # evaluations in a row without a new lowest loss
        self.guard = UpdateGuard(self.plan.total)
        objective.prepare([*train, *held_out])

    def run(self) -> FitResult:
        self.bench.expect(self.plan.total)
        resumed_from = self._restore()
        self.bench.telemetry.resume(self.step)
        already_finished = self._finished
        if already_finished:
            self.bench.telemetry.event(ALREADY_FINISHED, steps=self.step)
        elif self.step == 0:
            self._evaluate()
            self._tell({}, optimizer_steps=0)
        interrupted = False
        while not self._finished and not (interrupted := self.bench.stop()):
            self._next_step()
        if self.saved < self.step:
            self._checkpoint()
        return FitResult(
            steps=self.step,
            total_steps=self.plan.total,
            resumed_from=resumed_from,
            interrupted=interrupted,
            stopped_early=self._stopped_early,
            already_finished=already_finished,
            model=self._model(),
            held_out=self.evaluated,
        )

    @property
    def _stopped_early(self) -> bool:
        return 0 < self.settings.patience <= self.worse

    @property
    def _finished(self) -> bool:
        return self.step >= self.plan.total or self._stopped_early

    def _next_step(self) -> None:
        began = time.perf_counter()
        epoch, examples = self.plan.at(self.step + 1)
        with span(self.bench.telemetry, self.bench.clock, "training", step=self.step + 1):
            values, taken = self._learn(examples)
        self.step += 1
        values |= {"epoch": float(epoch + 1), "time_train_s": time.perf_counter() - began}
        every = self.settings.evaluate_every_steps
        improved = False
        if self.held_out and (self.step == self.plan.total or (every and self.step % every == 0)):
            improved = self._evaluate()
        self.guard.check(self._tell(values, optimizer_steps=taken))
        often = self.spec.checkpoint.every_steps
        if (often and self.step % often == 0) or (improved and self.settings.patience):
            self._checkpoint()

    def _learn(self, examples: Sequence[E]) -> tuple[dict[str, float], int]:
        """One optimizer step; returns its metrics, and 1 when it was taken."""
        totals, config = Totals(), self.spec.optimizer
        runs = split_by_tokens(examples, self.objective.sequences, self.settings.microbatch_tokens)
        for done, run in enumerate(runs):
            outcome = self.objective.outcome(run)
            outcome.loss.backward()
            totals.add(outcome)
            self.bench.telemetry.progress("training", done + 1, len(runs))
        rate = learning_rate(self.step + 1, self.plan.total, config)
        set_learning_rate(self.optimizer, rate)
        norm = clip_and_step(self.optimizer, scale=1.0 / totals.weight, max_grad_norm=config.max_grad_norm)
        taken = math.isfinite(norm)
        counts = {
            "examples": float(len(examples)),
            "tokens_trained": float(totals.tokens_trained),
            "tokens_packed": float(totals.tokens_packed),
            "tokens_unpacked": float(totals.tokens_unpacked),
            "optimizer_steps_skipped": float(not taken),
        }
        values = totals.means() | {"learning_rate": rate} | ({"grad_norm": norm} if taken else {})
        return values | counts, int(taken)

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Measure the held-out examples; returns whether their loss is a new lowest one."""
        if not self.held_out:
            return False
        totals = Totals()
        with span(self.bench.telemetry, self.bench.clock, EVALUATION, step=self.step) as fields:
            for done, run in enumerate(self.held_out):
                totals.add(self.objective.outcome(run))
                self.bench.telemetry.progress("evaluation", done + 1, len(self.held_out))
            self.evaluated, self.evaluated_at = totals.means(), self.step
            fields |= self.evaluated | {"n": sum(map(len, self.held_out))}
        improved = self.evaluated["loss"] < self.lowest
        self.lowest = min(self.lowest, self.evaluated["loss"])
        self.worse = 0 if improved else self.worse + 1
        return improved

    def _tell(self, values: dict[str, float], *, optimizer_steps: int) -> StepMetrics:
        if self.evaluated_at == self.step:
            values = values | {f"eval/{name}": value for name, value in self.evaluated.items()}
            values["eval/n"] = float(sum(map(len, self.held_out)))
        version = PolicyVersion(number=self.step, digest=weights_digest(self.objective.trained))
        metrics = StepMetrics(step=self.step, version=version, optimizer_steps=optimizer_steps, values=values)
        self.bench.telemetry.step(metrics)
        return metrics

    def _checkpoint(self) -> None:
        score = -self.evaluated["loss"] if self.evaluated_at == self.step else None
        with span(self.bench.telemetry, self.bench.clock, CHECKPOINT, step=self.step):
            needed = state_bytes(self.bench.model, self.optimizer, source=self.bench.source, head=self.objective.head)
            self.bench.checkpoints.write(self.step, self._write, score=score, expected_bytes=needed)
        self.saved = self.step

    def _write(self, directory: Path) -> None:
        counters = {
            "step": self.step,
            "evaluated": self.evaluated,
            "evaluated_at": self.evaluated_at,
            "lowest": self.lowest if math.isfinite(self.lowest) else None,
            "worse": self.worse,
            "digest": weights_digest(self.objective.trained),
        }
        save_state(
            directory,
            model=self.bench.model,
            optimizer=self.optimizer,
            source=self.bench.source,
            counters=counters,
            head=self.objective.head,
        )
        self.objective.write(directory)

    def _restore(self) -> int:
        """Go on from the newest whole checkpoint; returns its step, 0 when there is none."""
        store = self.bench.checkpoints
        for finding in store.recover():
            self.bench.warn(finding)
        latest = store.latest()
        for damaged in latest.passed_over:
            self.bench.warn(f"checkpoint {damaged.path.name} was passed over: {damaged.reason}")
        if latest.checkpoint is None:
            return 0
        path = latest.checkpoint.path
        counters = restore_state(path, model=self.bench.model, optimizer=self.optimizer, head=self.objective.head)
        self.objective.read(path)
        if weights_digest(self.objective.trained) != counters["digest"]:
            raise UserError(
                "the weights are not those of the state written beside them",
                where=str(path),
                hint="delete this checkpoint; the run goes on from the one before",
            )
        self.step = self.saved = int(counters["step"])
        self.evaluated, self.evaluated_at = dict(counters["evaluated"]), int(counters["evaluated_at"])
        self.lowest = math.inf if counters["lowest"] is None else float(counters["lowest"])
        self.worse = int(counters["worse"])
        return self.step

    def _model(self) -> Path | None:
        store = self.bench.checkpoints
        best = store.best() if self.spec.checkpoint.keep_best else None
        last = store.latest().checkpoint
        chosen = best or last
        return chosen.path if chosen else None
