from __future__ import annotations

import random
from statistics import fmean, median

from benchmarks.copying import MEDIAN, WIDEST, careless, numbers, prompt


def test_the_careless_teacher_adds_one_to_every_digit() -> None:
    assert careless("0219") == "1320"


def test_prompts_are_equally_long_and_answers_have_a_long_tail() -> None:
    drawn = numbers(500, random.Random(0))
    lengths = [len(number) for number in drawn]
    assert {len(prompt(number)) for number in drawn} == {WIDEST + 1}
    assert abs(median(lengths) - MEDIAN) <= 2
    assert fmean(lengths) > 1.3 * median(lengths)
    assert max(lengths) == WIDEST
