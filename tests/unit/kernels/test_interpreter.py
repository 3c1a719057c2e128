from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_interpreter import run_cases

FILES = ("decode_cases.py", "draw_cases.py", "head_cases.py")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    run_cases(*(Path(__file__).with_name(name) for name in FILES))
