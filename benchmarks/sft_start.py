"""The start of runs on two-digit addition: a small character model fine-tuned on a teacher with errors.

The teacher drops every carry in most demonstrations. The model learns both ways to add and uses the wrong one more
often: it can solve held-out sums but mostly does not, and rewards can teach it which way is right. All algorithms and
schedules start with the same weights.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from tidemill.config.load import merge
from tidemill.config.schema import RunSpec
from tidemill.config.task import ArithmeticTask
from tidemill.data.arithmetic import STOP, Problem, choose_shots, format_prompt, split_listed
from tidemill.jobs.train_supervised import train_supervised

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "benchmarks"
TASK = {"kind": "arithmetic", "operators": "+", "digits": 2, "shots": 0, "held_out_fraction": 0.25}
MODEL = {"source": "char", "char": {"alphabet": "0123456789+=\n", "hidden_size": 128, "layers": 2, "context": 16}}
COPIES = 4  # demonstrations of each training problem
LONGEST_MAKING_S = 3600.0
CARELESS = 0.7  # the share of them that drop the carries
SUPERVISED: dict[str, Any] = {
    "model": MODEL,
    "data": {"held_out_fraction": 0, "end_token": False},
    "supervised": {"epochs": 0, "minibatch_tokens": 1500, "microbatch_tokens": 500, "evaluate_every_steps": 0},
    "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.98], "warmup_steps": 50},
    "trainer": {"steps": 1000, "threads": 1},
    "checkpoint": {"every_steps": 0},
}
START: dict[str, Any] = {"task": TASK, "copies": COPIES, "careless": CARELESS, "supervised": SUPERVISED}
"""Everything that determines the start."""
LEARNING: dict[str, Any] = {
    "task": TASK,
    "scoring": {"rewards": [{"kind": "exact"}]},
    "sampling": {"max_new_tokens": 4},  # three digits and the line end
    "engine": {"slots": 256},
    # Two optimizer steps per batch: with one, all ratios are 1 and clipping has no effect.
    "batch": {"prompts": 16, "group_size": 8, "minibatches": 2},
    "trainer": {"threads": 1},
    "eval": {"every_steps": 5, "prompts": 256},
    "checkpoint": {"every_steps": 0},
    "telemetry": {"samples_per_step": 1},
}


def sft_start() -> Path:
    """The folder of the fine-tuned model; created on first use (two to three minutes of one core). Raises: as
    `fine_tuned`."""
    return fine_tuned("sft-start", SUPERVISED, demonstrations())


def fine_tuned(name: str, supervised: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Path:
    """The folder of a model that is fine-tuned on demonstrations, from the cache if it was made before.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
        filelock.Timeout: another process has been creating it for an hour.
    """
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    key = hashlib.blake2b((json.dumps(supervised) + lines).encode(), digest_size=6).hexdigest()
    folder = CACHE / f"{name}-{key}"
    if (made := _finished(folder / "run")) is not None:
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".making", timeout=LONGEST_MAKING_S):
        # Another benchmark may have created it while this one waited.
        return _finished(folder / "run") or _made(folder, supervised, lines)


def _made(folder: Path, supervised: Mapping[str, Any], lines: str) -> Path:
    path = folder / "demonstrations.jsonl"
    path.write_text(lines)
    here = {"run": {"dir": folder / "run"}, "data": {"path": path}}
    spec = RunSpec.model_validate(merge(dict(supervised), here))
    summary = train_supervised(spec, "sft", telemetry_stream=io.StringIO())
    if summary["interrupted"]:
        raise KeyboardInterrupt  # the run handled the signal; the next call resumes from its checkpoint
    return Path(summary["model"])


def _finished(run: Path) -> Path | None:
    """The finished run of an earlier call; it stays unchanged, so several benchmarks may start at once."""
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return run / "checkpoints" / Path(summary["model"]).name if summary.get("finished") else None


def demonstrations() -> list[dict[str, str]]:
    """The teacher's demonstrations of the training problems; deterministic."""
    task, dice = ArithmeticTask.model_validate(TASK), random.Random(0)
    shots = choose_shots(task)
    train, _ = split_listed(task, shots)
    return [
        {
            "prompt": format_prompt(shots, problem),
            "completion": (carryless(problem) if dice.random() < CARELESS else problem.answer) + STOP,
        }
        for problem in train
        for _ in range(COPIES)
    ]


def carryless(problem: Problem) -> str:
    """The sum digit by digit, each modulo 10: 47+85 is 22, not 132."""
    place, total = 1, 0
    left, right = problem.left, problem.right
    while left or right:
        total += place * ((left + right) % 10)
        place, left, right = 10 * place, left // 10, right // 10
    return str(total)


def learning_spec(start: Path, directory: Path, *, seed: int, steps: int, changes: dict[str, Any]) -> RunSpec:
    """A run that continues from `start` with `changes` to `LEARNING`."""
    here = {
        "run": {"dir": directory, "seed": seed},
        "model": {"source": str(start)},
        "trainer": {"steps": steps},
    }
    return RunSpec.model_validate(merge(merge(LEARNING, changes), here))
