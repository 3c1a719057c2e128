#!/usr/bin/env python3
"""Check a bundle on the robot's computer: checksums, golden vectors, and the time of a decision.

    python check_deadline.py [FOLDER] [--decisions 5000] [--deadline-ms 2]

Needs numpy and onnxruntime only. `Controller` is also the reference of how to run the policy: it keeps the history of
observations and the previous actions, scales actions to targets, and uses the safe action when an observation is too
old. Exit code 1: the bundle is damaged, this runtime computes other actions, or the deadline is missed.
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

SHOWN = {"p50": "p50_ms", "p99": "p99_ms", "p99.9": "p99_9_ms"}


class Controller:
    """The policy of a bundle."""

    def __init__(self, folder: Path) -> None:
        self.deploy: dict[str, Any] = json.loads((folder / "deploy.json").read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        joints = {key: [joint[key] for joint in self.deploy["joints"]] for key in self.deploy["joints"][0]}
        self._rows, self._sessions = {}, {}
        for name, policy in self.deploy["policies"].items():
            file, providers = str(folder / policy["file"]), ["CPUExecutionProvider"]
            self._sessions[name] = onnxruntime.InferenceSession(file, options, providers=providers)
            self._rows[name] = [joints["name"].index(joint) for joint in policy["joints"]]
        self.scale, self._offset = np.array(joints["scale"]), np.array(joints["offset"])
        self._lowest, self._highest = np.array(joints["lowest"]), np.array(joints["highest"])
        self.safe_targets = np.array(self.deploy["safe_action"]["targets"])
        self.reset()

    def reset(self) -> None:
        """Forget the history, which the next observation fills, and the previous actions."""
        self._history: dict[str, Any] = {}
        self.previous_actions = np.zeros(len(self.scale), np.float32)  # of all joints, before scales and limits

    def decide(self, observations: dict[str, dict[str, Any]], *, age_ms: float) -> tuple[Any, bool]:
        """Targets of all joints, and whether the observation was new enough; if not, the safe action, and a reset.

        Args:
            observations: values by group and term.
            age_ms: time since they were measured.
        """
        if not 0 <= age_ms <= self.deploy["max_observation_age_ms"]:
            self.reset()
            return self.safe_targets, False
        self.previous_actions = self.actions(self.inputs(observations))
        return self.targets(self.previous_actions), True

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
        found = np.zeros(len(self.scale), np.float32)
        for name, session in self._sessions.items():
            found[self._rows[name]] = session.run(None, {session.get_inputs()[0].name: inputs[name]})[0][0]
        return found

    def targets(self, actions: Any) -> Any:
        return np.clip(self._offset + self.scale * actions, self._lowest, self._highest)


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
    differences = []
    for step in golden["steps"]:
        inputs = controller.inputs(step["observations"])
        for name, expected in step["inputs"].items():
            if inputs[name].shape[1] != len(expected):
                return float("inf")
            differences.append(np.abs(inputs[name][0] - expected).max())
        actions = controller.actions(inputs)
        of_targets = np.abs(controller.targets(actions) - step["targets"]) / np.maximum(np.abs(controller.scale), 1e-9)
        differences += [np.abs(actions - step["actions"]).max(), of_targets.max()]
    return float(np.max(differences))


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
        times_ms = []
        for at in range(decisions):
            is_stale = at % STALE_EVERY == STALE_EVERY - 1
            begun_ns, begun_own_ns = time.perf_counter_ns(), time.thread_time_ns()
            _, valid = controller.decide(steps[at % len(steps)], age_ms=too_old_ms if is_stale else 0)
            own_ns, wall_ns = time.thread_time_ns() - begun_own_ns, time.perf_counter_ns() - begun_ns
            stale, rejected = stale + is_stale, rejected + (is_stale and not valid)
            if not is_stale:
                times_ms.append((1e-6 * wall_ns, 1e-6 * own_ns))
        wall, own = np.percentile(times_ms, [50, 99, 99.9, 100], axis=0).T.tolist()
        names = [f"{clock}{name}_ms" for clock in ("", "cpu_") for name in ("p50", "p99", "p99_9", "max")]
        rounds.append(dict(zip(names, wall + own, strict=True)))
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
    times = ", ".join(f"{name} {found[key]:.3f}" for name, key in SHOWN.items())
    print(f"decision: {times} ms, deadline {deadline_ms:g} ms")
    print(f"observations too old: {found['stale_rejected']} of {found['stale']} rejected")
    if not found["met"]:
        print("missed: nothing else may run on this core, or the network is too large")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
