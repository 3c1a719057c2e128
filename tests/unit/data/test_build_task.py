"""Tasks of prompts from files, and the faults JSON lines have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.char_codec import CharCodec
from tests.unit.data import data_files as files
from tests.unit.data.data_files import FORMATS, read_items
from tidemill.config.task import FileTask
from tidemill.core.errors import UserError
from tidemill.data.build_task import build_task
from tidemill.data.prompts import Task


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def build(path: Path, **settings: object) -> Task:
    config = FileTask.model_validate({"kind": "file", "path": path, **settings})
    return build_task(config, codec=CharCodec(), batch_prompts=2, seed=0, chat_template=False)


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"q{number}", "answer": f"a{number}"} for number in range(count)]


def training_texts(task: Task) -> list[str]:
    pairs = [pair for step in range(1, task.train_size + 1) for pair in task.source.train_batch(step)]
    return [prompt.text for epoch, prompt in pairs if epoch == 0]


@pytest.mark.parametrize("data_format", FORMATS)
def test_every_format_is_the_same_task(tmp_path: Path, data_format: str) -> None:
    asked = [{"prompt": f"q{number}", "answer": f"a{number}", "level": number} for number in range(12)]
    named = FileTask(kind="file", path=files.write(tmp_path, data_format, asked))
    task, reference = (
        build_task(config, codec=CharCodec(), batch_prompts=4, seed=0, chat_template=False)
        for config in (named, FileTask(kind="file", path=files.write(tmp_path, "jsonl", asked, "reference")))
    )
    assert task.digest == reference.digest
    assert task.source.train_batch(2) == reference.source.train_batch(2)  # metadata included
    assert task.source.held_out() == reference.source.held_out()


def test_a_codec_error_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", *rows(3), {"prompt": "a\tb", "answer": "c"})
    with pytest.raises(UserError, match="cannot express") as caught:
        build(path)
    assert caught.value.where == f"{path}, line 4"


def test_every_line_is_on_one_side(tmp_path: Path) -> None:
    task = build(write(tmp_path / "f.jsonl", *rows(40)), held_out_fraction=0.25)
    train, held_out = training_texts(task), [prompt.text for prompt in task.source.held_out()]
    assert sorted(train + held_out) == sorted(row["prompt"] for row in rows(40))
    assert (task.train_size, task.held_out_size) == (len(train), len(held_out))
    assert held_out


def test_lines_added_or_moved_leave_the_others_on_their_side(tmp_path: Path) -> None:
    short = build(write(tmp_path / "short.jsonl", *rows(40)), held_out_fraction=0.25)
    long = build(write(tmp_path / "long.jsonl", *rows(80)[::-1]), held_out_fraction=0.25)
    assert set(training_texts(short)) < set(training_texts(long))


def test_other_fields_are_metadata_and_numbers_are_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "f.jsonl",
        {"prompt": "q", "answer": 4, "level": {"n": [1, None]}},
        "",
        {"prompt": "r", "answer": 2.5},
    )
    first, second = read_items(path)
    assert (first.answer, first.metadata, first.where) == ("4", {"level": {"n": [1, None]}}, f"{path}, line 1")
    assert (second.answer, second.where) == ("2.5", f"{path}, line 3")  # the blank line is counted, not read


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "f.jsonl",
        *({"messages": [*messages[:1], {"role": "user", "content": c}], "answer": ""} for c in "ab"),
    )
    assert build(path).source.train_batch(1)[0][1].text in {
        "<system>short<user>a<assistant>",
        "<system>short<user>b<assistant>",
    }


def test_repeated_lines_are_used_once_and_reported(tmp_path: Path) -> None:
    task = build(write(tmp_path / "f.jsonl", *rows(10), *rows(3)))
    assert task.train_size + task.held_out_size == 10
    assert "3 repeated" in task.description


def test_questions_of_the_evaluation_file_are_taken_out_of_training(tmp_path: Path) -> None:
    held_out = write(tmp_path / "eval.jsonl", {"prompt": " q1  ", "answer": "another"}, {"prompt": "new", "answer": ""})
    task = build(write(tmp_path / "train.jsonl", *rows(5)), held_out_path=held_out)
    assert sorted(training_texts(task)) == ["q0", "q2", "q3", "q4"]
    assert sorted(prompt.text for prompt in task.source.held_out()) == [" q1  ", "new"]
    assert "1 kept for evaluation" in task.description


def test_the_longest_prompt_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", *rows(3), {"prompt": "x" * 500, "answer": ""})
    task = build(path)
    assert (task.longest_prompt_tokens, task.longest.where) == (500, f"{path}, line 4")


GOOD = '{"prompt": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "q", "answer": "a"', "broken JSON: Expecting ',' delimiter at column 30"),
        ("[1, 2]", "expected a JSON object, found list"),
        ("[" * 100_000, "broken JSON"),
        ('{"answer": "a"}', "either `prompt` or `messages`"),
        ('{"prompt": "q", "messages": [], "answer": "a"}', "either `prompt` or `messages`"),
        ('{"prompt": 3, "answer": "a"}', "`prompt` must be a non-empty text"),
        ('{"prompt": "  ", "answer": "a"}', "`prompt` must be a non-empty text"),
        ('{"messages": [], "answer": "a"}', "`messages` must be a non-empty list"),
        ('{"messages": "hi", "answer": "a"}', "`messages` must be a non-empty list"),
        ('{"messages": [{"role": "user"}], "answer": "a"}', "must have exactly the fields `role` and `content`"),
        ('{"messages": [{"role": "user", "content": 1}], "answer": "a"}', "must be non-empty texts"),
        ('{"prompt": "q", "answer": true}', "`answer` must be a text or a number"),
        ('{"prompt": "q", "answer": NaN}', "NaN is not JSON"),
        ('{"prompt": "\\ud800", "answer": "a"}', "not valid UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, fault: str) -> None:
    path = write(tmp_path / "f.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError) as caught:
        list(read_items(path))
    assert caught.value.where == f"{path}, line 3"
    assert fault in caught.value.what
    assert caught.value.hint


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + b'{"prompt": "\xff", "answer": ""}\n')
    with pytest.raises(UserError, match="line 2: not valid UTF-8"):
        list(read_items(path))


def test_windows_line_ends_and_byte_order_marks_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\r\n" + GOOD.encode() + b"\r\n")
    assert [item.answer for item in read_items(path)] == ["a", "a"]


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    for name, fault in (("none.jsonl", "No such file"), (".", "state.json"), ("empty.jsonl", "no rows")):
        with pytest.raises(UserError, match=fault):
            build(tmp_path / name)


def test_one_question_cannot_be_split(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", {"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "b"})
    with pytest.raises(UserError, match="cannot be split"):
        build(path)


def test_an_evaluation_file_that_swallows_all_training_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", *rows(2))
    with pytest.raises(UserError, match="no training data is left"):
        build(path, held_out_path=path)
