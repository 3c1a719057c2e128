"""`tidemill check RUN`: shows samples of a run and asks a person for verdicts, which the run's guard reads."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tidemill.cli.output import Json, Result, note, printable
from tidemill.config.load import from_toml
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, decimal, percent
from tidemill.guard.checks import Candidate, agreement, candidates, chosen, read_pairs
from tidemill.guard.verdicts import Verdict, VerdictFiles, append_verdict, identity
from tidemill.scoring.builtin_rewards import reward_names
from tidemill.telemetry.run_data import NO_RUN
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample

KEYS = "y good, n bad, a number from 0 to 1, r show the reward, s skip, q quit"
NUMBER = re.compile(r"[01]|0?\.[0-9]+")
QUIT, SKIP = "quit", "skip"
ANSWERS: dict[str, float | str] = {
    "y": 1.0,
    "yes": 1.0,
    "n": 0.0,
    "no": 0.0,
    "s": SKIP,
    SKIP: SKIP,
    "q": QUIT,
    QUIT: QUIT,
}


def check(
    run_dir: Annotated[Path, Parameter(name="RUN_DIR")],
    /,
    *,
    n: Annotated[int, Parameter(name="--n", help="Number of samples.")] = 20,
    who: Annotated[str, Parameter(name="--who", help="Your name in the file; default: the user's.")] = "",
    json: Json = False,
) -> Result:
    """Judge samples of a run by hand. The run may be in progress: its guard counts each verdict as gold.

    Samples on which reward and gold disagree come first, then ones with a high, a low and a middle reward, newest
    first. Samples with a verdict are left out. Verdicts are appended to RUN_DIR/checks. Without a terminal, answers are
    read from standard input, one a line.

    With --json nothing is asked: the samples to judge are printed, for another tool that appends verdicts.

    Parameters
    ----------
    run_dir
        The directory given to `tidemill train` as --run.dir.
    """
    if n < 1:
        raise UserError("must be at least 1", where="--n")
    run = RunDirectory(run_dir)
    run_id = str(run.read_manifest().get("run_id", ""))
    if not run_id:
        raise UserError("no run there (no manifest.json)", where=str(run_dir), hint=NO_RUN)
    stored = run.read_config()
    rewards = from_toml(stored, source=str(run.config)).scoring.rewards if stored else ()
    gold = [name for name, reward in zip(reward_names(rewards), rewards, strict=True) if reward.role == "gold"]
    found = candidates(run, gold, read_pairs(run.ledger))
    if not found:
        what = "no samples with a valid reward"
        raise UserError(what, where=str(run.samples), hint="wait for the first step, or set telemetry.samples_per_step")
    verdicts = VerdictFiles(run.checks, run_id, warn=note).new_verdicts()
    asked = chosen(found, {verdict.sample for verdict in verdicts}, n)
    if json:
        return Result(data={"checks": str(run.checks), "samples": [_to_judge(each, run_id) for each in asked]})
    name = who or os.environ.get("USER", "unknown")
    for at, candidate in enumerate(asked, 1):
        note(f"\n── {at} of {len(asked)} · step {candidate.sample.step} ──\n{_shown(candidate.sample)}")
        answer = _answer(candidate)
        if answer == QUIT:
            break
        if isinstance(answer, float):
            seen = identity(candidate.sample, run_id, candidate.reward)
            verdict = Verdict(**seen, verdict=answer, who=name, unix_s=time.time())
            append_verdict(run.checks, verdict)
            verdicts.append(verdict)
            note(_reward(candidate))
    if not asked:
        note("all samples have a verdict")
    lines = [counted(len(verdicts), "verdict")]
    for name, share in agreement(verdicts, [each.reward for each in found]).items():
        lines.append(f"{name} {percent(share.value)} (95 %: {percent(share.low)} to {percent(share.high)})")
    return Result(text="\n".join(lines))


def _answer(candidate: Candidate) -> float | str:
    """The verdict, `SKIP` or `QUIT`; the end of the input is the latter."""
    while True:
        sys.stderr.write(f"{KEYS} > ")
        sys.stderr.flush()
        word = (sys.stdin.readline() or QUIT).strip().lower()
        if word == "r":
            note(_reward(candidate))
        elif word in ANSWERS:
            return ANSWERS[word]
        elif NUMBER.fullmatch(word):
            return float(word)


def _shown(sample: Sample) -> str:
    """Prompt, turns and answer, without rewards."""
    parts = [(message.role, message.content) for message in sample.messages] or [("prompt", sample.prompt)]
    for number, turn in enumerate(sample.turns, 1):
        parts += [(f"turn {number}", turn.text), ("environment", turn.observation)]
    if not sample.turns:
        parts.append(("completion", sample.completion))
    if sample.answer is not None:
        parts.append(("reference answer", sample.answer))
    return "\n".join(f"[{author}]\n{printable(text.strip())}" for author, text in parts)


def _reward(candidate: Candidate) -> str:
    parts = ", ".join(f"{name} {decimal(value)}" for name, value in candidate.sample.components.items())
    return f"reward {decimal(candidate.reward)}" + (f" ({parts})" if parts else "")


def _to_judge(candidate: Candidate, run_id: str) -> dict[str, Any]:
    """A sample for another tool; to `line` it adds `verdict`, `who` and `unix_s`."""
    sample = candidate.sample
    return {
        "prompt": sample.prompt,
        "messages": msgspec.to_builtins(sample.messages),
        "completion": sample.completion,
        "answer": sample.answer,
        "chosen_for": candidate.stratum,
        "line": identity(candidate.sample, run_id, candidate.reward),
    }
