"""What holds for every task, size, seed and step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.char_codec import CharCodec
from tidemill.config.task import ArithmeticTask, FileTask
from tidemill.core.records import Prompt
from tidemill.data.build_task import build_task
from tidemill.data.prompts import ListedSource, Task, renderer, text_item

RENDER = renderer(CharCodec(), chat_template=False)
SEEDS = st.integers(0, 2**63)


def listed(size: int, batch_prompts: int, seed: int) -> ListedSource:
    items = [text_item(f"q{number}", "") for number in range(size)]
    return ListedSource(items, [], batch_prompts=batch_prompts, seed=seed, render=RENDER)


def ids(batch: list[tuple[int, Prompt]]) -> list[tuple[int, str]]:
    return [(epoch, prompt.prompt_id) for epoch, prompt in batch]


@given(size=st.integers(1, 40), batch_prompts=st.integers(1, 24), seed=SEEDS, first=st.integers(1, 200))
def test_a_resumed_run_draws_the_same_prompts(size: int, batch_prompts: int, seed: int, first: int) -> None:
    uninterrupted = listed(size, batch_prompts, seed)
    seen = [ids(uninterrupted.train_batch(step)) for step in range(1, first + 3)]
    resumed = listed(size, batch_prompts, seed)
    assert [ids(resumed.train_batch(step)) for step in range(first, first + 3)] == seen[first - 1 :]


@given(size=st.integers(1, 40), batch_prompts=st.integers(1, 24), seed=SEEDS)
def test_an_epoch_has_every_prompt_once_with_unique_sample_ids(size: int, batch_prompts: int, seed: int) -> None:
    source = listed(size, batch_prompts, seed)
    steps = -(-3 * size // batch_prompts)
    pairs = [pair for step in range(1, steps + 1) for pair in ids(source.train_batch(step))]
    assert len(set(pairs)) == len(pairs)
    for epoch in range(3):
        assert len([pair for pair in pairs if pair[0] == epoch]) == size


@given(batch_prompts=st.integers(1, 16), extra=st.integers(0, 40), seed=SEEDS)
def test_no_batch_repeats_a_prompt_if_the_data_has_two_batches(batch_prompts: int, extra: int, seed: int) -> None:
    source = listed(2 * batch_prompts + extra, batch_prompts, seed)
    for step in range(1, 12):
        batch = source.train_batch(step)
        assert len({prompt.prompt_id for _, prompt in batch}) == batch_prompts


@given(
    operators=st.sampled_from(["+", "-", "*", "+-", "+*", "+-*"]),
    digits=st.sampled_from([1, 3, 6]),
    shots=st.integers(0, 8),
    fraction=st.floats(0.05, 0.9),
    seed=SEEDS,
)
@settings(max_examples=25)
def test_no_training_problem_or_its_commuted_form_is_held_out(
    operators: str, digits: int, shots: int, fraction: float, seed: int
) -> None:
    task = build_arithmetic(operators, digits, shots, fraction, seed)
    held_out = {kind(prompt) for prompt in task.source.held_out()}
    trained = {kind(prompt) for step in range(1, 16) for _, prompt in task.source.train_batch(step)}
    assert trained
    assert held_out
    assert not trained & held_out
    shown = {kind_of(line.partition("=")[0]) for line in task.longest.text.split("\n")[:-1]}
    assert len(shown) == shots
    assert not shown & (trained | held_out)


def build_arithmetic(operators: str, digits: int, shots: int, fraction: float, seed: int) -> Task:
    config = ArithmeticTask(operators=operators, digits=digits, shots=shots, held_out_fraction=fraction)
    return build_task(config, codec=CharCodec(), batch_prompts=16, seed=seed, chat_template=False)


def kind(prompt: Prompt) -> tuple[str, int, int]:
    return kind_of(prompt.text.rpartition("\n")[2][:-1])


def kind_of(question: str) -> tuple[str, int, int]:
    (operator,) = set(question) & set("+-*")
    left, right = map(int, question.split(operator))
    return (operator, left, right) if operator == "-" else (operator, min(left, right), max(left, right))


@given(numbers=st.lists(st.integers(0, 15), min_size=4, max_size=40), seed=SEEDS)
@settings(max_examples=30)
def test_repeated_lines_never_leak_and_the_seed_keeps_the_split(numbers: list[int], seed: int) -> None:
    numbers = [*numbers, 16, 17]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": str(n % 3)}) + "\n" for n in numbers))
        tasks = [
            build_task(
                FileTask(kind="file", path=path), codec=CharCodec(), batch_prompts=3, seed=s, chat_template=False
            )
            for s in (seed, seed + 1)
        ]
    held_out = [prompt.text for prompt in tasks[0].source.held_out()]
    assert held_out == [prompt.text for prompt in tasks[1].source.held_out()]
    trained = {prompt.text for step in range(1, 20) for _, prompt in tasks[0].source.train_batch(step)}
    assert not trained & set(held_out)
    assert trained | set(held_out) == {f"q{n}" for n in numbers}
