"""Generators of reasoning-gym, and what can be wrong with one."""

from __future__ import annotations

import random
import sys

import pytest

from tests.char_codec import CharCodec
from tidemill.config.task import ReasoningGymTask
from tidemill.core.errors import UserError
from tidemill.data import reasoning_gym as module
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task
from tidemill.data.reasoning_gym import answer_of

gym = pytest.importorskip("reasoning_gym")


def build(name: str = "simple_equations", *, seed: int = 0, chat_template: bool = False, **settings: object) -> Task:
    sizes = {"train_size": 30, "held_out_size": 10}
    config = ReasoningGymTask.model_validate({"kind": "reasoning_gym", "name": name, **sizes, **settings})
    return build_task(config, codec=CharCodec(), batch_prompts=6, seed=seed, chat_template=chat_template)


def test_sizes_are_met_and_sides_disjoint() -> None:
    task = build()
    trained = {prompt.text for step in range(1, 6) for _, prompt in task.source.train_batch(step)}
    held_out = {prompt.text for prompt in task.source.held_out()}
    assert (len(trained), len(held_out)) == (30, 10) == (task.train_size, task.held_out_size)
    assert not trained & held_out


def test_a_run_seed_orders_and_does_not_choose() -> None:
    first, second = build(seed=1), build(seed=2)
    assert first.digest == second.digest == build(seed=1).digest
    assert first.source.held_out() == second.source.held_out()
    assert first.source.train_batch(1) != second.source.train_batch(1)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>1</answer> or <answer> 2\n</answer>.", "2"),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("</answer>1<answer>", "</answer>1<answer>"),
        (" 3 \n", "3"),
        ("<answer>" * 100_000 + "4", "<answer>" * 100_000 + "4"),  # minutes if every tag searched for its end
    ],
)
def test_the_last_closed_answer_tag_counts(completion: str, answer: str) -> None:
    assert answer_of(completion) == answer


def test_the_prompts_do_not_depend_on_the_global_random_numbers() -> None:
    before = random.getstate()
    digest = build("list_functions").digest
    assert random.getstate() == before
    random.seed(99)
    assert build("list_functions").digest == digest
    random.setstate(before)


def test_a_system_prompt_precedes_the_question() -> None:
    plain = build(system_prompt="Be brief.").source.held_out()[0].text
    chat = build(system_prompt="Be brief.", chat_template=True).source.held_out()[0].text
    assert plain.startswith("Be brief.\n\n")
    assert chat.startswith("<system>Be brief.<user>")


def test_params_reach_the_generator() -> None:
    task = build("chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(len(prompt.metadata["difficulty"]["num_terms"]) == 2 for prompt in task.source.held_out())


@pytest.mark.parametrize(
    ("settings", "fault", "hint"),
    [
        ({"name": "simple_equation"}, "no generator 'simple_equation'", "simple_equations"),
        ({"name": "zzzzqq"}, "no generator", "chain_sum"),
        ({"params": {"max_term": 3}}, "max_term", "max_terms"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "rejects its parameters: AssertionError", "its parameters are"),
        (
            {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
            | {"train_size": 500},
            "too few different prompts",
            "lower task.train_size",
        ),
    ],
)
def test_errors_come_with_a_hint(settings: dict[str, object], fault: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        build(**settings)  # type: ignore[arg-type]
    assert fault in caught.value.what
    assert hint in caught.value.hint


def test_a_missing_extra_comes_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError) as caught:
        build()
    assert "needs the package reasoning-gym" in caught.value.what
    assert '"reasoning-gym>=' in caught.value.hint


class Generator:
    """A generator that makes `good` prompts and then fails."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, object]:
        if index >= self.good:
            raise IndexError("nothing left")
        return {"question": f"q{index}", "answer": "a", "metadata": {}}


def test_a_generator_that_fails_is_named_with_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_create", lambda config: Generator(3))
    with pytest.raises(UserError, match="simple_equations fails at prompt 3: IndexError: nothing left"):
        build()


def test_a_generator_that_takes_for_ever_is_given_up_between_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_create", lambda config: Generator(1000))
    monkeypatch.setattr(module, "GENERATION_TIMEOUT_S", -1)
    with pytest.raises(UserError, match="0 of 30 for training"):
        build()
