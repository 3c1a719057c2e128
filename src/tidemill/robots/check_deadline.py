#!/usr/bin/env python3
"""Check a bundle on the robot's computer: checksums, golden vectors, and the time of a decision.

    python check_deadline.py [FOLDER] [--decisions 5000] [--deadline-ms 2]

Needs numpy and onnxruntime only. `Controller` is also the reference of how to run the policy: it keeps the history of
observations, scales actions to targets, and uses the safe action when an observation is too old. Exit code 1: the
bundle is damaged, this runtime computes other actions, or the deadline is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

WARM_UP = 200  # decisions before the measurement
STALE_EVERY = 50  # every 50th observation is too old, and must be rejected
ROUNDS = 3  # other processes disturb a round, the policy's own time is in all of them


class Controller:
    """The policy of a bundle."""

    def __init__(self, folder: Path) -> None:
        self.deploy: dict[str, Any] = json.loads((folder / "deploy.json").read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._sessions = {
            name: onnxruntime.InferenceSession(str(folder / each["file"]), options, providers=["CPUExecutionProvider"])
            for name, each in self.deploy["policies"].items()
        }
        joints = self.deploy["joints"]
        order = [joint["name"] for joint in joints]
        self._rows = {
            name: [order.index(joint) for joint in each["joints"]] for name, each in self.deploy["policies"].items()
        }
        self._scale, self._offset = (np.array([joint[key] for joint in joints]) for key in ("scale", "offset"))
        self._lowest, self._highest = (np.array([joint[key] for joint in joints]) for key in ("lowest", "highest"))
        self.safe_targets = np.array(self.deploy["safe_action"]["targets"])
        self._history: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget the history: the first observation after this fills it."""
        self._history.clear()

    def decide(self, observations: dict[str, dict[str, Any]], *, age_ms: float) -> tuple[Any, bool]:
        """Targets of all joints, and whether the observation was new enough; if not, the targets are the safe action.

        Args:
            observations: values by group and term.
            age_ms: time since they were measured.
        """
        if not 0 <= age_ms <= self.deploy["max_observation_age_ms"]:
            self.reset()
            return self.safe_targets, False
        actions = self.actions(self.inputs(observations))
        return np.clip(self._offset + self._scale * actions, self._lowest, self._highest), True

    def inputs(self, observations: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What each policy reads, [1, D]: for every group the oldest observation first."""
        found = {}
        for name, policy in self.deploy["policies"].items():
            parts = []
            for group in policy["observations"]:
                given = observations[group["group"]]
                frame = np.concatenate([np.asarray(given[term["name"]], np.float32) for term in group["terms"]])
                key = f"{name}/{group['group']}"
                frames = [*self._history.get(key, [frame] * self.deploy["history"])[1:], frame]
                self._history[key] = frames
                parts += frames
            found[name] = np.concatenate(parts)[None]
        return found

    def actions(self, inputs: dict[str, Any]) -> Any:
        """Actions of all joints."""
        found = np.zeros(len(self._scale), np.float32)
        for name, session in self._sessions.items():
            found[self._rows[name]] = session.run(None, {session.get_inputs()[0].name: inputs[name]})[0][0]
        return found


def damaged(folder: Path) -> list[str]:
    """The files that differ from their checksum."""
    lines = [line.split("  ", 1) for line in (folder / "SHA256SUMS").read_text().splitlines()]
    return [
        name
        for digest, name in lines
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def largest_difference(controller: Controller, golden: dict[str, Any]) -> float:
    """Between the inputs, actions and targets here and those of the golden vectors, in units of actions."""
    controller.reset()
    largest = 0.0
    for step in golden["steps"]:
        inputs = controller.inputs(step["observations"])
        for name, expected in step["inputs"].items():
            if inputs[name].shape[1] != len(expected):
                return float("inf")
            largest = max(largest, float(np.abs(inputs[name][0] - expected).max()))
        largest = max(largest, float(np.abs(controller.actions(inputs) - step["actions"]).max()))
    controller.reset()
    for step in golden["steps"]:
        targets, _ = controller.decide(step["observations"], age_ms=0)
        largest = max(
            largest, float((np.abs(targets - step["targets"]) / np.maximum(np.abs(controller._scale), 1e-9)).max())
        )
    return largest


def measure(folder: Path, *, decisions: int, deadline_ms: float, own_time: bool = False) -> dict[str, Any]:
    """Time of a decision, from the observation to the targets, in up to three rounds; the best one counts.

    Args:
        own_time: judge the CPU time of a decision, not the wall time: on a machine with other work to do.
    """
    started_s = time.perf_counter()
    controller = Controller(folder)
    steps = [step["observations"] for step in json.loads((folder / "golden.json").read_text())["steps"]]
    controller.decide(steps[0], age_ms=0)
    cold_ms = 1e3 * (time.perf_counter() - started_s)
    for at in range(WARM_UP):
        controller.decide(steps[at % len(steps)], age_ms=0)
    too_old_ms = 1.5 * controller.deploy["max_observation_age_ms"]
    judged = "cpu_p99_9_ms" if own_time else "p99_9_ms"
    rounds: list[dict[str, float]] = []
    rejected = stale = 0
    while len(rounds) < ROUNDS and not any(each[judged] <= deadline_ms for each in rounds):
        times_ms, own_ms = [], []
        for at in range(decisions):
            is_stale = at % STALE_EVERY == STALE_EVERY - 1
            begun_ns, begun_own_ns = time.perf_counter_ns(), time.thread_time_ns()
            _, valid = controller.decide(steps[at % len(steps)], age_ms=too_old_ms if is_stale else 0)
            if is_stale:
                stale, rejected = stale + 1, rejected + (not valid)
            else:
                own_ms.append(1e-6 * (time.thread_time_ns() - begun_own_ns))
                times_ms.append(1e-6 * (time.perf_counter_ns() - begun_ns))
        names = ("p50_ms", "p99_ms", "p99_9_ms", "max_ms")
        wall, own = (np.percentile(each, [50, 99, 99.9, 100]).tolist() for each in (times_ms, own_ms))
        rounds.append(
            dict(zip(names, wall, strict=True)) | {f"cpu_{name}": each for name, each in zip(names, own, strict=True)}
        )
    best = min(rounds, key=lambda each: each[judged])
    return {
        "deadline_ms": deadline_ms,
        "judged": judged,
        "decisions": decisions,
        **best,
        "rounds": rounds,
        "cold_start_ms": cold_ms,
        "stale": stale,
        "stale_rejected": rejected,
        "met": bool(best[judged] <= deadline_ms and rejected == stale),
        "machine": f"{platform.system()} {platform.machine()}, onnxruntime {onnxruntime.__version__}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a bundle on the robot's computer.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--deadline-ms", type=float, default=0.0, help="default: of deploy.json")
    given = parser.parse_args()
    if given.decisions < STALE_EVERY or not (given.folder / "SHA256SUMS").is_file():
        parser.error(f"needs the folder of a bundle, and at least {STALE_EVERY} decisions")
    if names := damaged(given.folder):
        print(f"damaged: {', '.join(names)}; copy the bundle again")
        return 1
    controller = Controller(given.folder)
    golden = json.loads((given.folder / "golden.json").read_text())
    difference = largest_difference(controller, golden)
    print(f"golden vectors: {len(golden['steps'])} steps, largest difference {difference:.1e}")
    if not difference <= golden["tolerance"]:
        print(f"above {golden['tolerance']:g}: this runtime computes other actions")
        return 1
    deadline_ms = given.deadline_ms or controller.deploy["deadline_ms"]
    found = measure(given.folder, decisions=given.decisions, deadline_ms=deadline_ms)
    times = ", ".join(
        f"{name} {found[f'{key}_ms']:.3f}" for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p99_9"))
    )
    print(f"decision: {times} ms, deadline {deadline_ms:g} ms")
    print(f"observations too old: {found['stale_rejected']} of {found['stale']} rejected")
    if not found["met"]:
        print("missed: nothing else may run on this core, or the network is too large")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
