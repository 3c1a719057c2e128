"""Runs the Python blocks of a page one after another as one main program, each with a limit on its time.

The arguments are a file with all blocks and the line at which each begins. The limit is CPU time of this process, so
that other tests beside it change nothing; a block that waits for something has a longer deadline.
"""

from __future__ import annotations

import ast
import faulthandler
import itertools
import signal
import sys
import types
from pathlib import Path
from typing import NoReturn

BLOCK_CPU_S = 120.0
BLOCK_DEADLINE_S = 600.0


def main() -> None:
    file, *starts = sys.argv[1:]
    sys.argv = [file]
    sys.path.insert(0, str(Path(file).parent.absolute()))
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module  # where functions of a script are looked for
    signal.signal(signal.SIGPROF, too_long)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"), file)
    for first, end in itertools.pairwise([*map(int, starts), sys.maxsize]):
        block = ast.Module([node for node in tree.body if first <= node.lineno < end], [])
        faulthandler.dump_traceback_later(BLOCK_DEADLINE_S, exit=True)
        signal.setitimer(signal.ITIMER_PROF, BLOCK_CPU_S)
        exec(compile(block, file, "exec"), vars(module))
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()


def too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"a block used {BLOCK_CPU_S:g} s of CPU time; shorten it, or give a reason not to run it")
