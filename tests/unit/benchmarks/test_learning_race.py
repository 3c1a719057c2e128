"""The learning race: its tasks, its figures, and that it fails when the sides do different work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.learning_race import figures_of
from benchmarks.race_common import GROUP_SIZE, PROMPTS, prompts_key
from benchmarks.race_figures import Evaluated, Run, accuracy_at, check_same_work, cpu_seconds_to, run_of
from benchmarks.race_tasks import TASKS, RaceTask, right_share, written_addition
from benchmarks.turns import SideResult, Turn, Work

NOTES = {
    "prompts": 7.0,
    "reward": 0.5,
    "grad_norm": 0.4,
    "plain_grad_norm": 0.4,
    "completion_tokens": 4600.0,
    "groups_without_signal": 1.0,
}


def turn(cpu_s: float = 1.0, **changed: float) -> Turn:
    work = Work(samples=PROMPTS * GROUP_SIZE, prompt_tokens=1152, completion_tokens=0)
    return Turn(wall_s=cpu_s, cpu_s=cpu_s, work=work, notes=NOTES | changed)


def side(**changed: float) -> SideResult:
    return SideResult(turns=[turn(**changed), turn()], peak_rss_bytes=0)


def test_equal_work_passes() -> None:
    check_same_work({"Tidemill": side(), "TRL": side(completion_tokens=4700.0, reward=0.55)})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompts": 8.0}, "step 1: the sides answered different prompts"),
        ({"grad_norm": 0.41}, "TRL: the gradient norm of step 1 is 0.41, in plain torch 0.4"),
        ({"reward": 0.7}, "mean rewards of step 1 differ"),
        ({"completion_tokens": 4000.0}, "differ in length at step 1"),
    ],
)
def test_different_work_fails(changed: dict[str, float], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        check_same_work({"Tidemill": side(), "TRL": side(**changed)})


def test_only_the_gradient_may_differ_with_other_losses() -> None:
    check_same_work({"Tidemill": side(), "TRL": side(grad_norm=0.9)}, same_loss=False)
    with pytest.raises(RuntimeError, match="different prompts"):
        check_same_work({"Tidemill": side(), "TRL": side(prompts=8.0)}, same_loss=False)


def test_a_race_without_signal_fails() -> None:
    dull = replace(side(), turns=[turn(groups_without_signal=float(PROMPTS))] * 2)
    with pytest.raises(RuntimeError, match="TRL: no group of any step had signal"):
        check_same_work({"Tidemill": side(), "TRL": dull})


def test_prompts_in_another_order_have_another_key() -> None:
    assert prompts_key(["a", "a", "b"]) == prompts_key(["a", "b"]) != prompts_key(["b", "a"])


def test_a_run_counts_the_cpu_time_of_its_steps() -> None:
    turns = [turn(2.0), turn(3.0, accuracy=0.5, greedy=0.9, reward=0.7), turn(4.0)]
    found = run_of(3, turns, {"accuracy": 0.1, "greedy": 0.2})
    assert (found.seed, found.cpu_s, found.step_cpu_s) == (3, 9.0, 3.0)
    assert [(each.step, each.cpu_s, each.accuracy) for each in found.evaluations] == [(0, 0.0, 0.1), (2, 5.0, 0.5)]
    assert found.evaluations[1].reward == pytest.approx(0.6)


def curve(*points: tuple[float, float]) -> list[Evaluated]:
    return [
        Evaluated(step=step, cpu_s=cpu_s, accuracy=accuracy, greedy_reward=accuracy, reward=None)
        for step, (cpu_s, accuracy) in enumerate(points)
    ]


def test_seconds_to_an_accuracy_are_on_the_line_between_two_evaluations() -> None:
    found = curve((0, 0.0), (10, 0.4), (20, 0.8), (30, 0.6))
    assert cpu_seconds_to(0.6, found) == pytest.approx(15.0)
    assert cpu_seconds_to(0.9, found) is None
    assert accuracy_at(15, found) == pytest.approx(0.6)
    assert accuracy_at(99, found) == 0.6


def test_figures_compare_the_sides_by_seed() -> None:
    fast, slow = curve((0, 0.0), (10, 1.0)), curve((0, 0.0), (16, 1.0))
    runs = {
        "Tidemill": [Run(seed=0, cpu_s=10, step_cpu_s=1.0, completion_tokens=1, evaluations=fast)],
        "TRL": [Run(seed=0, cpu_s=16, step_cpu_s=1.6, completion_tokens=1, evaluations=slow)],
    }
    figures = figures_of(runs, (0.5, 0.8, 0.9))
    assert figures["step_ratio"] == pytest.approx(1.6)
    assert [each["ratio"] for each in figures["cpu_seconds_to"]] == pytest.approx([1.6, 1.6, 1.6])
    assert figures["at_equal_cpu_s"]["accuracy"] == {"Tidemill": [1.0], "TRL": [pytest.approx(0.625)]}
    assert figures["difference"] == (0.0, 0.0, 0.0)
    assert figures["reached"] == {"faster": True, "as_accurate": True, "as_accurate_at_each_step": True}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_answers_and_teachers_have_the_length_of_the_task(task: RaceTask) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        question = task.question(dice)
        taught = task.teach(question, dice)
        assert len(question.answer) == len(taught) == task.new_tokens - 1
        assert right_share(question.answer, question.answer, task.part) == 1.0
        assert 0 < right_share(taught, question.answer, task.part) <= 1


def test_written_addition_carries() -> None:
    assert written_addition(58, 64, 2) == "8+4+0=12;5+6+1=12;"
    assert written_addition(58, 64, 2, lambda: True) == "8+4+0=12;5+6+0=11;"


def test_a_reward_counts_parts_in_their_places() -> None:
    assert right_share("a1 b2 ", "a1 b1 ", 3) == 0.5
    assert right_share("a1 ", "a1 b1 ", 3) == 0.5
    assert right_share("a1 b1 b1 ", "a1 b1 ", 3) == 0.0
