"""The loop: it learns, evaluates, keeps the best, stops early or when asked, and resumes with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tests.workbench import RememberedSteps, bench, demonstrations, pairs, stop_after, supervised_spec
from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop, UserError
from tidemill.models.loading import load_model
from tidemill.models.reward_model import load_reward_model
from tidemill.trainer.objectives import train_dpo, train_reward_model, train_sft
from tidemill.trainer.supervised_loop import FitContext, FitResult

CPU = torch.device("cpu")
Train = Callable[..., FitResult]
KINDS: list[tuple[Train, Callable[..., list[Any]]]] = [
    (train_sft, demonstrations),
    (train_reward_model, pairs),
    (train_dpo, pairs),
]


def run(
    train: Train, data: Callable[..., list[Any]], folder: Path, spec: RunSpec | None = None, **options: Any
) -> tuple[FitResult, FitContext, RememberedSteps]:
    source = folder / "model"
    if not source.exists():
        save_folder(llama(), source)
    subject = bench(folder, model=load_model(source, device=CPU), source=source, **options)
    spec = spec or supervised_spec(supervised={"epochs": 0}, trainer={"steps": 8})
    result = train(spec, train=data(16), held_out=data(6, seed=1), bench=subject)
    assert isinstance(subject.telemetry, RememberedSteps)
    return result, subject, subject.telemetry


@pytest.mark.parametrize(("train", "data"), KINDS)
def test_held_out_loss_falls_and_the_output_loads(train: Train, data: Callable[..., list[Any]], tmp_path: Path) -> None:
    result, subject, told = run(train, data, tmp_path, supervised_spec(supervised={"epochs": 6}))
    losses = told.curve("eval/loss")
    assert min(losses) < losses[0]  # with so little data it rises again
    assert result.held_out["loss"] == losses[-1]
    assert (result.steps, result.interrupted, result.already_finished) == (result.total_steps, False, False)
    assert told.steps[0].step == 0
    assert [line.step for line in told.steps] == list(range(result.steps + 1))
    assert result.model is not None
    load_model(result.model, device=CPU)
    if train is train_reward_model:
        assert load_reward_model(result.model, device=CPU).head.hidden_size == 64
    best = subject.checkpoints.best()
    assert best is not None
    assert best.path == result.model


@pytest.mark.parametrize(("train", "data"), KINDS)
def test_a_run_cut_anywhere_ends_with_the_same_bits(
    train: Train, data: Callable[..., list[Any]], tmp_path: Path
) -> None:
    whole, _, calm = run(train, data, tmp_path / "calm")
    told: list[RememberedSteps] = []
    for calls in (1, 3, 2):  # stopped after step 1, 4, 6; checkpoints of steps 2 and 4 lie between
        result, _, steps = run(train, data, tmp_path / "cut", stop=stop_after(calls))
        assert result.interrupted
        told.append(steps)
    result, _, steps = run(train, data, tmp_path / "cut")
    assert (result.steps, result.resumed_from) == (whole.steps, 6)
    lines = [line for part in (*told, steps) for line in part.steps]
    digests = [(line.step, line.version.digest) for line in lines]
    assert digests == [(line.step, line.version.digest) for line in calm.steps]
    assert result.held_out == whole.held_out
    again, _, _ = run(train, data, tmp_path / "cut")
    assert again.already_finished
    assert again.model == result.model


def test_a_killed_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Steps after it are made again, with the same bits."""

    class KilledError(Exception):
        pass

    class Dying(RememberedSteps):
        def step(self, metrics: Any) -> None:
            super().step(metrics)
            if metrics.step == 5:
                raise KilledError

    _, _, calm = run(train_sft, demonstrations, tmp_path / "calm")
    with pytest.raises(KilledError):
        run(train_sft, demonstrations, tmp_path / "killed", telemetry=Dying())
    result, _, steps = run(train_sft, demonstrations, tmp_path / "killed")
    assert result.resumed_from == 4
    assert [line.version for line in steps.steps] == [line.version for line in calm.steps[5:]]


def test_the_order_of_the_examples_has_a_seed_of_its_own(tmp_path: Path) -> None:
    short = {"supervised": {"epochs": 0, "minibatch_tokens": 30, "microbatch_tokens": 30}, "trainer": {"steps": 2}}
    seeds = [({"seed": 0}, {}), ({"seed": 0}, {"seed": 3}), ({"seed": 3}, {})]
    digests = []
    for number, (of_run, of_data) in enumerate(seeds):
        spec = supervised_spec(run=of_run, data=of_data, **short)
        _, _, told = run(train_sft, demonstrations, tmp_path / str(number), spec)
        digests.append(told.steps[-1].version.digest)
    assert digests[1] == digests[2] != digests[0]


def test_one_step_equals_torchs_own_adamw(tmp_path: Path) -> None:
    """The mean over a minibatch's tokens, whatever the microbatches; clipped; a step at the warm-up's rate."""
    spec = supervised_spec(
        supervised={"minibatch_tokens": 10_000, "microbatch_tokens": 30, "epochs": 1},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 4, "max_grad_norm": 0.3, "weight_decay": 0.1},
    )
    _, subject, told = run(train_sft, demonstrations, tmp_path, spec)
    assert len(told.steps) == 2
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
    values = told.steps[1].values
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert values["learning_rate"] == 1e-2 / 4
    for (name, ours), plain in zip(subject.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=3e-5, msg=name)


def test_patience_ends_a_run_whose_held_out_loss_has_stopped_falling(tmp_path: Path) -> None:
    spec = supervised_spec(
        supervised={"epochs": 40, "patience": 2, "evaluate_every_steps": 1, "minibatch_tokens": 60},
        checkpoint={"every_steps": 0},
    )
    result, _, told = run(train_sft, demonstrations, tmp_path, spec)
    losses = told.curve("eval/loss")
    assert result.stopped_early
    assert result.steps < result.total_steps
    lowest = losses.index(min(losses))
    assert len(losses) == lowest + 3  # two more, neither lower
    assert result.model is not None
    assert result.model.name == f"step_{lowest}"  # a checkpoint of the best, although none was due
    again, _, _ = run(train_sft, demonstrations, tmp_path, spec)
    assert again.already_finished
    assert again.model == result.model


def test_without_held_out_examples_nothing_is_evaluated(tmp_path: Path) -> None:
    subject = bench(tmp_path)
    result = train_sft(supervised_spec(), train=demonstrations(6), held_out=[], bench=subject)
    assert isinstance(subject.telemetry, RememberedSteps)
    assert subject.telemetry.curve("eval/loss") == []
    assert result.held_out == {}
    assert result.model == subject.directory / "checkpoints" / f"step_{result.steps}"


def test_no_examples_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training examples"):
        train_sft(supervised_spec(), train=[], held_out=demonstrations(2), bench=bench(tmp_path))


def test_a_stop_before_the_first_step_leaves_no_model(tmp_path: Path) -> None:
    result, _, _ = run(train_sft, demonstrations, tmp_path, stop=lambda: True)
    assert (result.interrupted, result.steps, result.model) == (True, 0, None)


@pytest.mark.parametrize(("train", "data"), KINDS)
@pytest.mark.parametrize("steps", [1, 8])
def test_a_run_whose_gradients_are_never_finite_ends_unfinished(
    train: Train, data: Callable[..., list[Any]], steps: int, tmp_path: Path
) -> None:
    model = llama()
    save_folder(model, tmp_path / "model")
    with torch.no_grad():
        next(model.parameters())[:] = torch.nan
    subject = bench(tmp_path, model=model, source=tmp_path / "model")
    spec = supervised_spec(supervised={"epochs": 0}, trainer={"steps": steps}, checkpoint={"every_steps": 0})
    with pytest.raises(GuardStop, match="no gradient was finite"):
        train(spec, train=data(16), held_out=[], bench=subject)
    assert isinstance(subject.telemetry, RememberedSteps)
    assert subject.telemetry.steps[-1].step == min(3, steps)
    assert subject.checkpoints.latest().checkpoint is None
