"""`tidemill check RUN`: shows samples of a run and asks a person for verdicts, which the run's guard reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tidemill.cli.output import Result, note, printable
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, decimal
from tidemill.guard.checks import CheckQueue, shown_parts
from tidemill.telemetry.sample_files import Sample

KEYS = "y good, n bad, a number from 0 to 1, s skip, q quit"
ANSWER = re.compile(r"[ynsq]|[01]|0?\.[0-9]+")
GOOD_OR_BAD = {"y": "1", "n": "0"}


def check(
    run_dir: Annotated[Path, Parameter(name="RUN_DIR")],
    /,
    *,
    n: Annotated[int, Parameter(name="--n", help="Number of samples.")] = 20,
) -> Result:
    """Judge samples of a run by hand. The run may be in progress: its guard counts each verdict as gold.

    Samples on which reward and gold disagree take turns with ones that have a high and a low reward, of all steps.
    Samples with a verdict are left out. Verdicts are appended to RUN_DIR/checks. Without a terminal, answers are read
    from standard input, one a line.

    Parameters
    ----------
    run_dir
        The directory given to `tidemill train` as --run.dir.
    """
    if n < 1:
        raise UserError("must be at least 1", where="--n")
    queue = CheckQueue(run_dir, warn=note)
    asked = queue.waiting()[:n]
    given = 0
    for at, sample in enumerate(asked, 1):
        note(f"\n── {at} of {len(asked)} · step {sample.step} ──\n{_shown(sample)}")
        answer = _answer()
        if answer == "q":
            break
        if answer != "s":
            queue.judge(sample, float(GOOD_OR_BAD.get(answer, answer)))
            note(f"its reward is {decimal(sample.reward)}")
            given += 1
    if not asked:
        note("all samples have a verdict")
    return Result(text=f"{counted(given, 'new verdict')}, {queue.judged} in all")


def _answer() -> str:
    """A line that `ANSWER` matches; the end of the input is `q`."""
    while True:
        sys.stderr.write(f"{KEYS} > ")
        sys.stderr.flush()
        word = (sys.stdin.readline() or "q").strip().lower()
        if ANSWER.fullmatch(word):
            return word


def _shown(sample: Sample) -> str:
    """Prompt, turns and answer, without rewards."""
    return "\n".join(f"[{author}]\n{printable(text.strip())}" for author, text in shown_parts(sample))
