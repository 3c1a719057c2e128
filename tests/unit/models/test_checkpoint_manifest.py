from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import xxhash

from tidemill.models.checkpoint_manifest import MANIFEST, damage, pinned, read_manifest, seal, unpinned


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "weights").write_bytes(b"abc" * 1000)
    (tmp_path / "inner" / "moments").write_bytes(b"")
    seal(tmp_path, step=7, score=0.5)
    return tmp_path


def test_a_manifest_names_every_file_with_size_and_checksum(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    assert (manifest.step, manifest.score, manifest.bytes) == (7, 0.5, 3000)
    assert set(manifest.files) == {"weights", "inner/moments"}
    assert manifest.files["weights"].xxh3_128 == xxhash.xxh3_128_hexdigest(b"abc" * 1000)
    assert damage(sealed) == ""


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a_score_that_is_not_finite_is_none(tmp_path: Path, score: float | None) -> None:
    assert seal(tmp_path, step=1, score=score).score is None
    assert read_manifest(tmp_path).score is None


def test_an_older_manifest_is_not_listed(sealed: Path) -> None:
    assert MANIFEST not in seal(sealed, step=8, score=None).files
    assert damage(sealed) == ""


def test_files_added_later_do_no_harm(sealed: Path) -> None:
    (sealed / "notes.txt").write_text("mine")
    assert damage(sealed) == ""


def test_a_missing_file_is_named(sealed: Path) -> None:
    (sealed / "inner" / "moments").unlink()
    assert "inner/moments" in damage(sealed)


def test_a_short_file_is_named_with_both_sizes(sealed: Path) -> None:
    (sealed / "weights").write_bytes(b"abc")
    assert damage(sealed) == "weights has 3 bytes instead of 3,000"


def test_a_flipped_byte_is_found(sealed: Path) -> None:
    (sealed / "weights").write_bytes(b"xbc" + b"abc" * 999)
    assert damage(sealed) == "weights does not match its checksum"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"step": 1}', b'{"files": {"\xe5": 1}}'])
def test_an_unreadable_manifest_is_damage(sealed: Path, data: bytes) -> None:
    (sealed / MANIFEST).write_bytes(data)
    assert MANIFEST in damage(sealed)


def test_a_changed_score_is_damage(sealed: Path) -> None:
    text = (sealed / MANIFEST).read_text()
    (sealed / MANIFEST).write_text(text.replace('"score": 0.5', '"score": 0.7'))
    assert MANIFEST in damage(sealed)


def test_no_manifest_is_damage(sealed: Path) -> None:
    (sealed / MANIFEST).unlink()
    assert MANIFEST in damage(sealed)


@pytest.mark.parametrize("block", [pinned, unpinned])
def test_without_a_manifest_an_error_of_the_block_is_raised_alone(
    block: Callable[[Path], AbstractContextManager[bool]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="mine") as caught, block(tmp_path):
        raise ValueError("mine")
    assert caught.value.__context__ is None


def test_a_newer_format_is_refused(sealed: Path) -> None:
    fields = json.loads((sealed / MANIFEST).read_text())
    (sealed / MANIFEST).write_text(json.dumps(fields | {"format": 2}))
    assert "format 2" in damage(sealed)
