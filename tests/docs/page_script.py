"""Runs the Python blocks of a page one after another as one main program, each with a deadline.

The arguments are a file with all blocks and the line at which each begins.
"""

from __future__ import annotations

import ast
import faulthandler
import itertools
import sys
import types
from pathlib import Path

BLOCK_DEADLINE_S = 120.0


def main() -> None:
    file, *starts = sys.argv[1:]
    sys.argv = [file]
    sys.path.insert(0, str(Path(file).parent.absolute()))
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module  # where functions of a script are looked for
    tree = ast.parse(Path(file).read_text(encoding="utf-8"), file)
    for first, end in itertools.pairwise([*map(int, starts), sys.maxsize]):
        block = ast.Module([node for node in tree.body if first <= node.lineno < end], [])
        faulthandler.dump_traceback_later(BLOCK_DEADLINE_S, exit=True)
        exec(compile(block, file, "exec"), vars(module))
    faulthandler.cancel_dump_traceback_later()
