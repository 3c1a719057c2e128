"""Supervised stages in separate processes.

    main() with run FOLDER KIND      one session; exit code as of `tidemill train`
    main() with killed FOLDER KIND   an undisturbed run, and one killed (-9) repeatedly

The second prints the digests of both final weights and the number of kills.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.killed_lives import killed_until_done
from tidemill.cli.output import INTERRUPTED_CODE
from tidemill.config.schema import RunSpec
from tidemill.jobs.train_supervised import train_supervised
from tidemill.trainer.objectives import SupervisedKind

STEPS = 24
DEADLINE_S = 100.0


def write_data(path: Path) -> Path:
    """Write sums as demonstrations and as pairs; rejected answers are off by one."""
    rows = [
        {"prompt": f"{a}+{b}=", "completion": f"{a + b}\n", "chosen": f"{a + b}\n", "rejected": f"{a + b + 1}\n"}
        for a in range(8)
        for b in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(directory: Path, data: Path, **sections: dict[str, Any]) -> RunSpec:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": directory, "name": "small"},
        "model": {"source": "char", "char": {"hidden_size": 32, "layers": 2, "heads": 2, "context": 32}},
        "data": {"path": data},
        "supervised": {"epochs": 0, "minibatch_tokens": 60, "microbatch_tokens": 30, "evaluate_every_steps": 4},
        "trainer": {"steps": STEPS, "threads": 1},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine"},
        "checkpoint": {"every_steps": 2},
        "telemetry": {"live": False},
    }
    names = {*base, *sections}
    return RunSpec.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in names})


def session(directory: Path, data: Path, kind: SupervisedKind, **sections: dict[str, Any]) -> dict[str, Any]:
    with (directory.parent / "view.txt").open("a") as view:
        return train_supervised(spec_of(directory, data, **sections), kind, telemetry_stream=view)


def newest(directory: Path) -> int:
    return max((int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*")), default=0)


def killed(folder: Path, kind: SupervisedKind) -> None:
    data, began = write_data(folder / "data.jsonl"), time.monotonic()
    calm = session(folder / "calm", data, kind)
    per_step_s = (time.monotonic() - began) / STEPS
    kills = killed_until_done(
        lambda: session(folder / "wild", data, kind),
        newest=lambda: newest(folder / "wild"),
        pause_s=per_step_s,
        until_s=began + DEADLINE_S,
    )
    wild = session(folder / "wild", data, kind)
    assert wild["already_finished"]
    sys.stdout.write(f"{calm['weights_digest']} {wild['weights_digest']} {kills}\n")


def main() -> int:
    torch.set_num_threads(1)
    verb, where, what = sys.argv[1:]
    if verb == "killed":
        killed(Path(where), what)  # type: ignore[arg-type]
        return 0
    endless = {"trainer": {"steps": 100_000}}
    summary = session(Path(where) / "run", write_data(Path(where) / "data.jsonl"), what, **endless)  # type: ignore[arg-type]
    return INTERRUPTED_CODE if summary["interrupted"] else 0
