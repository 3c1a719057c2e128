"""Runs a Python file as its main program: `tests/forked.py` calls it in place of an interpreter of its own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    file, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0], sys.path[0] = file, str(Path(file).parent.absolute())
    runpy.run_path(file, run_name="__main__")
