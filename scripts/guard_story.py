"""Tell in ten lines what the guard of a run did: of a run, or of the stage `hacked` of a recipe.

python scripts/guard_story.py runs/demo-hack
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tidemill.pipeline.state import PipelineFolder


def story(run: Path) -> list[str]:
    """From the events, metrics and summary of a run that the guard returned to a checkpoint.

    Raises:
        SystemExit: it did not.
    """
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    decision = next((event for event in events if event["event"] == "guard"), None)
    if decision is None or decision["action"] != "rollback":
        raise SystemExit(f"{run}: the guard returned to no checkpoint")
    before = events[: events.index(decision)]
    summary = json.loads((run / "summary.json").read_text())
    amendment = json.loads((run / "amendments.jsonl").read_text().splitlines()[0])["amend"]
    disputed = [json.loads(line) for line in (run / "disputed.jsonl").read_text().splitlines()]
    gold = [event for event in before if event["event"] == "gold"]
    scored = sum(event["pairs"] for event in gold)
    found = [event["greedy_accuracy"] for event in events if event["event"] == "evaluation"]
    worst = min(event["greedy_accuracy"] for event in before if event["event"] == "evaluation")
    (proxy_before, proxy_after), (gold_before, gold_after) = decision["proxy"], decision["gold"]
    onset = f"After step {decision['step']} the guard decided ({decision['test']} test), and dated the onset to step"
    example: dict[str, Any] = disputed[0] if disputed else {"prompt": "", "completion": "", "reward": 0.0, "gold": 0.0}
    text = f"{example['prompt']}{example['completion'].strip()}"
    return [
        f"1. The model starts with {found[0]:.0%} of the held-out sums right. Its reward has a flaw.",
        f"2. While the reward rose from {proxy_before:.2f} to {proxy_after:.2f},",
        f"3. the second opinion on {scored} samples fell from {gold_before:.2f} to {gold_after:.2f},",
        f"4. and held-out accuracy to {worst:.0%}. One of {len(disputed)} disputed samples (disputed.jsonl):",
        f"5.    {text}   reward {example['reward']:.2f}, gold {example['gold']:g}",
        f"6. {onset} {decision['onset']}.",
        f"7. The run returned to {_place(decision['target'])}, and applied {_changes(amendment)}.",
        f"8. It then trained {summary['steps'] - decision['target']} more steps with the amended reward.",
        f"9. Held-out accuracy at the end: {found[-1]:.0%}.",
        f"10. Abandoned steps: {run.name}/abandoned/1. Curves: {run.name}/report.html",
    ]


def _place(target: int) -> str:
    return f"the checkpoint of step {target}" if target else "the initial model"


def _changes(amendment: dict[str, Any]) -> str:
    weights = [
        f"weight {value:g} of the reward {name!r}" for name, value in amendment.get("reward_weights", {}).items()
    ]
    others = [f"{name} = {value:g}" for name, value in amendment.items() if name != "reward_weights"]
    return ", ".join([*weights, *others])


def main(argv: list[str]) -> int:
    folder = PipelineFolder(Path(argv[0]))
    stages = [folder.stages / each for each, stage in folder.found().items() if stage.name == "hacked"]
    print("\n".join(story(stages[0] if stages else folder.path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
