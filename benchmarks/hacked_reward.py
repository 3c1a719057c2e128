"""What the reward guard sees in the run of `@hacked`, and in the same run with a reward without the flaw.

    python -m benchmarks.hacked_reward

The guard only warns here, so that both runs train to their end. The result has the evidence of each step, from which
`docs/explore/reward-hacking.md` shows where other limits of the guard's tests stop them.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from tidemill.controller.entries import Judged, decode
from tidemill.core.evidence import Evidence
from tidemill.jobs.journal import SqliteJournal
from tidemill.telemetry.jsonl import read_lines

DEADLINE_S = 1800.0


HONEST = '[{ kind = "exact" }, { kind = "numeric", role = "gold", weight = 0.0, name = "gold" }]'
RUNS: dict[str, list[str]] = {"flawed": [], "honest": ["--stage.hacked.scoring.rewards", HONEST]}
"""Options beside those of the recipe."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed(parser)
    runs = {name: _run(options) for name, options in RUNS.items()}
    for name, run in runs.items():
        print(f"{name}: accuracy {run['accuracy']}")
        for decision in run["decisions"]:
            print(f"  step {decision['step']}, onset {decision['onset']}, {decision['test']}: {decision['reason']}")
    print(f"written: {write_result('hacked_reward', {'runs': runs})}")
    return 0


def _run(options: list[str]) -> dict[str, Any]:
    """Evidence of each step, share of right answers by step, decisions, and accuracy on held-out problems by step."""
    with tempfile.TemporaryDirectory(prefix="tidemill-hacked-") as folder:
        run = Path(folder) / "run"
        command = ["train", "@hacked", "--run.dir", str(run), "--stage.hacked.guard.action", "warn", *options]
        subprocess.run([sys.executable, "-m", "tidemill", *command], check=True, timeout=DEADLINE_S)
        (stage,) = (path for path in (run / "stages").iterdir() if path.name.startswith("hacked-"))
        evidence = asyncio.run(_evidence(stage))
        metrics = [line for _, line in read_lines(stage / "metrics.jsonl")]
        events = [line for _, line in read_lines(stage / "events.jsonl")]
    names = ("step", "onset", "test", "action", "reason")
    return {
        "exact": {
            # Of a single reward the metrics have no components.
            str(line["step"]): line.get("reward/exact", line["reward_mean"])
            for line in metrics
            if "reward_mean" in line
        },
        "evidence": [msgspec.json.encode(each).decode() for each in evidence],  # a line each: there are 600 pairs
        "decisions": [{name: line[name] for name in names} for line in events if line["event"] == "guard"],
        "accuracy": {str(line["step"]): line["greedy_accuracy"] for line in events if line["event"] == "evaluation"},
    }


async def _evidence(run: Path) -> list[Evidence]:
    """Of every step, also of those before a decision."""
    journal = await SqliteJournal.open(run / "ledger.sqlite")
    try:
        entries: list[Any] = [decode(blob, step) for step, blob in await journal.load()]
    finally:
        await journal.close()
    by_step = {entry.evidence.step: entry.evidence for entry in entries if isinstance(entry, Judged)}
    return [by_step[step] for step in sorted(by_step)]


if __name__ == "__main__":
    sys.exit(main())
