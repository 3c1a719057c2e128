"""Every benchmark whose results are published, one after another; hours on a quiet machine.

    python -m benchmarks [--only WORDS]

Ends with the commands that missed an aim or failed. Those of vLLM (`engine_parity`) and of GPUs (`gpu`) need other
machines and are not among them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

COMMANDS = (
    "generation",
    "grpo_step",
    "learning_race",
    "learning_race --defaults --seeds 3",
    "race_replay",
    "matrix_rate",
    "microbatches",
    "batch_shapes",
    "demo_accuracy",
    "controller_scale",
    "controller_scale --turns 4",
    "memory_forecast",
    "simulator",
    "simulator.windows",
    "simulator.fleet_size",
    "goodput --hours 2 --orders",
    "weights",
    "weights_threads",
    "weights_node",
    "shards",
    "lora",
    "algorithms --again",
    "staleness --again",
    "rlhf --again --seeds 6",
    "equivalence",
    "migration",
    "overlap",
    "overlap_scoring",
    "pinned_versions",
    "critic_placement",
    "user_advantage",
    "agents --again",
    "sandbox",
    "gateway",
)
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the commands that contain this")
    only, missed = parser.parse_args().only, list[str]()
    for command in (each for each in COMMANDS if only in each):
        print(f"python -m benchmarks.{command}", flush=True)
        done = subprocess.run([sys.executable, "-m", *shlex.split(f"benchmarks.{command}")], check=False)
        if done.returncode == INTERRUPTED:
            return INTERRUPTED
        missed += [f"python -m benchmarks.{command}"] if done.returncode else []
    if missed:
        print("missed an aim, or failed:", *missed, sep="\n  ", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
