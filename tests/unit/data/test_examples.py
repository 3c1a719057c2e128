"""From the [data] section to both sides and their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.char_codec import CharCodec
from tests.unit.data.data_files import FORMATS, write
from tidemill.config.task import DataConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Demonstration, PreferencePair, unpack_tokens
from tidemill.data.examples import Examples, load_demonstrations, load_pairs


def demonstrations(path: Path | None, *, context: int = 64, **settings: Any) -> Examples[Demonstration]:
    config = DataConfig.model_validate({"path": path, **settings})
    return load_demonstrations(config, codec=CharCodec(), context_limit=context, chat_template=False)


def pairs(path: Path, *, context: int = 64, **settings: Any) -> Examples[PreferencePair]:
    config = DataConfig.model_validate({"path": path, **settings})
    return load_pairs(config, codec=CharCodec(), context_limit=context, chat_template=False)


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(count)]


def texts(examples: Sequence[Demonstration]) -> list[str]:
    return [CharCodec().decode(unpack_tokens(example.prompt_ids)) for example in examples]


@pytest.mark.parametrize("data_format", FORMATS)
def test_every_format_gives_the_same_examples(tmp_path: Path, data_format: str) -> None:
    made = demonstrations(write(tmp_path, data_format, rows(20)))
    reference = demonstrations(write(tmp_path, "jsonl", rows(20), "reference"))
    assert (made.train, made.held_out, made.digest) == (reference.train, reference.held_out, reference.digest)
    assert len(made.train) + len(made.held_out) == 20
    # "question 19" and "answer 19" and the end token
    assert made.longest_tokens == 11 + 9 + 1


def test_a_text_is_learned_from_its_second_token_on(tmp_path: Path) -> None:
    made = demonstrations(write(tmp_path, "jsonl", [{"text": f"a text {number}"} for number in range(20)]))
    assert len(made.held_out) > 0  # no text is the question of another one
    codec, example = CharCodec(), made.train[0]
    assert codec.decode(unpack_tokens(example.prompt_ids)) == "a"
    assert codec.decode(unpack_tokens(example.completion_ids)[:-1]).startswith(" text ")
    assert unpack_tokens(example.completion_ids)[-1] in codec.stop_token_ids


def test_rows_added_or_moved_leave_the_others_on_their_side(tmp_path: Path) -> None:
    short = demonstrations(write(tmp_path, "jsonl", rows(40), "short"), held_out_fraction=0.25)
    long = demonstrations(write(tmp_path, "jsonl", rows(80)[::-1], "long"), held_out_fraction=0.25)
    assert set(short.train) < set(long.train)
    assert set(short.held_out) < set(long.held_out)
    assert short.digest != long.digest


def test_completions_of_one_prompt_are_on_one_side_and_repeated_rows_count_once(tmp_path: Path) -> None:
    several = [{"prompt": f"q{number}", "completion": side} for number in range(20) for side in ("a", "b", "a")]
    made = demonstrations(write(tmp_path, "jsonl", several), held_out_fraction=0.5)
    assert len(made.train) + len(made.held_out) == 40
    assert not set(texts(made.train)) & set(texts(made.held_out))
    assert "20 repeated" in made.description
    assert made.left_out == {"repeated": 20}


def test_pairs_of_one_prompt_are_on_one_side(tmp_path: Path) -> None:
    made = pairs(
        write(tmp_path, "jsonl", [{"prompt": f"q{n}", "chosen": "a", "rejected": r} for n in range(9) for r in "bc"]),
        held_out_fraction=0.4,
    )
    sides = [{pair.prompt_ids for pair in side} for side in (made.train, made.held_out)]
    assert not sides[0] & sides[1]
    assert len(made.train) == 2 * len(sides[0])


def test_all_rows_may_be_learned_from(tmp_path: Path) -> None:
    made = demonstrations(write(tmp_path, "jsonl", rows(5)), held_out_fraction=0)
    assert (len(made.train), made.held_out) == (5, ())


def test_an_evaluation_file_may_be_of_another_format(tmp_path: Path) -> None:
    held_out = write(tmp_path, "parquet", [{"prompt": "question  1", "completion": "other"}], "held_out")
    made = demonstrations(write(tmp_path, "jsonl", rows(3)), held_out_path=held_out)
    assert sorted(texts(made.train)) == ["question 0", "question 2"]
    assert texts(made.held_out) == ["question  1"]
    assert "1 kept for evaluation" in made.description


LONG = {"prompt": "q", "completion": "x" * 30}  # 1 + 30 + the end token = 32


def test_rows_too_long_are_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [*rows(3), LONG, {**LONG, "completion": "y" * 31}])
    with pytest.raises(UserError) as caught:
        demonstrations(path, context=31, held_out_fraction=0)
    assert caught.value.what == (
        "2 rows are longer than 31 tokens with prompt and completion: "
        f"{path}, line 4, 32 tokens; {path}, line 5, 33 tokens"
    )
    assert 'data.too_long = "drop"' in caught.value.hint
    assert demonstrations(path, context=33, held_out_fraction=0).longest_tokens == 33


def test_rows_too_long_are_dropped_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [*rows(3), LONG])
    made = demonstrations(path, max_tokens=31, too_long="drop", held_out_fraction=0)
    assert (len(made.train), made.dropped) == (3, 1)
    assert f"1 longer than 31 tokens ({path}, line 4, 32 tokens)" in made.description


def test_the_longer_side_of_a_pair_counts(tmp_path: Path) -> None:
    sides = [{"prompt": "q", "chosen": "a", "rejected": "b" * 8}, {"prompt": "r", "chosen": "a" * 9, "rejected": "b"}]
    made = pairs(write(tmp_path, "jsonl", sides), too_long="drop", max_tokens=10, held_out_fraction=0)
    assert made.dropped == 1  # 1 + 9 + 1 = 11
    assert made.longest_tokens == 10  # 1 + 8 + 1


def test_many_long_rows_are_not_all_named(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{**LONG, "prompt": f"q{number}"} for number in range(9)])
    with pytest.raises(UserError, match="9 rows are longer than 10 tokens") as caught:
        demonstrations(path, max_tokens=10)
    assert caught.value.what.endswith("; 6 more")


def test_nothing_left_is_refused_even_when_dropping(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training data is left"):
        demonstrations(write(tmp_path, "jsonl", rows(4)), max_tokens=5, too_long="drop", held_out_fraction=0)


def test_more_than_the_model_can_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="65 tokens exceed the model's limit of 64") as caught:
        demonstrations(write(tmp_path, "jsonl", rows(4)), max_tokens=65)
    assert caught.value.where == "data.max_tokens"


def test_without_a_path_the_key_is_named() -> None:
    with pytest.raises(UserError, match="is not set, but this stage needs a data file") as caught:
        demonstrations(None)
    assert caught.value.where == "data.path"


def test_one_question_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be split") as caught:
        demonstrations(write(tmp_path, "jsonl", rows(1)))
    assert "data.held_out_path" in caught.value.hint


def test_the_order_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    made = demonstrations(write(tmp_path, "jsonl", rows(10)), held_out_fraction=0)
    moved = demonstrations(write(tmp_path, "jsonl", rows(10)[::-1], "moved"), held_out_fraction=0)
    order = made.order(batch=4, seed=3)
    taken = [order.train_batch(step) for step in range(1, 6)]
    # Five steps of four are twice ten examples: each once an epoch.
    assert [epoch for batch in taken for epoch, _ in batch] == [0] * 10 + [1] * 10
    assert {example for batch in taken for epoch, example in batch if epoch == 1} == set(made.train)
    # A resumed stage asks a new object for a later step; the order of the file is of no matter.
    assert moved.order(batch=4, seed=3).train_batch(4) == taken[3]
    assert made.order(batch=4, seed=4).train_batch(4) != taken[3]
