from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.char_codec import CharCodec, make_prompt, make_trajectory
from tidemill.config.task import ArithmeticTask, RewardConfig, ScoringConfig
from tidemill.data.build_task import build_task
from tidemill.scoring.math_answers import math_verify
from tidemill.scoring.scorer import build_scorer

pytest.importorskip("math_verify")


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
def test_equal_expressions_are_right(completion: str, answer: str, expected: float) -> None:
    assert math_verify(completion, answer) == expected


def test_an_answer_without_an_expression_is_an_error() -> None:
    with pytest.raises(ValueError, match="no expression"):
        math_verify("3", "")


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
@pytest.mark.filterwarnings("ignore:invalid decimal literal:SyntaxWarning")
def test_a_completion_cannot_run_code(answer: str, operator: str) -> None:
    assert math_verify(f"${operator} {HOSTILE}^n/n!$", answer) == 0
    assert not hasattr(type(copyright), "changed")


LIBRARY = "numpy.f2py.sys.modules"
CHANGES = {
    "numpy.ma.core.changed": ["core", "changed"],
    f"{LIBRARY}[[*{LIBRARY}][0]].changed": ["f2py", "sys", "modules", "changed"],
}
"""What a completion assigns, and symbols that make the names known."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_completion_cannot_change_what_its_symbols_name(change: str) -> None:
    symbols = "".join(rf"\text{{{name}}}" for name in CHANGES[change])
    code = rf"\text{{[0for[{change}]in[[1]]]}}"
    assert math_verify(rf"$\sum_{{n=0}}^{{\infty}} ({code}{symbols})^n/n!$", r"$\sqrt{2}$") == 0
    for module in (np.ma.core, next(iter(sys.modules.values()))):
        assert not hasattr(module, "changed")


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
def test_what_math_verify_evaluates_itself_is_not_refused(completion: str, answer: str) -> None:
    assert math_verify(completion, answer) == 1
