"""The arithmetic task: its format, its split, its shots."""

from __future__ import annotations

import pytest

from tests.char_codec import CharCodec
from tidemill.config.task import ArithmeticTask
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt
from tidemill.data.arithmetic import Problem, choose_shots, draw_from, format_prompt, split_listed
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task


def build(seed: int = 0, batch_prompts: int = 8, **settings: object) -> Task:
    config = ArithmeticTask.model_validate({"kind": "arithmetic", **settings})
    return build_task(config, codec=CharCodec(), batch_prompts=batch_prompts, seed=seed, chat_template=False)


def epoch_of(task: Task, batch_prompts: int = 8) -> list[Prompt]:
    steps = -(-task.train_size // batch_prompts)
    pairs = [pair for step in range(1, steps + 1) for pair in task.source.train_batch(step)]
    return [prompt for epoch, prompt in pairs if epoch == 0]


def question(prompt: Prompt) -> str:
    return prompt.text.rpartition("\n")[2]


def test_the_format() -> None:
    shots = [Problem(operator="+", left=2, right=3), Problem(operator="-", left=4, right=9)]
    assert format_prompt(shots, Problem(operator="*", left=7, right=6)) == "2+3=5\n4-9=-5\n7*6="


def test_no_shots_is_just_the_question() -> None:
    assert format_prompt([], Problem(operator="+", left=7, right=6)) == "7+6="


def test_every_prompt_starts_with_the_same_shots_and_asks_none_of_them() -> None:
    task = build(shots=4)
    prompts = [*epoch_of(task), *task.source.held_out()]
    (prefix,) = {prompt.text.rpartition("\n")[0] for prompt in prompts}
    shown = [line.partition("=")[0] for line in prefix.split("\n")]
    assert len(shown) == 4
    asked = {question(prompt) for prompt in prompts}
    for left, right in (line.split("+") for line in shown):
        assert f"{left}+{right}=" not in asked
        assert f"{right}+{left}=" not in asked


def test_sizes_of_one_digit_addition() -> None:
    # 10·10 problems = 55 kinds; two shots take 2 kinds of 2 problems each (2+3, 7+6): 96 problems, 53 kinds.
    # A quarter of 53 kinds, rounded: 13 are held out.
    task = build(shots=2)
    assert task.train_size + task.held_out_size == 96
    assert len({tuple(sorted(question(prompt)[:-1].split("+"))) for prompt in task.source.held_out()}) == 13
    assert len(task.source.held_out()) == task.held_out_size


def test_answers_are_right() -> None:
    for prompt in epoch_of(build(operators="+-*", digits=1)):
        assert prompt.answer == str(eval(question(prompt)[:-1]))


def test_subtraction_twins_are_different_problems_and_may_part() -> None:
    train, held_out = split_listed(ArithmeticTask(operators="-"), [])
    assert len(train) + len(held_out) == 100
    pairs = {(problem.left, problem.right) for problem in held_out}
    assert any((right, left) not in pairs for left, right in pairs)


def test_each_operator_gives_its_share() -> None:
    train, held_out = split_listed(ArithmeticTask(operators="+-*", held_out_fraction=0.2), [])
    counts = {operator: sum(problem.operator == operator for problem in held_out) for operator in "+-*"}
    assert counts["-"] == 20  # a fifth of 100 kinds of one problem each
    assert 11 <= counts["+"] <= 22  # 11 of 55 kinds, of one or two problems each
    assert 11 <= counts["*"] <= 22
    assert len(train) + len(held_out) == 300


def test_another_seed_asks_in_another_order_and_holds_out_the_same() -> None:
    first, second = build(seed=1), build(seed=2)
    assert first.source.held_out() == second.source.held_out()
    assert first.digest == second.digest
    assert [p.text for p in epoch_of(first)] != [p.text for p in epoch_of(second)]
    assert {p.text for p in epoch_of(first)} == {p.text for p in epoch_of(second)}


def test_shots_alternate_operators_and_avoid_trivial_operands() -> None:
    shots = choose_shots(ArithmeticTask(operators="*-", shots=6))
    assert [shot.operator for shot in shots] == list("*-*-*-")
    assert all(min(shot.left, shot.right) >= 2 for shot in shots)
    assert len({shot.kind for shot in shots}) == 6


def test_sizes_of_addition_up_to_a_largest_operand() -> None:
    # 20·20 problems = 210 kinds; two shots of unlike operands take 2 kinds of 2 problems each: 396 problems, 208 kinds.
    # 0.4 of 208 kinds, rounded: 83 are held out.
    task = build(digits=2, largest=19, shots=2, held_out_fraction=0.4)
    prompts = [*epoch_of(task), *task.source.held_out()]
    operands = [int(number) for prompt in prompts for number in question(prompt)[:-1].split("+")]
    assert (min(operands), max(operands)) == (0, 19)
    assert len(prompts) == task.train_size + task.held_out_size == 396
    assert len({tuple(sorted(question(prompt)[:-1].split("+"))) for prompt in task.source.held_out()}) == 83
    shots = prompts[0].text.split("\n")[:-1]
    assert all(int(number) <= 19 for shot in shots for number in shot.partition("=")[0].split("+"))


def test_a_largest_operand_that_is_the_usual_one_changes_nothing() -> None:
    assert build(digits=2, largest=99).digest == build(digits=2).digest


def test_an_operator_named_twice_counts_once() -> None:
    assert build(operators="++").digest == build(operators="+").digest


@pytest.mark.parametrize("digits", [2, 6])
def test_long_operands_are_quick_to_set_up_and_stay_within_the_stated_bound(digits: int) -> None:
    task = build(operators="+*", digits=digits)
    prompts = [prompt for step in range(1, 5) for _, prompt in task.source.train_batch(step)]
    longest = max(len(prompt.token_ids) // 4 for prompt in [*prompts, *task.source.held_out()])
    assert longest <= task.longest_prompt_tokens <= longest + 4 * digits
    assert all(prompt.answer == str(eval(question(prompt)[:-1])) for prompt in prompts)


def test_drawn_problems_have_fresh_epochs_and_never_repeat_in_a_batch() -> None:
    # 3000 draws from 750,000 problems: about 3000² / (2·750,000) = 6 repeats, were they not drawn again.
    source = build(digits=3, batch_prompts=3000).source
    for step in (1, 7):
        batch = source.train_batch(step)
        assert {epoch for epoch, _ in batch} == {step - 1}
        assert len({prompt.prompt_id for _, prompt in batch}) == 3000


def test_a_share_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(UserError, match="too rare"):
        build(digits=4, held_out_fraction=1e-6)


def test_the_end_of_a_line_ends_an_answer() -> None:
    assert build().default_stop_strings == ("\n",)
    assert build().check is None


def test_a_drawn_problem_is_never_one_of_the_shots() -> None:
    config = ArithmeticTask(digits=3)
    first = draw_from(config, [])(False, "key")
    assert draw_from(config, [first])(False, "key").kind != first.kind
