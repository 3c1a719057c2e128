"""Runs one check of a session in this process; `benchmarks.gpu.session` starts it.

python -m benchmarks.gpu.one_check MODULE:FUNCTION --rows FILE [--device cpu --tiny]
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.gpu.check_process import end_with_session
from benchmarks.gpu.check_rows import CheckRows, Settings


def main() -> int:
    parser = argparse.ArgumentParser(description="One check of a GPU session.")
    parser.add_argument("check", help="MODULE:FUNCTION")
    parser.add_argument("--rows", type=Path, required=True, help="file for the rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--interpret", action="store_true", help="compute kernels with Triton's interpreter")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    end_with_session()
    module, _, function = options.check.partition(":")
    check = getattr(importlib.import_module(module), function)
    check(CheckRows(options.rows, Settings(device_type=options.device, tiny=options.tiny)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
