"""What the reward guard saw in the run of `@hacked`, which here only warns, so that it trains to its end.

    python -m benchmarks.hacked_reward

The result has the evidence of each step, from which `docs/explore/reward-hacking.md` shows where other limits of the
guard's tests would have stopped the run.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed(parser)
    with tempfile.TemporaryDirectory(prefix="tidemill-hacked-") as folder:
        run = Path(folder) / "run"
        command = ["train", "@hacked", "--run.dir", str(run), "--stage.hacked.guard.action", "warn"]
        subprocess.run([sys.executable, "-m", "tidemill", *command], check=True, timeout=DEADLINE_S)
        (stage,) = (path for path in (run / "stages").iterdir() if path.name.startswith("hacked-"))
        evidence = asyncio.run(_evidence(stage))
        metrics = [line for _, line in read_lines(stage / "metrics.jsonl")]
        events = [line for _, line in read_lines(stage / "events.jsonl")]
    names = ("step", "onset", "test", "action", "reason")
    content = {
        "exact": {str(line["step"]): line["reward/exact"] for line in metrics if "reward/exact" in line},
        "evidence": [msgspec.to_builtins(each) for each in evidence],
        "decisions": [{name: line[name] for name in names} for line in events if line["event"] == "guard"],
        "accuracy": {str(line["step"]): line["greedy_accuracy"] for line in events if line["event"] == "evaluation"},
    }
    for decision in content["decisions"]:
        print(f"step {decision['step']}, onset {decision['onset']}, {decision['test']}: {decision['reason']}")
    print(f"written: {write_result('hacked_reward', content)}")
    return 0


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
