"""Expected lengths; the comments show the arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.controller import estimates as module
from tidemill.controller.estimates import LengthEstimator


def make_estimator(**seen: list[int]) -> LengthEstimator:
    estimator = LengthEstimator()
    for prompt_id, lengths in seen.items():
        for length in lengths:
            estimator.observe(prompt_id, length)
    return estimator


def test_the_expected_length_is_the_prompts_mean_then_the_overall_mean_then_half_the_limit() -> None:
    estimator = make_estimator(a=[10, 20], b=[60])

    assert estimator.expected("a", 100) == 15.0
    assert estimator.expected("new", 100) == 30.0  # (10 + 20 + 60) / 3
    assert LengthEstimator().expected("a", 100) == 50.0


def test_expected_remaining_is_the_mean_excess_of_longer_completions() -> None:
    estimator = make_estimator(a=[5, 10, 20, 30, 40], b=[12, 12, 12, 50])

    assert estimator.expected_remaining("a", 0, 100) == 21.0  # (5 + 10 + 20 + 30 + 40) / 5
    assert estimator.expected_remaining("a", 5, 100) == 20.0  # ((10 + 20 + 30 + 40) - 4 * 5) / 4
    # Only three of a's are longer than 10; of all prompts seven: 12, 12, 12, 20, 30, 40, 50, 25 1/7 on average.
    assert estimator.expected_remaining("a", 10, 100) == 176 / 7 - 10
    assert estimator.expected_remaining("new", 12, 100) == 23.0  # (20 + 30 + 40 + 50) / 4 - 12


def test_with_few_longer_completions_the_mean_or_half_of_the_rest_is_used() -> None:
    estimator = make_estimator(a=[10, 20])

    assert estimator.expected_remaining("a", 5, 100) == 10.0  # 15 - 5
    assert estimator.expected_remaining("a", 15, 100) == 42.5  # (100 - 15) / 2
    assert estimator.expected_remaining("new", 4, 100) == 11.0  # (10 + 20) / 2 - 4
    assert LengthEstimator().expected_remaining("a", 10, 100) == 40.0  # 50 - 10
    assert LengthEstimator().expected_remaining("a", 60, 100) == 20.0  # (100 - 60) / 2


def test_expected_remaining_is_at_most_the_limit() -> None:
    estimator = make_estimator(a=[50] * 4)

    assert estimator.expected_remaining("a", 10, 30) == 20.0  # 50 - 10 would be 40
    assert estimator.expected_remaining("a", 30, 30) == 1.0


def test_only_the_latest_lengths_and_prompts_are_kept() -> None:
    estimator = make_estimator(a=[1000] * module.PER_PROMPT + [10] * module.PER_PROMPT)
    assert estimator.expected("a", 1) == 10.0

    for index in range(module.PROMPTS - 1):
        estimator.observe(f"p{index}", 30)
    assert estimator.expected("a", 1) == 10.0
    estimator.observe("a", 10)  # now p0 was seen least recently
    estimator.observe("one more", 30)
    assert estimator.expected("a", 1) == 10.0
    for index in range(module.PROMPTS - 1):
        estimator.observe(f"q{index}", 30)

    assert estimator.expected("a", 1) == 30.0  # not kept: the mean of all, of which the latest are all 30


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=80),
    st.sampled_from("abcd"),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_expected_remaining_is_between_one_and_the_rest(
    seen: list[tuple[str, int]], prompt_id: str, have: int, limit: int
) -> None:
    estimator = LengthEstimator()
    for name, length in seen:
        estimator.observe(name, length)

    remaining = estimator.expected_remaining(prompt_id, have, limit)

    assert 1.0 <= remaining <= max(limit - have, 1)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=60), st.integers(0, 50))
def test_the_running_sums_agree_with_counting(lengths: list[int], have: int) -> None:
    estimator = LengthEstimator()
    for length in lengths:
        estimator.observe("a", length)
        estimator.expected_remaining("a", 0, 10**6)  # the cached sums must be invalidated

    newest = [length for length in lengths[-module.PER_PROMPT :] if length > have]
    longer = newest if len(newest) >= module.ENOUGH_LENGTHS else [length for length in lengths if length > have]
    if len(longer) >= module.ENOUGH_LENGTHS:
        expected = max(sum(longer) / len(longer) - have, 1.0)
        assert estimator.expected_remaining("a", have, 10**6) == expected
