"""`math_verify`, in a process of its own: its audit hook cannot be removed, and with one in the process CPython 3.11
can refuse the trace function that coverage gives a new thread."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import numpy as np
import pytest

from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import ArithmeticTask, RewardConfig, ScoringConfig
from tidemill.data.build_task import build_task
from tidemill.scoring.scorer import build_scorer

pytest.importorskip("math_verify")
DEADLINE_S = 60.0


def verified(completion: str, answer: str) -> float:
    return float(importlib.import_module("tidemill.scoring.math_answers").math_verify(completion, answer))


@pytest.fixture(scope="module")
def checker() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        yield processes


def score(checker: Executor, completion: str, answer: str) -> float:
    return checker.submit(verified, completion, answer).result(DEADLINE_S)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{2}{4}}", "$0.5$", 1),
        ("The answer is 1/2", r"\frac{1}{2}", 1),
        ("$x + 1$", "$1 + x$", 1),
        ("3", "4", 0),
        ("no idea", "4", 0),
    ],
)
def test_equal_expressions_are_right(checker: Executor, completion: str, answer: str, expected: float) -> None:
    assert score(checker, completion, answer) == expected


def test_an_answer_without_an_expression_is_an_error(checker: Executor) -> None:
    with pytest.raises(ValueError, match="no expression"):
        score(checker, "3", "")


async def test_a_power_tower_is_one_invalid_sample() -> None:
    task = build_task(ArithmeticTask(), codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)
    scoring = ScoringConfig(rewards=(RewardConfig(kind="math_verify"),), timeout_s=2.0)
    scorer = build_scorer(scoring, task=task, seed=0)
    prompt = make_prompt("5+7=", "12")
    try:
        assert (await scorer.score(prompt, make_trajectory(prompt, r"\boxed{12}"))).value == 1
        late = await scorer.score(prompt, make_trajectory(prompt, r"\boxed{9^{9^{9}}}"))
        assert (late.valid, "no result within 2 s" in late.reason) == (False, True)
        assert (await scorer.score(prompt, make_trajectory(prompt, r"\boxed{24/2}"))).value == 1
    finally:
        await scorer.close()


HOSTILE = r"\text{[0for[copyright.__class__.changed]in[[1]]]}"


@pytest.mark.parametrize("answer", [r"$\sqrt{2}$", r"\pi", r"$\{1,2\}$"])
@pytest.mark.parametrize("operator", [r"\sum_{n=0}^{\infty}", r"\prod_{n=0}^{\infty}", r"\int_0^1", r"\lim_{n\to 0}"])
def test_a_completion_cannot_run_code(checker: Executor, answer: str, operator: str) -> None:
    assert score(checker, f"${operator} {HOSTILE}^n/n!$", answer) == 0
    assert not checker.submit(copyright_is_changed).result(DEADLINE_S)


def copyright_is_changed() -> bool:
    return hasattr(type(copyright), "changed")


LIBRARY = "numpy.f2py.sys.modules"
CHANGES = {
    "numpy.ma.core.changed": ["core", "changed"],
    f"{LIBRARY}[[*{LIBRARY}][0]].changed": ["f2py", "sys", "modules", "changed"],
}
"""What a completion assigns, and symbols that make the names known."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_completion_cannot_change_what_its_symbols_name(checker: Executor, change: str) -> None:
    symbols = "".join(rf"\text{{{name}}}" for name in CHANGES[change])
    code = rf"\text{{[0for[{change}]in[[1]]]}}"
    assert score(checker, rf"$\sum_{{n=0}}^{{\infty}} ({code}{symbols})^n/n!$", r"$\sqrt{2}$") == 0
    assert not checker.submit(a_module_is_changed).result(DEADLINE_S)


def a_module_is_changed() -> bool:
    return any(hasattr(module, "changed") for module in (np.ma.core, next(iter(sys.modules.values()))))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"$\sum_{n=0}^{\infty} \frac{1}{n!}$", "$e$"),
        (r"$\sum_{n=1}^{\infty} \frac{1}{n^2}$", r"$\frac{\pi^2}{6}$"),
        (r"$\int_0^1 x^2 dx$", r"$\frac13$"),
        (r"$\int_0^1 \sin(x^2) dx$", "0.310268"),
        (r"$\lim_{x\to 0}\frac{\sin x}{x}$", "1"),
        (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{pmatrix}1\\2\end{pmatrix}$"),
        (r"$x \in (1,2]$", "$(1,2]$"),
    ],
)
def test_what_math_verify_evaluates_itself_is_not_refused(checker: Executor, completion: str, answer: str) -> None:
    assert score(checker, completion, answer) == 1
