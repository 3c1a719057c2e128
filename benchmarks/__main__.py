"""Every benchmark whose results are published, one after another; hours on a quiet machine.

    python -m benchmarks [--only WORDS]

Ends with the commands that missed an aim or failed. Those of vLLM (`engine_parity`, `vllm_ranks`) and of GPUs (`gpu`)
need other machines and are not among them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from benchmarks.stopping import INTERRUPTED_CODE, children_take_ctrl_c, sigterm_as_ctrl_c

COMMANDS = (
    "standard_runs",
    "generation",
    "grpo_step",
    "learning_race",
    "learning_race --defaults --seeds 3",
    "race_replay",
    "matrix_rate",
    "microbatches",
    "batch_shapes",
    "demo_accuracy",
    "demo_compare --again",
    "controller_scale",
    "controller_scale --turns 4",
    "length_prediction",
    "deploy_render",
    "memory_forecast",
    "simulator",
    "simulator.windows",
    "simulator.tail",
    "simulator.fleet_size",
    "simulator.when_it_pays",
    "goodput --hours 2 --orders",
    "sick_machines",
    "guard_cost",
    "watch",
    "watch_pages",
    "documentation",
    "weights",
    "weights_threads",
    "weights_digest",
    "weights_node",
    "shards",
    "loading",
    "lora",
    "algorithms --again",
    "staleness --again",
    "rlhf --again --seeds 6",
    "equivalence",
    "migration",
    "overlap",
    "overlap_scoring",
    "tail_runs",
    "pinned_versions",
    "critic_placement",
    "rewards",
    "user_advantage",
    "agents --again",
    "guard --make --act",
    "hacked_reward",
    "sandbox",
    "gateway",
    "robot_learning",
    "control",
    "planted_robot_faults",
    "chunks",
    "planted_deploy_faults",
    "cluster",
)
STOPPING_S = 120.0  # for an interrupted benchmark to end its own processes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the commands that contain this")
    only, missed = parser.parse_args().only, list[str]()
    for command in (each for each in COMMANDS if only in each):
        print(f"python -m benchmarks.{command}", flush=True)
        code = run(["-m", *f"benchmarks.{command}".split()])
        if code == INTERRUPTED_CODE:
            return code
        missed += [f"python -m benchmarks.{command}"] if code else []
    if missed:
        print("missed an aim, or failed:", *missed, sep="\n  ", file=sys.stderr)
    return int(bool(missed))


def run(arguments: list[str]) -> int:
    """The exit code of Python with these arguments. An interrupt is passed on, and ends what does not end by itself."""
    with children_take_ctrl_c():
        process = subprocess.Popen([sys.executable, *arguments], start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


if __name__ == "__main__":
    try:
        with sigterm_as_ctrl_c():
            sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
