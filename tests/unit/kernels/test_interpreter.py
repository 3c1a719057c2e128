from __future__ import annotations

from pathlib import Path

from tests.triton_interpreter import run_cases


def test_kernels_in_the_interpreter() -> None:
    files = sorted(Path(__file__).parent.glob("*_cases.py"))
    assert [file.name for file in files] == ["decode_cases.py", "draw_cases.py", "head_cases.py"]
    run_cases(*files)
