"""The built-in environments."""

from __future__ import annotations

import pytest

from tidemill.envs.agents.builtin import Calculator, Guess
from tidemill.envs.agents.environment import Split


def play(task: dict[str, object]) -> tuple[str, str, float]:
    """Guess by halving: the range, all texts, and the reward."""
    guess = Guess()
    prompt = guess.reset(task, int(str(task["seed"])))
    texts, reward = [prompt], 0.0
    for _ in range(4):
        action = f"{(guess.low + guess.high) // 2}\n"
        step = guess.step(action)
        texts += [action, "" if step.done else step.text]
        reward += step.reward
        if step.done:
            break
        assert step.state_key == f"{guess.low}-{guess.high}"
    return prompt, "".join(texts), reward


def test_halving_always_finds_the_number_and_ranges_are_held_out() -> None:
    ranges: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    letters: set[str] = set()
    for split, seen in ranges.items():
        for task in Guess.tasks(split, 300):
            prompt, text, reward = play(task)
            assert reward == 1.0
            seen.add(prompt)
            letters |= set(text)
    assert len(ranges["train"]) > 100
    assert len(ranges["held_out"]) > 30
    assert not ranges["train"] & ranges["held_out"]
    assert letters <= set("0123456789-\nhigherlowerror")


def test_guesses_run_out_and_what_is_no_number_is_a_guess() -> None:
    guess = Guess(guesses=2)
    guess.reset({"seed": 1}, 1)
    assert guess.step("x\n").text == "error\n"
    last = guess.step("0\n")
    assert (last.text, last.reward, last.done) == (f"{guess.number}\n", 0.0, True)


@pytest.mark.parametrize(("careful", "guesses"), [(1.0, 4), (0.0, 15)])
def test_the_teacher_halves_or_counts(careful: float, guesses: int) -> None:
    for task in Guess.tasks("train", 50):
        guess = Guess(careful=careful, guesses=guesses)
        prompt = guess.reset(task, task["seed"])
        low = int(prompt.split("-")[0])
        actions = []
        while not actions or not step.done:
            actions.append(int(guess.demonstrate()))
            step = guess.step(f"{actions[-1]}\n")
        assert step.reward == 1.0
        assert careful or actions == list(range(low, guess.number + 1))


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
