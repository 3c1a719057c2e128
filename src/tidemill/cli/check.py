"""`tidemill check RUN`: shows samples of a run and asks a person for verdicts, which the run's guard reads."""

from __future__ import annotations

import getpass
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tidemill.cli.output import Json, Result, note, printable
from tidemill.config.load import from_toml
from tidemill.config.task import ScoringConfig
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, decimal, percent
from tidemill.guard.checks import Agreement, Candidate, agreement, candidates, chosen
from tidemill.guard.verdicts import Verdict, VerdictFiles, append_verdict, run_id_of, text_digest
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample
from tidemill.telemetry.statistics import Interval

KEYS = "y good, n bad, a number from 0 to 1, r show the reward, s skip, q quit"
WORDS = {"y": 1.0, "yes": 1.0, "n": 0.0, "no": 0.0}


def check(
    run_dir: Annotated[Path, Parameter(name="RUN_DIR")],
    /,
    *,
    n: Annotated[int, Parameter(name="--n", help="Number of samples.")] = 20,
    show_reward: Annotated[
        bool, Parameter(name="--show-reward", negative=(), help="Show the reward before the verdict.")
    ] = False,
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
    run_id = run_id_of(run.read_manifest(), run_dir)
    stored = run.read_config()
    scoring = from_toml(stored, source=str(run.config)).scoring if stored else ScoringConfig()
    gold = [name for name, reward in zip(scoring.names, scoring.rewards, strict=True) if reward.role == "gold"]
    found = candidates(run, gold)
    if not found:
        what = "no samples with a valid reward"
        raise UserError(what, where=str(run.samples), hint="wait for the first step, or set telemetry.samples_per_step")
    verdicts = VerdictFiles(run.checks, run_id, warn=note).new_verdicts()
    asked = chosen(found, {verdict.sample for verdict in verdicts}, n)
    if json:
        return Result(data={"checks": str(run.checks), "samples": [_to_judge(each, run_id) for each in asked]})
    name = who or _user()
    for at, candidate in enumerate(asked, 1):
        note(f"\n── {at} of {len(asked)} · step {candidate.sample.step} ──\n{_shown(candidate.sample)}")
        if show_reward:
            note(_reward(candidate))
        answer = _answer(candidate)
        if answer == "quit":
            break
        if isinstance(answer, float):
            verdict = Verdict(**_identity(candidate, run_id), verdict=answer, who=name, unix_s=time.time())
            append_verdict(run.checks, verdict)
            verdicts.append(verdict)
            note(_reward(candidate))
    if not asked:
        note("all samples have a verdict")
    figures = agreement(verdicts, [each.reward for each in found])
    return Result(data=figures.data, text=_summary(figures))


def _answer(candidate: Candidate) -> float | str:
    """The verdict, "skip" or "quit"."""
    while True:
        sys.stderr.write(f"{KEYS} > ")
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        word = line.strip().lower()
        if not line or word in ("q", "quit"):
            return "quit"
        if word in ("s", "skip"):
            return "skip"
        if word == "r":
            note(_reward(candidate))
        elif (verdict := WORDS.get(word, _number(word))) is not None and 0 <= verdict <= 1:
            return verdict


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without users
        return "unknown"


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


def _identity(candidate: Candidate, run_id: str) -> dict[str, Any]:
    """The fields of a verdict that do not depend on the person."""
    sample = candidate.sample
    return {
        "run_id": run_id,
        "step": sample.step,
        "prompt_id": sample.prompt_id,
        "epoch": sample.epoch,
        "index": sample.index,
        "completion": text_digest(sample.completion),
        "reward": candidate.reward,
    }


def _to_judge(candidate: Candidate, run_id: str) -> dict[str, Any]:
    """A sample for another tool; to `line` it adds `verdict`, `who` and `unix_s`."""
    sample = candidate.sample
    return {
        "prompt": sample.prompt,
        "messages": [{"role": each.role, "content": each.content} for each in sample.messages],
        "completion": sample.completion,
        "answer": sample.answer,
        "chosen_for": candidate.stratum,
        "line": _identity(candidate, run_id),
    }


def _summary(found: Agreement) -> str:
    if not found.verdicts:
        return "no verdicts"
    lines = [f"{counted(found.verdicts, 'verdict')}; people accept {_share(found.accepted)}"]
    for name, share in (("a high", found.accepted_of_high), ("a low", found.accepted_of_low)):
        if share.value == share.value:  # not NaN: there are such samples
            lines.append(f"of those with {name} reward they accept {_share(share)}")
    lines.append(f"reward and people agree on {_share(found.agree)} of these samples, which are no random choice")
    return "\n".join(lines)


def _share(share: Interval) -> str:
    return f"{percent(share.value)} (95 %: {percent(share.low)} to {percent(share.high)})"
