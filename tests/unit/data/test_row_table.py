"""Several sources with weights, large files that stay on disk, and hub data sets."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.char_codec import CharCodec
from tests.unit.data.data_files import FORMATS, write
from tidemill.config.task import DataConfig, FileTask
from tidemill.core.errors import UserError
from tidemill.data.build_task import build_task
from tidemill.data.examples import load_demonstrations
from tidemill.data.prompts import Task
from tidemill.data.row_files import JsonLines
from tidemill.data.row_table import INDEX_FOLDER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(codec: CharCodec | None = None, *, batch: int = 6, **settings: Any) -> Task:
    config = FileTask.model_validate({"kind": "file", **settings})
    return build_task(config, codec=codec or CharCodec(), batch_prompts=batch, seed=3, chat_template=False)


def rows(count: int, name: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{number}", "answer": f"a{number}", "level": number} for number in range(count)]


def steps(task: Task, count: int) -> list[list[tuple[int, str]]]:
    return [[(epoch, prompt.text) for epoch, prompt in task.source.train_batch(step)] for step in range(1, count)]


def test_each_step_takes_its_share_of_every_source(tmp_path: Path) -> None:
    files = [write(tmp_path, "jsonl", rows(size, name), name) for name, size in (("math", 90), ("code", 9))]
    weighted = [{"path": file, "weight": weight} for file, weight in zip(files, (2, 1), strict=True)]
    task = build(sources=weighted, held_out_fraction=0.1)
    shares = [Counter(text[:4] for _, text in step) for step in steps(task, 40)]
    assert all(3 <= each["math"] <= 5 for each in shares)  # 4 of 6
    assert sum((each["math"] for each in shares), 0) == pytest.approx(39 * 4, abs=2)
    assert {epoch for step in steps(task, 40) for epoch, text in step if text.startswith("math")} == {0, 1}
    assert task.description == "math.jsonl + code.jsonl"


def test_a_row_of_two_sources_is_used_once(tmp_path: Path) -> None:
    one, two = (write(tmp_path, "jsonl", rows(size), name) for name, size in (("one", 10), ("two", 20)))
    task = build(sources=[{"path": one}, {"path": two}], held_out_fraction=0.2)
    assert task.train_size + task.held_out_size == 20
    trained = {text for step in steps(task, 30) for _, text in step}
    assert not trained & {prompt.text for prompt in task.source.held_out()}


def test_sources_have_their_own_columns(tmp_path: Path) -> None:
    named = write(tmp_path, "jsonl", [{"question": f"n{number}", "answer": "1"} for number in range(8)], "named")
    plain = write(tmp_path, "jsonl", rows(8), "plain")
    task = build(sources=[{"path": plain}, {"path": named, "columns": {"prompt": "question"}}])
    assert {text[0] for step in steps(task, 9) for _, text in step} == {"q", "n"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"sources": [{"path": "a", "weight": 0}, {"path": "b", "weight": 0}]}, "weights of sources sum to zero"),
        ({"sources": [{"path": "a"}], "path": "b"}, "path and sources are both set"),
        ({}, "needs path"),
    ],
)
def test_contradictory_sources_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        build(**settings)


def test_a_source_without_rows_of_its_own_is_named(tmp_path: Path) -> None:
    one, two = (write(tmp_path, "jsonl", rows(10), name) for name in ("one", "two"))
    with pytest.raises(UserError, match="no training rows that other sources") as caught:
        build(sources=[{"path": one}, {"path": two}])
    assert caught.value.where == str(two)


@pytest.mark.parametrize("data_format", FORMATS)
def test_a_file_on_disk_gives_the_same_task_as_one_in_memory(tmp_path: Path, data_format: str, cache: Path) -> None:
    path = write(tmp_path, data_format, [*rows(50), *rows(5)])
    memory, disk = build(path=path), build(path=path, index_above_mb=0)
    assert (cache / INDEX_FOLDER).is_dir()
    assert (disk.digest, disk.train_size, disk.longest.tokens, disk.columns) == (
        *(memory.digest, memory.train_size, memory.longest.tokens, memory.columns),
    )
    for step in (1, 5, 20):
        assert disk.source.train_batch(step) == memory.source.train_batch(step)
    assert disk.source.held_out() == memory.source.held_out()


def test_demonstrations_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [{"prompt": f"q{n}", "completion": "c" * (1 + n % 7)} for n in range(40)])
    loaded = [
        load_demonstrations(
            DataConfig(path=path, index_above_mb=limit, max_tokens=8, too_long="drop"),
            codec=CharCodec(), context_limit=64, chat_template=False,
        )
        for limit in (256, 0)
    ]  # fmt: skip
    memory, disk = loaded
    assert (list(disk.train), list(disk.held_out)) == (list(memory.train), list(memory.held_out))
    assert (disk.digest, disk.dropped, disk.longest_tokens) == (memory.digest, memory.dropped, memory.longest_tokens)
    assert disk.order(batch=4, seed=1).train_batch(7) == memory.order(batch=4, seed=1).train_batch(7)


def test_an_index_is_used_again_until_file_or_tokenizer_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = list[Path]()
    values = JsonLines.values

    def counted(self: JsonLines) -> Iterator[tuple[int, int, Any]]:
        scans.append(self.path)
        return values(self)

    monkeypatch.setattr(JsonLines, "values", counted)
    path = write(tmp_path, "jsonl", rows(30))
    first, again = build(path=path, index_above_mb=0), build(path=path, index_above_mb=0)
    assert (len(scans), steps(again, 9)) == (1, steps(first, 9))

    class Doubling(CharCodec):
        def encode(self, text: str) -> list[int]:
            return super().encode(text) * 2

    assert build(Doubling(), path=path, index_above_mb=0).longest.tokens == 2 * first.longest.tokens
    assert len(scans) == 2
    write(tmp_path, "jsonl", rows(31))
    assert build(path=path, index_above_mb=0).digest != first.digest
    assert len(scans) == 3


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", rows(30))
    task = build(path=path, index_above_mb=0)
    path.write_text(path.read_text().replace("q", "p"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="changed while it was in use"):
        task.source.train_batch(1)


def test_an_invalid_row_of_a_large_file_is_named(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path, "jsonl", [*rows(3), {"answer": "none"}])
    with pytest.raises(UserError) as caught:
        build(path=path, index_above_mb=0)
    assert caught.value.where == f"{path}, line 4"
    assert not list((cache / INDEX_FOLDER).iterdir())


def test_a_damaged_index_is_written_again(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path, "jsonl", rows(30))
    digest = build(path=path, index_above_mb=0).digest
    (index,) = (cache / INDEX_FOLDER).glob("*.npy")
    index.write_bytes(index.read_bytes()[:200])
    assert build(path=path, index_above_mb=0).digest == digest


def test_a_hub_data_set_is_loaded_by_name_subset_split_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def load(name: str, subset: str | None, **wanted: Any) -> datasets.Dataset:
        asked.append((name, subset, wanted))
        return datasets.load_from_disk(str(write(tmp_path, "datasets", rows(20))))

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = build(path="hub:openai/gsm8k@abc/main#train[:50%]")
    assert asked[0] == ("openai/gsm8k", "main", {"split": "train[:50%]", "revision": "abc"})
    assert task.train_size + task.held_out_size == 20
    build(path="hub:openai/gsm8k")
    assert asked[-1] == ("openai/gsm8k", None, {"split": "train", "revision": None})
    with pytest.raises(UserError, match="not the name of a hub data set"):
        build(path="hub:gsm8k")


def test_a_hub_data_set_that_cannot_be_loaded_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: json.loads("{"))
    with pytest.raises(UserError, match="cannot be loaded: JSONDecodeError") as caught:
        build(path="hub:a/b")
    assert caught.value.where == "hub:a/b"
