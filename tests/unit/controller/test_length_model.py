"""Predicted lengths; the comments show the arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.controller import length_model as module
from tidemill.controller.length_model import LengthModel

LIMIT = 10_000
Group = tuple[str, int, list[int]]  # prompt, its tokens, lengths

groups = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 500), st.lists(st.integers(0, 50), max_size=4)), max_size=30
)


def make_model(observed: Sequence[Group]) -> LengthModel:
    model = LengthModel()
    for prompt_id, prompt_tokens, lengths in observed:
        model.observe(prompt_id, prompt_tokens, lengths)
    return model


def drawn_groups(prompts: int, *, share: float, slope: float = 0.0, seed: int = 0, size: int = 8) -> list[Group]:
    """Log-normal lengths of variance 0.64 at one prompt length, `share` of it between prompts."""
    rng = random.Random(seed)
    drawn = []
    for prompt in range(prompts):
        tokens = round(math.exp(rng.uniform(4, 7)))
        mean = 6 + slope * (math.log(tokens) - 5.5) + 0.8 * math.sqrt(share) * rng.gauss(0, 1)
        lengths = [round(math.exp(mean + 0.8 * math.sqrt(1 - share) * rng.gauss(0, 1))) for _ in range(size)]
        drawn.append((f"p{prompt}", tokens, lengths))
    return drawn


@pytest.mark.parametrize(
    ("have", "siblings", "remaining"),
    [
        (0, (), 50.0),  # uniform up to the limit: (0 + 100) / 2
        (60, (), 20.0),  # (60 + 100) / 2 - 60
        (99, (), 1.0),
        (120, (), 1.0),
        (0, (10, 30), 26.0),  # (10 + 30 + 50 / 2) / 2.5
        (20, (10, 30), 20.0),  # (30 + 60 / 2) / 1.5 - 20
        (20, (200,), 200 / 3),  # (100 + 60 / 2) / 1.5 - 20
    ],
)
def test_while_nothing_is_known(have: int, siblings: tuple[int, ...], remaining: float) -> None:
    assert LengthModel().expected_remaining("a", 10, have, 100, siblings) == pytest.approx(remaining)


def test_one_sample() -> None:
    model = make_model([("a", 10, [20])])

    # The mean is log 20. The sample's deviation from it is 0: squares 8 over a weight of 9, products 2.4 over 8 pairs.
    variance, between = 8 / 9, 8 * 0.3 / 8
    # Of a new prompt: 16 prior residuals, and that of the sample, 0.
    spread = math.sqrt(variance)
    lengths = [20 * math.exp(spread * residual) for residual in (*module.PRIOR_RESIDUALS, 0.0)]
    # An assumed one of weight 1/2 is half-way from the tokens so far to the limit.
    assert model.expected("b", 10, LIMIT) == pytest.approx((sum(lengths) + LIMIT / 4) / 17.5)
    longer = [length for length in lengths if length > 50]
    assert len(longer) == 3
    expected = (sum(longer) + (50 + LIMIT) / 4) / 3.5 - 50
    assert model.expected_remaining("b", 10, 50, LIMIT) == pytest.approx(expected)
    cut = (sum(min(length, 60) for length in longer) + (50 + 60) / 4) / 3.5
    assert model.expected_remaining("b", 10, 50, 60) == pytest.approx(cut - 50)

    # A sibling of 60 moves the mean of "b": a deviation of log 3, shrunk by 1 / (1 + within / between), and leaves
    # within + within / (1 + within / between) of the variance, rounded to a step of between / 8.
    within = variance - between
    known = 1 + within / between
    steps = round(8 * within / between / known)
    spread = math.sqrt(within + between * steps / 8)
    moved = [20 * 3 ** (1 / known) * math.exp(spread * residual) for residual in (*module.PRIOR_RESIDUALS, 0.0)]
    assert model.expected("b", 10, LIMIT, [60]) == pytest.approx((sum(moved) + LIMIT / 4) / 17.5)


def test_mean_slope_and_variances_agree_with_direct_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 1.0)
    monkeypatch.setattr(module, "KEPT_OF_PROMPT", 1.0)
    drawn = drawn_groups(20, share=0.5, slope=0.5)
    model = make_model(drawn)

    points = [(math.log(tokens), math.log(length)) for _, tokens, lengths in drawn for length in lengths]
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    assert (model._mean_x, model._mean_y) == pytest.approx((mean_x, mean_y))
    assert model._slope == pytest.approx(xy / (xx + module.RIDGE))


def test_the_variances_are_those_of_the_data() -> None:
    between, within = make_model(drawn_groups(400, share=0.7))._variances

    assert (between, within) == pytest.approx((0.7 * 0.64, 0.3 * 0.64), rel=0.2)


def test_the_slope_is_that_of_the_data() -> None:
    model = make_model(drawn_groups(200, share=0.1, slope=0.8))

    assert model._slope == pytest.approx(0.8, abs=0.1)
    assert make_model(drawn_groups(200, share=0.1))._slope == pytest.approx(0.0, abs=0.1)
    assert model.expected("new", 1000, LIMIT) > 2 * model.expected("new", 100, LIMIT)


def test_a_prompts_samples_and_its_siblings_count_alike() -> None:
    drawn = drawn_groups(100, share=0.7)
    model = make_model(drawn)
    before = model.expected("new", 200, LIMIT)

    told = model.expected("new", 200, LIMIT, [3000, 4000, 3500])
    model.observe("new", 200, [3000, 4000, 3500])

    assert before < 800 < 2000 < told
    assert model.expected("new", 200, LIMIT) == pytest.approx(told, rel=0.1)


def test_later_samples_of_a_prompt_weigh_more() -> None:
    early = make_model([*drawn_groups(100, share=0.7), ("a", 200, [3000] * 16), ("a", 200, [300] * 16)])
    late = make_model([*drawn_groups(100, share=0.7), ("a", 200, [300] * 16), ("a", 200, [3000] * 16)])

    assert early.expected("a", 200, LIMIT) < 0.6 * late.expected("a", 200, LIMIT)


def test_lengths_that_all_grow_are_followed() -> None:
    model = LengthModel()
    for epoch in range(8):
        for prompt_id, tokens, lengths in drawn_groups(128, share=0.3, seed=epoch):
            model.observe(prompt_id, tokens, [round(length * 1.3**epoch) for length in lengths])

    mean = fmean(length * 1.3**7 for _, _, lengths in drawn_groups(128, share=0.3, seed=7) for length in lengths)
    assert model.expected("new", 200, 10**6) == pytest.approx(mean, rel=0.3)


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_the_remaining_length_agrees_with_later_samples(share: float) -> None:
    model = make_model(drawn_groups(500, share=share))
    later = [length for _, _, lengths in drawn_groups(3000, share=share, seed=1) for length in lengths]

    for have in (0, 200, 600, 1200):
        excess = fmean(length - have for length in later if length > have)
        assert model.expected_remaining("new", 200, have, LIMIT) == pytest.approx(excess, rel=0.15)


def test_a_sample_beyond_all_lengths_is_expected_to_take_half_of_the_rest() -> None:
    model = make_model(drawn_groups(200, share=0.3))

    assert model.expected_remaining("new", 200, 50_000, 60_000) == pytest.approx(5000.0)


def test_prompts_and_residuals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPTS", 3)
    model = make_model([(name, 10, [5, 6]) for name in "abcad"])

    assert list(model._effects) == ["c", "a", "d"]  # "b" was observed least recently
    assert model._latest.maxlen == module.RESIDUALS


def test_all_lengths_equal() -> None:
    model = make_model([(f"p{index % 7}", 10, [40] * 8) for index in range(800)])

    assert model.expected("new", 10, LIMIT) == pytest.approx(40, rel=0.15)
    assert model.expected("p0", 10, LIMIT) == pytest.approx(40, rel=0.15)


@given(groups, st.sampled_from("abcd"), st.integers(0, 500), st.integers(0, 60), st.integers(1, 60))
def test_the_remaining_length_is_between_one_and_the_rest(
    observed: list[Group], prompt_id: str, prompt_tokens: int, have: int, limit: int
) -> None:
    model = make_model(observed)

    for siblings in ((), (0, 7), (60,)):
        remaining = model.expected_remaining(prompt_id, prompt_tokens, have, limit, siblings)
        assert 1.0 <= remaining <= max(limit - have, 1)


@given(groups)
def test_predictions_depend_on_the_order_of_observations_only(observed: list[Group]) -> None:
    """Neither on the queries between them, nor on how many lengths come at once."""
    model, one_by_one = LengthModel(), LengthModel()
    for prompt_id, prompt_tokens, lengths in observed:
        model.observe(prompt_id, prompt_tokens, lengths)
        model.expected("a", 10, 50)
        for length in lengths:
            one_by_one.observe(prompt_id, prompt_tokens, [length])

    again = make_model([group for group in observed if group[2]])
    for prompt_id, have in product("abcd", (0, 3, 20)):
        remaining = {each.expected_remaining(prompt_id, 100, have, 50) for each in (model, one_by_one, again)}
        assert len(remaining) == 1
