"""The training loop of supervised fine-tuning, reward models and preference optimisation.

```
 minibatch(step) ──microbatches──▶ loss, backward ──▶ normalise, clip, optimizer step ──▶ metrics
       ▲                                                                                     │
       └──────────── next step ◀── checkpoint (if due) ◀── held-out evaluation (if due) ◀────┘
```
The examples of a step depend only on the data, the seed and the step number. A killed run resumes from its newest
checkpoint and produces the same bits as an uninterrupted one.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.guards import UpdateGuard
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import PolicyVersion, Record, StepMetrics
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.reward_model import ScalarHead
from tidemill.models.token_tree import Tokens
from tidemill.models.tree_forward import TreeForward
from tidemill.models.weights_digest import weights_digest
from tidemill.telemetry.events import ALREADY_FINISHED, CHECKPOINT, EVALUATION, MonotonicClock, span
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.checkpoint_store import CheckpointStore, recover_together, write_together
from tidemill.trainer.packing import ItemT, Sequences, split_by_tokens
from tidemill.trainer.update import build_optimizer, clip_and_step, learning_rate, set_learning_rate


class Example(Protocol):
    """A demonstration or a preference pair."""

    @property
    def id(self) -> str: ...


E = TypeVar("E", bound=Example)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Loss and metrics of some examples, as sums that are additive over microbatches."""

    loss: Tensor  # [], with gradient if enabled
    weight: float  # divisor of the sums: trained tokens, or pairs
    figures: dict[str, Tensor] = field(default_factory=dict)  # [] each, further sums by metric name
    tokens_trained: int
    tokens_packed: int  # computed in the forward pass
    tokens_unpacked: int  # tokens to compute without prefix sharing


class Objective(Generic[E]):
    """A loss over examples. `trained` contains the model, and the head if there is one."""

    trained: nn.Module
    head: ScalarHead | None = None

    def sequences(self, example: E) -> Sequence[Tokens]:
        """The token sequences of an example's forward pass."""
        raise NotImplementedError

    def losses(self, examples: Sequence[E]) -> LossSums:
        """Compute loss and metrics of examples, packed into one token tree."""
        raise NotImplementedError

    def prepare(self, examples: Sequence[E]) -> None:
        """Compute what depends on the initial model, before training or restoring."""

    def write(self, directory: Path) -> None:
        """Write files of the objective into the model folder."""

    def read(self, directory: Path) -> None:
        """Restore what `write` wrote."""


@dataclass(slots=True)
class Totals:
    """Sums over microbatches. Losses and figures are float64 [] on the device until `over`."""

    loss: float | Tensor = 0.0
    weight: float = 0.0
    figures: dict[str, float | Tensor] = field(default_factory=dict)
    tokens_trained: int = 0
    tokens_packed: int = 0
    tokens_unpacked: int = 0

    def add(self, sums: LossSums | Totals) -> None:
        def double(value: float | Tensor) -> float | Tensor:
            return value.detach().double() if isinstance(value, Tensor) else value

        self.loss = self.loss + double(sums.loss)
        self.weight += sums.weight
        for name, value in sums.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + double(value)
        self.tokens_trained += sums.tokens_trained
        self.tokens_packed += sums.tokens_packed
        self.tokens_unpacked += sums.tokens_unpacked

    def over(self, ranks: Ranks) -> Totals:
        """Sums over all ranks, added in their order, on the host."""
        sums = (self.loss, *self.figures.values())
        self.loss, *figures = torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in sums]).tolist()
        self.figures = dict(zip(self.figures, figures, strict=True))
        if ranks.size == 1:
            return self
        parts = [Totals(**msgspec.msgpack.decode(each)) for each in ranks.gather(msgspec.msgpack.encode(self))]
        total = Totals()
        for part in parts:
            total.add(part)
        return total

    def means(self) -> dict[str, float]:
        """The loss and every metric divided by the weight; empty if the weight is 0."""
        if not self.weight:
            return {}
        means = {"loss": self.loss / self.weight} | {name: each / self.weight for name, each in self.figures.items()}
        return {name: float(mean) for name, mean in means.items()}


class Minibatches(Generic[ItemT]):
    """The minibatch of every step. Each epoch shuffles the examples and splits them anew.

    Args:
        name: a permanent name of an example; with the seed and the epoch it determines the order.
        budget: packed tokens of a minibatch.
        epochs: passes over the examples; 0 to use `steps`.
        steps: number of minibatches if `epochs` is 0.
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
        self._last_steps: list[int] = []  # of each epoch split so far
        self._epoch, self._runs = -1, list[list[ItemT]]()
        for epoch in range(epochs):
            self._split(epoch)
        self.total = self._last_steps[-1] if epochs else steps

    def at(self, step: int) -> tuple[int, list[ItemT]]:
        """(0-based epoch, examples) of a 1-based step."""
        while not self._last_steps or self._last_steps[-1] < step:
            self._split(len(self._last_steps))
        epoch = bisect.bisect_left(self._last_steps, step)
        self._split(epoch)
        first = self._last_steps[epoch - 1] if epoch else 0
        return epoch, self._runs[step - first - 1]

    def _split(self, epoch: int) -> None:
        def rank(example: ItemT) -> tuple[bytes, str]:
            name = self._name(example)
            return hashlib.blake2b(f"{self._seed}:{epoch}:{name}".encode(), digest_size=16).digest(), name

        if epoch != self._epoch:
            ordered = sorted(self._examples, key=rank)
            self._epoch, self._runs = epoch, split_by_tokens(ordered, self._sequences, self._budget)
        if epoch == len(self._last_steps):
            self._last_steps.append((self._last_steps[-1] if self._last_steps else 0) + len(self._runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """Model, folders and callbacks of a supervised run."""

    forward: TreeForward  # its model is trained in place
    source: Path  # folder of the model; its tokenizer is copied into checkpoints
    directory: Path  # of the run
    checkpoints: CheckpointStore
    telemetry: Telemetry
    ranks: Ranks = ONE_RANK  # all of them run the same loop; the first one's telemetry counts
    stop: Callable[[], bool] = lambda: False  # called before each step; True ends the run with a checkpoint
    # Called before each step with its number so far and a function that writes its checkpoint if there is none; on one
    # rank only.
    between_steps: Callable[[int, Callable[[], None]], None] = lambda step, checkpoint: None
    set_total_steps: Callable[[int], None] = lambda _: None  # called with the number of steps once it is known
    warn: Callable[[str], None] = lambda _: None  # called with remarks: damaged checkpoints, a schedule that ends early
    clock: Clock = field(default_factory=MonotonicClock)

    @property
    def device(self) -> torch.device:
        return self.forward.device

    @property
    def model(self) -> PreTrainedModel:
        return self.forward.model


class FitResult(Record):
    """Result of `fit`."""

    steps: int  # optimizer steps over all sessions
    total_steps: int
    resumed_from: int  # step of the checkpoint; 0 for none
    interrupted: bool
    stopped_early: bool  # the held-out loss had stopped falling
    already_finished: bool  # no step was left
    model: Path | None  # folder of the best checkpoint if it is kept, else of the last; None if there is none
    held_out: dict[str, float]  # newest held-out metrics; empty without held-out examples


def fit(
    spec: RunSpec, objective: Objective[E], *, train: Sequence[E], held_out: Sequence[E], context: FitContext
) -> FitResult:
    """Train until the configured steps or epochs are done, resuming from the newest checkpoint.

    Raises:
        UserError: there are no training examples, or the disk is full; existing checkpoints are unchanged.
        GuardStop: no gradient is finite any more.
    """
    if not train:
        raise UserError("no training examples", where="data", hint="add data, or lower data.held_out_fraction")
    return _FitLoop(spec, objective, train, held_out, context).run()


class _FitLoop(Generic[E]):
    """The state of one run."""

    def __init__(
        self, spec: RunSpec, objective: Objective[E], train: Sequence[E], held_out: Sequence[E], context: FitContext
    ) -> None:
        self.spec, self.objective, self.context = spec, objective, context
        self.config = spec.supervised
        self.minibatches = Minibatches(
            train,
            objective.sequences,
            name=lambda example: example.id,
            seed=spec.run.seed if spec.data.seed is None else spec.data.seed,
            budget=self.config.minibatch_tokens,
            epochs=self.config.epochs,
            steps=spec.trainer.steps,
        )
        self.held_out = split_by_tokens(held_out, objective.sequences, self.config.microbatch_tokens)
        self.optimizer = build_optimizer(objective.trained, spec.optimizer)
        self.schedule_steps = spec.optimizer.schedule_steps or self.minibatches.total
        self.step = self.saved_step = 0
        self.digest = ""  # of the weights after `step`
        self.evaluated: dict[str, float] = {}  # newest held-out metrics
        self.evaluated_at = -1
        self.lowest_loss = math.inf
        self.evaluations_without_improvement = 0
        self.guard = UpdateGuard(self.minibatches.total)
        objective.prepare([*train, *held_out])

    def run(self) -> FitResult:
        context = self.context
        context.set_total_steps(self.minibatches.total)
        resumed_from = self._restore()
        context.telemetry.resume(self.step)
        schedule = self.spec.optimizer.model_copy(update={"schedule_steps": self.schedule_steps})
        if remark := schedule.schedule_remark(self.minibatches.total):
            context.warn(remark)
        already_finished = self._finished
        if already_finished:
            context.telemetry.event(ALREADY_FINISHED, steps=self.step)
        elif self.step == 0:
            self._evaluate()
            self._log_step({}, optimizer_steps=0)
        interrupted = False
        while not self._finished:
            context.between_steps(self.step, self._checkpoint_if_newer)
            if interrupted := any(context.ranks.gather(b"stop" if context.stop() else b"")):
                break
            self._run_step()
        self._checkpoint_if_newer()
        best = context.checkpoints.best() if self.spec.checkpoint.keep_best else None
        last = context.checkpoints.latest().checkpoint
        model = best or last
        return FitResult(
            steps=self.step,
            total_steps=self.minibatches.total,
            resumed_from=resumed_from,
            interrupted=interrupted,
            stopped_early=self._stopped_early,
            already_finished=already_finished,
            model=model.path if model else None,
            held_out=self.evaluated,
        )

    @property
    def _stopped_early(self) -> bool:
        return 0 < self.config.patience <= self.evaluations_without_improvement

    @property
    def _finished(self) -> bool:
        return self.step >= self.minibatches.total or self._stopped_early

    def _run_step(self) -> None:
        started = time.perf_counter()
        epoch, examples = self.minibatches.at(self.step + 1)
        with span(self.context.telemetry, self.context.clock, "training", step=self.step + 1):
            values, optimizer_steps = self._optimize(examples)
        self.step += 1
        values |= {"epoch": float(epoch + 1), "time_train_s": time.perf_counter() - started}
        evaluate_every, checkpoint_every = self.config.evaluate_every_steps, self.spec.checkpoint.every_steps
        evaluation_due = self.step == self.minibatches.total or (evaluate_every and self.step % evaluate_every == 0)
        improved = self._evaluate() if evaluation_due else False
        self.guard.check(self._log_step(values, optimizer_steps=optimizer_steps))
        if (checkpoint_every and self.step % checkpoint_every == 0) or (improved and self.config.patience):
            self._checkpoint()

    def _optimize(self, examples: Sequence[E]) -> tuple[dict[str, float], int]:
        """Take one optimizer step; returns its metrics, and 0 if the gradient was not finite, else 1."""
        config, ranks = self.spec.optimizer, self.context.ranks
        runs = split_by_tokens(examples, self.objective.sequences, self.config.microbatch_tokens)
        totals = self._totals("training", runs, backward=True)
        rate = learning_rate(self.step + 1, self.schedule_steps, config)
        set_learning_rate(self.optimizer, rate)
        scale = 1.0 / totals.weight
        norm = clip_and_step(self.optimizer, scale=scale, max_grad_norm=config.max_grad_norm, ranks=ranks)
        finite = math.isfinite(norm)
        counts = {
            "examples": float(len(examples)),
            "tokens_trained": float(totals.tokens_trained),
            "tokens_packed": float(totals.tokens_packed),
            "tokens_unpacked": float(totals.tokens_unpacked),
            "optimizer_steps_skipped": float(not finite),
        }
        values = totals.means() | {"learning_rate": rate} | ({"grad_norm": norm} if finite else {})
        return values | counts, int(finite)

    def _totals(self, phase: str, runs: Sequence[Sequence[E]], *, backward: bool) -> Totals:
        """Sums over all runs, of which each rank computes every N-th; a rank without one computes the last again."""
        totals, ranks = Totals(), self.context.ranks
        for first in range(0, len(runs), ranks.size):
            counted = first + ranks.index < len(runs)
            sums = self.objective.losses(runs[first + ranks.index] if counted else runs[-1])
            if backward:
                (sums.loss if counted else 0.0 * sums.loss).backward()
            if counted:
                totals.add(sums)
            self.context.telemetry.progress(phase, min(first + ranks.size, len(runs)), len(runs))
        return totals.over(ranks)

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Evaluate the held-out examples; returns whether their loss is a new minimum."""
        if not self.held_out:
            return False
        with span(self.context.telemetry, self.context.clock, EVALUATION, step=self.step) as fields:
            totals = self._totals("evaluation", self.held_out, backward=False)
            self.evaluated, self.evaluated_at = totals.means(), self.step
            fields |= self.evaluated | {"n": sum(map(len, self.held_out))}
        improved = self.evaluated["loss"] < self.lowest_loss
        self.lowest_loss = min(self.lowest_loss, self.evaluated["loss"])
        self.evaluations_without_improvement = 0 if improved else self.evaluations_without_improvement + 1
        return improved

    def _log_step(self, values: dict[str, float], *, optimizer_steps: int) -> StepMetrics:
        if self.evaluated_at == self.step:
            values = values | {f"eval/{name}": value for name, value in self.evaluated.items()}
            values["eval/n"] = float(sum(map(len, self.held_out)))
        self.digest = weights_digest(self.objective.trained, self.context.ranks)
        version = PolicyVersion(number=self.step, digest=self.digest)
        metrics = StepMetrics(step=self.step, version=version, optimizer_steps=optimizer_steps, values=values)
        self.context.telemetry.step(metrics)
        return metrics

    def _checkpoint_if_newer(self) -> None:
        if self.saved_step < self.step:
            self._checkpoint()

    def _checkpoint(self) -> None:
        context, head = self.context, self.objective.head
        score = -self.evaluated["loss"] if self.evaluated_at == self.step else None
        with span(context.telemetry, context.clock, CHECKPOINT, step=self.step):
            needed = state_bytes(context.model, self.optimizer, source=context.source, head=head)
            write_together(
                context.checkpoints, self.step, self._write, ranks=context.ranks, score=score, expected_bytes=needed
            )
        self.saved_step = self.step

    def _write(self, directory: Path) -> None:
        counters = {
            "step": self.step,
            "schedule_steps": self.schedule_steps,
            "evaluated": self.evaluated,
            "evaluated_at": self.evaluated_at,
            "lowest": self.lowest_loss if math.isfinite(self.lowest_loss) else None,
            "worse": self.evaluations_without_improvement,
            "digest": self.digest,
        }
        save_state(
            directory,
            model=self.context.model,
            optimizer=self.optimizer,
            source=self.context.source,
            counters=counters,
            head=self.objective.head,
            ranks=self.context.ranks,
        )
        if self.context.ranks.index == 0:
            self.objective.write(directory)

    def _restore(self) -> int:
        """Restore the newest intact checkpoint; returns its step, 0 if there is none."""
        store, ranks = self.context.checkpoints, self.context.ranks
        for finding in recover_together(store, ranks=ranks):
            self.context.warn(finding)
        latest = store.latest()
        for name, reason in latest.skipped.items():
            self.context.warn(f"skipped checkpoint {name}: {reason}")
        if latest.checkpoint is None:
            return 0
        path = latest.checkpoint.path
        model, head = self.context.model, self.objective.head
        counters = restore_state(path, model=model, optimizer=self.optimizer, head=head, ranks=ranks)
        self.objective.read(path)
        self.digest = weights_digest(self.objective.trained, ranks)
        if self.digest != counters["digest"]:
            raise UserError(
                "the weights do not match the trainer state of the checkpoint",
                where=str(path),
                hint="delete this checkpoint; the run resumes from the previous one",
            )
        self.step = self.saved_step = int(counters["step"])
        stored = int(counters.get("schedule_steps", 0))  # absent in checkpoints of older versions
        self.schedule_steps = self.spec.optimizer.schedule_steps or stored or self.minibatches.total
        self.evaluated, self.evaluated_at = dict(counters["evaluated"]), int(counters["evaluated_at"])
        self.lowest_loss = math.inf if counters["lowest"] is None else float(counters["lowest"])
        self.evaluations_without_improvement = int(counters["worse"])
        return self.step
