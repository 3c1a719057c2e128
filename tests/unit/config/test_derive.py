from __future__ import annotations

import pytest

from tidemill.config.derive import SIMULATED_SAMPLES, count_microbatches, derive, estimated_prompt_tokens, times
from tidemill.config.load import load_spec
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask


def test_the_arithmetic_of_a_run() -> None:
    args = "--batch.prompts=6 --batch.group_size=4 --batch.minibatches=3 --batch.epochs=2 --sampling.max_new_tokens=10"
    args += " --trainer.steps=20 --eval.every_steps=5 --eval.prompts=30 --eval.max_new_tokens=7"
    args += " --checkpoint.every_steps=8 --checkpoint.keep_last=2"
    derived = derive(load_spec(args.split()), prompt_tokens=20)
    assert derived.samples_per_step == 24  # 6 × 4
    assert derived.optimizer_steps_per_batch == 6  # 3 minibatches × 2 epochs
    assert derived.samples_per_optimizer_step == 8  # 24 / 3
    assert derived.optimizer_steps == 120  # 20 × 6
    assert derived.samples == 480  # 20 × 24
    assert derived.completion_tokens_per_step == 240  # 24 × 10
    assert derived.completion_tokens == 4800
    assert derived.trained_tokens == 9600  # two epochs
    assert derived.microbatches_per_optimizer_step == 1  # 2 groups × (20 + 4 × 10) = 120 of 2048
    assert derived.microbatches_per_step == 6
    assert derived.evaluations == 5  # before, after 5, 10, 15 and 20
    assert derived.eval_samples == 150
    assert derived.eval_tokens == 1050  # 150 × 7
    assert derived.checkpoints == 3  # after 8, 16 and 20
    assert derived.checkpoints_kept == 3  # two last, and the best


@pytest.mark.parametrize(
    ("steps", "every", "count"),
    [(20, 5, 4), (20, 0, 1), (20, 6, 4), (1, 5, 1), (5, 5, 1), (6, 5, 2)],  # the last step counts once
)
def test_times(steps: int, every: int, count: int) -> None:
    assert times(steps, every) == count


@pytest.mark.parametrize(
    ("groups", "group_size", "prompt", "completion", "budget", "count"),
    [
        (2, 4, 20, 10, 120, 1),  # 2 × (20 + 40) fits exactly
        (2, 4, 20, 10, 119, 2),  # the last sample does not fit, and brings its prompt along
        (1, 4, 20, 10, 40, 2),  # two samples and their prompt: 20 + 2 × 10
        (1, 4, 20, 10, 30, 4),  # one sample each
        (1, 4, 20, 10, 5, 4),  # a sample is never split
        (3, 2, 0, 10, 40, 2),  # 60 tokens of completions
    ],
)
def test_microbatches(groups: int, group_size: int, prompt: int, completion: int, budget: int, count: int) -> None:
    found = count_microbatches(
        groups=groups, group_size=group_size, prompt_tokens=prompt, completion_tokens=completion, budget_tokens=budget
    )
    assert found == count


def test_huge_batches_are_counted_by_their_mean() -> None:
    groups = SIMULATED_SAMPLES  # × 2 samples
    found = count_microbatches(groups=groups, group_size=2, prompt_tokens=10, completion_tokens=5, budget_tokens=20)
    assert found == groups  # (10 + 2 × 5) tokens a group in microbatches of 20


@pytest.mark.parametrize(
    ("task", "tokens"),
    [
        (ArithmeticTask(), 18),  # 2 × "3+4=10\n" (7) + "1+2=" (4)
        (ArithmeticTask(digits=2, shots=0), 6),  # "12+34="
        (ArithmeticTask(digits=2, shots=1, operators="*"), 17),  # "12*34=" (6) + "1234\n" (5) + 6
    ],
)
def test_prompt_estimates(task: ArithmeticTask, tokens: int) -> None:
    assert estimated_prompt_tokens(RunSpec(task=task)) == tokens


def test_only_the_tokenizer_knows_other_prompts() -> None:
    assert estimated_prompt_tokens(load_spec(["--task.kind=jsonl", "--task.path=x"])) is None
