from __future__ import annotations

from pathlib import Path

from tidemill.core.folders import another_directory


def test_the_hint_for_another_run_names_a_free_directory(tmp_path: Path) -> None:
    for name in ("sft", "sft-2"):
        (tmp_path / name).mkdir()
    assert another_directory(tmp_path / "sft") == f"choose another --run.dir, such as {tmp_path / 'sft-3'}"
