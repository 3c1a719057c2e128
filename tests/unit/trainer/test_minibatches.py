"""Splitting examples into minibatches by packed tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.models.token_tree import Tokens, build_tree
from tidemill.trainer.packing import TreeSize, split_by_tokens
from tidemill.trainer.supervised_loop import Minibatches

SEQUENCES = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), min_size=1, max_size=12)
Example = tuple[int, tuple[Tokens, ...]]


def examples_of(lists: list[list[int]]) -> list[Example]:
    """Every example has one or two sequences."""
    return [
        (number, tuple(np.array(tokens, np.int32) for tokens in lists[number : number + 1 + number % 2]))
        for number in range(len(lists))
    ]


def parts(example: Example) -> tuple[Tokens, ...]:
    return example[1]


@settings(max_examples=80)
@given(SEQUENCES)
def test_tree_size_equals_the_size_of_the_built_tree(lists: list[list[int]]) -> None:
    size, seen = TreeSize(), list[Tokens]()
    for _, sequences in examples_of(lists):
        expected = build_tree([*seen, *sequences]).size
        assert size.nodes + size.growth(sequences) == expected
        size.add(sequences)
        seen.extend(sequences)
        assert size.nodes == expected


@settings(max_examples=80)
@given(SEQUENCES, st.integers(1, 20))
def test_runs_are_complete_ordered_and_within_the_budget(lists: list[list[int]], budget: int) -> None:
    examples = examples_of(lists)
    runs = split_by_tokens(examples, parts, budget)
    assert [number for run in runs for number, _ in run] == [number for number, _ in examples]
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        size = build_tree([sequence for each in run for sequence in parts(each)]).size
        assert size <= budget or len(run) == 1
        if following:  # greedy: the next example did not fit
            longer = [*run, following[0]]
            assert build_tree([sequence for each in longer for sequence in parts(each)]).size > budget


def planned(examples: list[Example], *, seed: int = 0, epochs: int = 2, steps: int = 1) -> Minibatches[Example]:
    return Minibatches(
        examples, parts, name=lambda example: str(example[0]), seed=seed, budget=10, epochs=epochs, steps=steps
    )


EXAMPLES = examples_of([[number, number + 1, number + 2, 7] for number in range(10)])


def test_every_epoch_has_each_example_once_in_another_order() -> None:
    plan = planned(EXAMPLES, epochs=3)
    taken: dict[int, list[int]] = {}
    for step in range(1, plan.total + 1):
        epoch, minibatch = plan.at(step)
        taken.setdefault(epoch, []).extend(number for number, _ in minibatch)
    assert sorted(taken) == [0, 1, 2]
    assert all(Counter(order) == Counter(range(10)) for order in taken.values())
    assert taken[0] != taken[1] != taken[2]


def test_a_minibatch_does_not_depend_on_earlier_calls_or_file_order() -> None:
    in_order, out_of_order = planned(EXAMPLES), planned(EXAMPLES[::-1])
    last = in_order.total
    expected = {step: in_order.at(step) for step in range(1, last + 1)}
    assert all(out_of_order.at(step) == expected[step] for step in (last, 1, last - 1, 2))
    assert planned(EXAMPLES, seed=1).at(1) != expected[1]


def test_steps_instead_of_epochs_repeat_the_examples() -> None:
    plan = planned(EXAMPLES, epochs=0, steps=40)
    assert plan.total == 40
    assert [plan.at(step) for step in range(1, 11)] == [planned(EXAMPLES).at(step) for step in range(1, 11)]
    assert plan.at(40)[0] >= 2
