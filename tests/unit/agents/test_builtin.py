"""The built-in environments."""

from __future__ import annotations

import pytest

from tidemill.agents.builtin import Calculator, Guess
from tidemill.agents.environment import Split


def play(guess: Guess, task: dict[str, object]) -> tuple[str, list[str], list[str], float]:
    """Play an episode with the teacher: the range, its actions, the answers, and the last reward."""
    prompt = guess.reset(task, int(str(task["seed"])))
    actions: list[str] = []
    answers: list[str] = []
    while True:
        actions.append(guess.demonstrate())
        step = guess.step(actions[-1])
        if step.done:
            return prompt, actions, answers, step.reward
        assert step.state_key == step.text == f"{guess.low}-{guess.high}\n"
        answers.append(step.text)


def test_halving_always_finds_the_number_and_ranges_are_held_out() -> None:
    ranges: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    for split, seen in ranges.items():
        for task in Guess.tasks(split, 300):
            prompt, actions, answers, reward = play(Guess(careful=1.0), task)
            assert reward == 1.0
            assert set("".join([prompt, *actions, *answers])) <= set("0123456789-\n")
            seen.add(prompt)
    assert len(ranges["train"]) > 100
    assert len(ranges["held_out"]) > 30
    assert not ranges["train"] & ranges["held_out"]


def test_a_careless_teacher_tries_the_ends() -> None:
    found = 0.0
    for task in Guess.tasks("train", 300):
        prompt, actions, answers, reward = play(Guess(careful=0.0), task)
        for possible, action in zip([prompt, *answers], actions, strict=True):
            assert action.strip() in possible.strip().split("-")
        found += reward
    assert 0.2 < found / 300 < 0.4  # 4 of 12 to 15


def test_answers_are_the_numbers_that_are_left() -> None:
    guess = Guess(guesses=5)
    prompt = guess.reset({"seed": 1}, 1)
    guess.low, guess.high, guess.number = 30, 42, 37
    assert guess.step("x\n").text == "30-42\n" != prompt
    assert guess.step("34\n").text == "35-42\n"
    assert guess.step("40\n").text == "35-39\n"
    assert guess.step("12\n").text == "35-39\n"
    last = guess.step("38\n")
    assert (last.text, last.reward, last.done) == ("37\n", 0.0, True)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * 34", "408"), ("-(2+3)*4", "-20"), ("7/2", "3.5"), ("8/2", "4"), ("2.5*2", "5")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["9**9**9", "__import__('os')", "1/0", "2*", "1" * 101, "True+1", "'a'*9", "1e308*10"]
)
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ArithmeticError)):
        Calculator().calculate(expression)


def test_products_are_held_out() -> None:
    train, held_out = Calculator.tasks("train", 10_000), Calculator.tasks("held_out", 10_000)
    assert len(train) + len(held_out) == 8100
    assert len(held_out) > 1000
    assert not {each["answer"] for each in train if each in held_out}
    calculator = Calculator()
    calculator.reset(train[0], 0)
    assert calculator.score(f"The answer is {train[0]['answer']}.") == 1.0
    assert calculator.score("It is 5") == calculator.score("") == 0.0
    assert Calculator.tasks("train", 5) == train[:5]
