from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from tests.pretend_stages import pipeline
from tidemill.config.issues import ConfigError
from tidemill.pipeline.stage_plan import content_digest, contents_of


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    # Of a single file: "." for its place below itself, its size, its bytes.
    assert content_digest(tmp_path / "a", where="w") == xxhash.xxh3_128(b".\x005\x00hello").hexdigest()
    (tmp_path / "b").write_bytes(b"hello")
    assert content_digest(tmp_path / "b", where="w") == content_digest(tmp_path / "a", where="w")
    (tmp_path / "b").write_bytes(b"hellp")
    assert content_digest(tmp_path / "b", where="w") != content_digest(tmp_path / "a", where="w")


def test_a_folder_is_the_names_and_bytes_of_what_is_in_it(tmp_path: Path) -> None:
    def made(name: str, **files: str) -> str:
        folder = tmp_path / name
        for path, text in files.items():
            file = folder / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return content_digest(folder, where="w")

    plain = made("one", a="1", sub__b="2")
    assert made("two", sub__b="2", a="1") == plain
    assert made("three", a="1", sub__c="2") != plain
    assert made("four", a="12", sub__b="") != plain
    (tmp_path / "one" / ".hidden").write_text("a cache of somebody's")
    assert content_digest(tmp_path / "one", where="w") == plain


def test_what_is_missing_is_named_with_its_stage(tmp_path: Path) -> None:
    text = (
        '[[stage]]\nname = "first"\nkind = "export"\nmodel.source = "char"\n'
        '[[stage]]\nname = "second"\nkind = "eval"\ntask = { kind = "jsonl", path = "nowhere.jsonl" }\n'
    )
    stages = pipeline(tmp_path, text).stages
    with pytest.raises(ConfigError) as caught:
        contents_of(stages)
    (fault,) = caught.value.faults
    path = tmp_path / "nowhere.jsonl"
    assert fault.line == f"task.path: {path}: no such file or folder (stage second); correct the path"
    (tmp_path / "nowhere.jsonl").write_text("{}")
    found = contents_of(stages)
    assert found == {
        "first": {},
        "second": {"task.path": content_digest(tmp_path / "nowhere.jsonl", where="w")},
    }
