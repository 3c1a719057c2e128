"""CPU time of `tidemill deploy render`, the whole command, for the demo's recipe.

    python -m benchmarks.deploy_render [--rounds 9]

Every round is a process, whose documents must be those of the first.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed

COMMAND = (
    *(sys.executable, "-m", "tidemill", "deploy", "render", "@spot-trace"),
    *("--deploy.target=gke", "--deploy.image=registry/tidemill@sha256:0", "--deploy.queue=research"),
    *("--deploy.models=gs://bucket", "--deploy.service_account=trainer", "--deploy.secrets.HF_TOKEN=hub/token"),
)
ROUNDS = 9
TARGET_S = 0.6
DEADLINE_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parsed(parser).rounds
    seconds, documents = list[float](), set[bytes]()
    for _ in range(rounds):
        before = _children_cpu_s()
        documents.add(subprocess.run(COMMAND, capture_output=True, timeout=DEADLINE_S, check=True).stdout)
        seconds.append(_children_cpu_s() - before)
    if len(documents) > 1:
        raise RuntimeError("two rounds rendered different documents")
    median_s = statistics.median(seconds)
    print(f"median {median_s:.2f} CPU s of {rounds} ({min(seconds):.2f} to {max(seconds):.2f})")
    content = {
        "rounds": rounds,
        "cpu_s_median": median_s,
        "cpu_s_lowest": min(seconds),
        "cpu_s_highest": max(seconds),
        "lines": documents.pop().count(b"\n"),
        "target_s": TARGET_S,
        "reached": median_s <= TARGET_S,
    }
    write_result("deploy_render", content)
    return exit_code(content)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
