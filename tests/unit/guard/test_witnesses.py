from __future__ import annotations

import time
import zlib

import msgspec
import pytest

from tests.trajectories import agent_trajectory, trajectory
from tidemill.core.records import Call, Prompt, Reward, Trajectory
from tidemill.guard.witnesses import changes, of_texts, skeleton, witnesses

PROMPT = Prompt(prompt_id="p", token_ids=b"", text="2+3=", answer="5")


def sample(text: str, *, tokens: int = 3, components: dict[str, float] | None = None) -> tuple[Prompt, Trajectory]:
    made = trajectory([1], list(range(tokens)), 1.0)
    reward = Reward(value=1.0, components=components or {})
    return PROMPT, msgspec.structs.replace(made, text=text, reward=reward)


def test_figures_of_texts_by_hand() -> None:
    # Four texts: two are equal; three are a number and a line end.
    found = of_texts(["12\n", "12\n", "7\n", "none"])
    assert found["duplicates"] == 0.5
    assert found["format"] == 0.75
    joined = b"12\n\x1e12\n\x1e7\n\x1enone"
    assert found["compression"] == len(zlib.compress(joined, 1)) / len(joined)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", "a a a 9."),
        ("Die Lösung: 3,5", "a a: 9,9"),
        ("", ""),
        ("ab12cd", "a9a"),
        ("- x\n" * 100, "- a\n" * 20),
    ],
)
def test_a_skeleton_keeps_neither_words_nor_numbers(text: str, expected: str) -> None:
    assert skeleton(text) == expected


def test_a_figure_that_the_run_does_not_have_is_left_out() -> None:
    samples = [sample("5\n", tokens=2), sample("12\n", tokens=4)]
    assert set(witnesses(samples, {})) == {"length", "compression", "duplicates", "format"}
    found = witnesses(samples, {"entropy": 0.5, "approx_kl": 0.2})
    assert (found["length"], found["entropy"], found["kl"]) == (3.0, 0.5, 0.2)
    assert witnesses(samples, {"approx_kl": 0.2, "kl_ref": 1.5})["kl"] == 1.5
    assert witnesses([], {"entropy": 0.5}) == {}


def test_disagreement_is_one_minus_the_correlation_of_the_reward_models() -> None:
    scores = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0), (4.0, 8.0)]
    agreed = [sample("x", components={"one": one, "two": two}) for one, two in scores]
    opposed = [sample("x", components={"one": one, "two": -two}) for one, two in scores]
    names = ["one", "two"]
    assert witnesses(agreed, {}, reward_models=names)["disagreement"] == pytest.approx(0.0)
    assert witnesses(opposed, {}, reward_models=names)["disagreement"] == pytest.approx(2.0)
    assert "disagreement" not in witnesses(agreed, {}, reward_models=["one"])
    equal = [sample("x", components={"one": 1.0, "two": two}) for _, two in scores]
    assert "disagreement" not in witnesses(equal, {}, reward_models=names)


def test_calls_of_tools_are_counted_per_sample() -> None:
    made = agent_trajectory([1], [("action", [2]), ("observation", [3]), ("action", [4])], [0.0, 1.0])
    call = Call(call_id="c", name="calc", arguments="{}")
    first = msgspec.structs.replace(made.turns[0], calls=(call, call, call))
    calling = msgspec.structs.replace(made, turns=(first, *made.turns[1:]))
    # Three calls and none, of two samples.
    assert witnesses([(PROMPT, calling), (PROMPT, made)], {})["tool_calls"] == 1.5


@pytest.mark.parametrize(
    ("name", "start", "now", "is_moved"),
    [
        ("length", 4.0, 8.0, True),
        ("length", 4.0, 1.0, True),
        ("length", 4.0, 4.4, False),  # less than a quarter
        ("entropy", 0.5, 0.1, True),
        ("entropy", 0.5, 2.0, False),  # upwards is no sign of an exploit
        ("duplicates", 0.2, 0.9, True),
        ("unknown", 1.0, 9.0, False),
    ],
)
def test_a_witness_supports_an_alarm_once_it_has_left_its_start(
    name: str, start: float, now: float, is_moved: bool
) -> None:
    found = changes([{name: start}] * 8, [{name: now}] * 5)
    assert [(change.name, change.start, change.now) for change in found] == ([(name, start, now)] if is_moved else [])


def test_a_witness_that_was_never_steady_supports_nothing() -> None:
    # Mean 4, standard deviation 2: 4 + 4 * 2 = 12
    assert changes([{"length": 2.0}, {"length": 6.0}] * 4, [{"length": 11.0}] * 5) == []
    assert len(changes([{"length": 2.0}, {"length": 6.0}] * 4, [{"length": 13.0}] * 5)) == 1


def test_long_batches_cost_milliseconds() -> None:
    """At most 64 samples and 2,000 characters of each are read."""
    samples = [sample("word 17, " * 3000, tokens=8000)] * 1024
    start_s = time.process_time()
    found = witnesses(samples, {})
    assert time.process_time() - start_s < 0.2
    assert found["length"] == 8000
