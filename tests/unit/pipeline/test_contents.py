from __future__ import annotations

from pathlib import Path

import xxhash

from tests.config_issues import issues_of
from tests.pretend_stages import pipeline
from tidemill.pipeline.stage_plan import content_digest, contents_of


def test_the_digest_of_a_file_depends_on_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    # For a single file: its relative path ".", its size, its bytes.
    assert content_digest(tmp_path / "a", where="w") == xxhash.xxh3_128(b".\x005\x00hello").hexdigest()
    (tmp_path / "b").write_bytes(b"hello")
    assert content_digest(tmp_path / "b", where="w") == content_digest(tmp_path / "a", where="w")
    (tmp_path / "b").write_bytes(b"hellp")
    assert content_digest(tmp_path / "b", where="w") != content_digest(tmp_path / "a", where="w")


def test_the_digest_of_a_folder_depends_on_names_and_bytes_of_visible_files(tmp_path: Path) -> None:
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
    (tmp_path / "one" / ".hidden").write_text("another program's cache")
    assert content_digest(tmp_path / "one", where="w") == plain


def test_a_missing_file_is_reported_with_its_stage(tmp_path: Path) -> None:
    text = (
        '[[stage]]\nname = "first"\nkind = "export"\nmodel.source = "char"\n'
        '[[stage]]\nname = "second"\nkind = "eval"\ntask = { kind = "file", path = "nowhere.jsonl" }\n'
    )
    stages = pipeline(tmp_path, text).stages
    (issue,) = issues_of(lambda: contents_of(stages))
    assert issue.key == f"task.path: {tmp_path / 'nowhere.jsonl'}"
    assert issue.what == "no such file or folder"
    assert issue.source == "stage second"
    (tmp_path / "nowhere.jsonl").write_text("{}")
    found = contents_of(stages)
    assert found == {
        "first": {},
        "second": {"task.path": content_digest(tmp_path / "nowhere.jsonl", where="w")},
    }
