"""Print a held-out episode of an agent before and after RL: of a run, or of the stage `rl` of a recipe.

    python scripts/agent_episodes.py runs/demo-agents/guess

The task is the first one that failed before.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.events import EVICTION, read_events
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample, read_samples

HELD_OUT = "eval-held_out"
"""Purpose of held-out samples in file names."""
MARK = re.compile(r"<\|.*?\|>(?:assistant|user|system)?")
"""Marks of a chat template around messages."""


def main(argv: Sequence[str]) -> int:
    folder = PipelineFolder(Path(argv[0]))
    stages = [folder.stages / each for each, stage in folder.found().items() if stage.name == "rl"]
    run = RunDirectory(stages[0] if stages else folder.path)
    files = {step: path for step, purpose, path in run.sample_files() if purpose == HELD_OUT}
    before, after = (read_samples(files[step]) for step in (min(files), max(files)))
    evictions = sum(event["event"] == EVICTION for event in read_events(run.events))
    print(f"\n{folder.path.name}: {len(before)} held-out tasks, {evictions} evictions")
    task = next((number for number, sample in enumerate(before) if not sample.reward), 0)
    for when, samples in (("before", before), (f"after {max(files)} steps", after)):
        right = sum(sample.reward == 1 for sample in samples)
        print(f"\n{when}: {right / len(samples):.0%} right. One episode, reward {samples[task].reward:g}:")
        print(episode(samples[task]))
    return 0


def episode(sample: Sample) -> str:
    """The task and the turns, one line for each text."""
    task = [line for line in MARK.sub("", sample.prompt).splitlines() if line.strip()][-1]
    lines = [f"    task    {task}"]
    for turn in sample.turns:
        lines.append(f"    policy  {_line(turn.text)}")
        lines.append(f"    answer  {_line(turn.observation)}")
    return "\n".join(line for line in lines if line.split(maxsplit=1)[1:])


def _line(text: str) -> str:
    return " ".join(MARK.sub("", text).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
