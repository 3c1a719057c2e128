"""The supervised loop: training, evaluation, best checkpoint, early stopping, interruption and bit-exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tests.workbench import RecordedSteps, demonstrations, fit_context, pairs, stop_after, supervised_spec
from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop, UserError
from tidemill.models.loading import load_model
from tidemill.models.reward_model import load_reward_model
from tidemill.trainer.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from tidemill.trainer.supervised_loop import FitContext, FitResult, Objective, fit

CPU = torch.device("cpu")
Make = Callable[[RunSpec, FitContext], Objective[Any]]
KINDS: list[tuple[Make, Callable[..., list[Any]]]] = [
    (SupervisedObjective, demonstrations),
    (RewardObjective, pairs),
    (PreferenceObjective, pairs),
]


def run(
    objective: Make, data: Callable[..., list[Any]], folder: Path, spec: RunSpec | None = None, **options: Any
) -> tuple[FitResult, FitContext, RecordedSteps]:
    source = folder / "model"
    if not source.exists():
        save_folder(llama(), source)
    subject = fit_context(folder, model=load_model(source, device=CPU), source=source, **options)
    spec = spec or supervised_spec(supervised={"epochs": 0}, trainer={"steps": 8})
    result = fit(spec, objective(spec, subject), train=data(16), held_out=data(6, seed=1), context=subject)
    assert isinstance(subject.telemetry, RecordedSteps)
    return result, subject, subject.telemetry


@pytest.mark.parametrize(("objective", "data"), KINDS)
def test_held_out_loss_falls_and_the_output_loads(
    objective: Make, data: Callable[..., list[Any]], tmp_path: Path
) -> None:
    result, subject, steps = run(objective, data, tmp_path, supervised_spec(supervised={"epochs": 6}))
    losses = steps.curve("eval/loss")
    assert min(losses) < losses[0]  # then it rises, because there is little data
    assert result.held_out["loss"] == losses[-1]
    assert (result.steps, result.interrupted, result.already_finished) == (result.total_steps, False, False)
    assert steps.steps[0].step == 0
    assert [line.step for line in steps.steps] == list(range(result.steps + 1))
    assert result.model is not None
    load_model(result.model, device=CPU)
    if objective is RewardObjective:
        assert load_reward_model(result.model, device=CPU).head.hidden_size == 64
    best = subject.checkpoints.best()
    assert best is not None
    assert best.path == result.model


@pytest.mark.parametrize(("objective", "data"), KINDS)
def test_an_interrupted_run_ends_with_the_same_bits(
    objective: Make, data: Callable[..., list[Any]], tmp_path: Path
) -> None:
    whole, _, uninterrupted = run(objective, data, tmp_path / "uninterrupted")
    sessions: list[RecordedSteps] = []
    for calls in (1, 3, 2):  # stopped after step 1, 4, 6; with checkpoints of steps 2 and 4
        result, _, steps = run(objective, data, tmp_path / "cut", stop=stop_after(calls))
        assert result.interrupted
        sessions.append(steps)
    result, _, steps = run(objective, data, tmp_path / "cut")
    assert (result.steps, result.resumed_from) == (whole.steps, 6)
    lines = [line for session in (*sessions, steps) for line in session.steps]
    digests = [(line.step, line.version.digest) for line in lines]
    assert digests == [(line.step, line.version.digest) for line in uninterrupted.steps]
    assert result.held_out == whole.held_out
    repeated, _, _ = run(objective, data, tmp_path / "cut")
    assert repeated.already_finished
    assert repeated.model == result.model


def test_a_killed_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Later steps are repeated with the same bits."""

    class KilledError(Exception):
        pass

    class Dying(RecordedSteps):
        def step(self, metrics: Any) -> None:
            super().step(metrics)
            if metrics.step == 5:
                raise KilledError

    _, _, uninterrupted = run(SupervisedObjective, demonstrations, tmp_path / "uninterrupted")
    with pytest.raises(KilledError):
        run(SupervisedObjective, demonstrations, tmp_path / "killed", telemetry=Dying())
    result, _, steps = run(SupervisedObjective, demonstrations, tmp_path / "killed")
    assert result.resumed_from == 4
    assert [line.version for line in steps.steps] == [line.version for line in uninterrupted.steps[5:]]


def test_data_seed_decides_the_order_of_examples(tmp_path: Path) -> None:
    short = {"supervised": {"epochs": 0, "minibatch_tokens": 30, "microbatch_tokens": 30}, "trainer": {"steps": 2}}
    seeds = [({"seed": 0}, {}), ({"seed": 0}, {"seed": 3}), ({"seed": 3}, {})]
    digests = []
    for number, (of_run, of_data) in enumerate(seeds):
        spec = supervised_spec(run=of_run, data=of_data, **short)
        _, _, steps = run(SupervisedObjective, demonstrations, tmp_path / str(number), spec)
        digests.append(steps.steps[-1].version.digest)
    assert digests[1] == digests[2] != digests[0]


def test_one_step_equals_adamw_of_torch(tmp_path: Path) -> None:
    """Mean over the tokens of a minibatch, independent of microbatches; clipped; with the rate of the warm-up."""
    spec = supervised_spec(
        supervised={"minibatch_tokens": 10_000, "microbatch_tokens": 30, "epochs": 1},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 4, "max_grad_norm": 0.3, "weight_decay": 0.1},
    )
    _, subject, steps = run(SupervisedObjective, demonstrations, tmp_path, spec)
    assert len(steps.steps) == 2
    model = llama()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
                                  lr=1e-2 / 4)  # fmt: skip
    losses = []
    for each in demonstrations(16):
        ids = torch.frombuffer(bytearray(each.prompt_ids + each.completion_ids), dtype=torch.int32).long()
        labels = ids.clone()
        labels[: len(each.prompt_ids) // 4] = -100
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
    tokens = sum(len(each.completion_ids) // 4 for each in demonstrations(16))
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    values = steps.steps[1].values
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert values["learning_rate"] == 1e-2 / 4
    for (name, ours), plain in zip(subject.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=3e-5, msg=name)


def test_patience_stops_a_run_when_the_held_out_loss_stops_falling(tmp_path: Path) -> None:
    spec = supervised_spec(
        supervised={"epochs": 40, "patience": 2, "evaluate_every_steps": 1, "minibatch_tokens": 60},
        checkpoint={"every_steps": 0},
    )
    result, _, steps = run(SupervisedObjective, demonstrations, tmp_path, spec)
    losses = steps.curve("eval/loss")
    assert result.stopped_early
    assert result.steps < result.total_steps
    lowest = losses.index(min(losses))
    assert len(losses) == lowest + 3  # two more, neither lower
    assert result.model is not None
    assert result.model.name == f"step_{lowest}"  # the best step has a checkpoint, although none was due
    repeated, _, _ = run(SupervisedObjective, demonstrations, tmp_path, spec)
    assert repeated.already_finished
    assert repeated.model == result.model


@pytest.mark.parametrize("more", [{"epochs": 0}, {"epochs": 9}])
def test_a_longer_run_stays_at_the_minimum_of_its_first_schedule(more: dict[str, Any], tmp_path: Path) -> None:
    """The rates of four steps are 4, 3, 2 and 1 thousandths; the continued run has no others."""
    optimizer = {"learning_rate": 4e-3, "schedule": "linear", "min_learning_rate_ratio": 0.25}
    warnings: list[str] = []

    def rates(steps: int, supervised: dict[str, Any], **own: Any) -> list[float]:
        sections = {"supervised": {**supervised, "evaluate_every_steps": 0}, "trainer": {"steps": steps}}
        spec = supervised_spec(optimizer={**optimizer, **own}, **sections)
        _, _, found = run(SupervisedObjective, demonstrations, tmp_path, spec, warn=warnings.append)
        return found.curve("learning_rate")

    assert rates(4, {"epochs": 0}) == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    assert warnings == []
    assert set(rates(7, more)) == {1e-3}
    assert "has 4 optimizer steps" in warnings[0]
    assert "stay at the minimum, 0.001" in warnings[0]


def test_without_held_out_examples_nothing_is_evaluated(tmp_path: Path) -> None:
    subject = fit_context(tmp_path)
    spec = supervised_spec()
    result = fit(spec, SupervisedObjective(spec, subject), train=demonstrations(6), held_out=[], context=subject)
    assert isinstance(subject.telemetry, RecordedSteps)
    assert subject.telemetry.curve("eval/loss") == []
    assert result.held_out == {}
    assert result.model == subject.directory / "checkpoints" / f"step_{result.steps}"


def test_no_training_examples_are_refused(tmp_path: Path) -> None:
    spec, subject = supervised_spec(), fit_context(tmp_path)
    with pytest.raises(UserError, match="no training examples"):
        fit(spec, SupervisedObjective(spec, subject), train=[], held_out=demonstrations(2), context=subject)


def test_a_stop_before_the_first_step_returns_no_model(tmp_path: Path) -> None:
    result, _, _ = run(SupervisedObjective, demonstrations, tmp_path, stop=lambda: True)
    assert (result.interrupted, result.steps, result.model) == (True, 0, None)


@pytest.mark.parametrize(("objective", "data"), KINDS)
@pytest.mark.parametrize("steps", [1, 8])
def test_gradients_that_are_never_finite_stop_the_run(
    objective: Make, data: Callable[..., list[Any]], steps: int, tmp_path: Path
) -> None:
    model = llama()
    save_folder(model, tmp_path / "model")
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    subject = fit_context(tmp_path, model=model, source=tmp_path / "model")
    spec = supervised_spec(supervised={"epochs": 0}, trainer={"steps": steps}, checkpoint={"every_steps": 0})
    with pytest.raises(GuardStop, match="no gradient was finite"):
        fit(spec, objective(spec, subject), train=data(16), held_out=[], context=subject)
    assert isinstance(subject.telemetry, RecordedSteps)
    assert subject.telemetry.steps[-1].step == min(3, steps)
    assert subject.checkpoints.latest().checkpoint is None
