"""Short runs through the command line: twice with equal weights; resumed, with an adapter, and with vLLM.

`benchmarks.gpu.runs` has those that need several GPUs, too.
"""

from __future__ import annotations

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings, Skip
from benchmarks.gpu.runs import COLOCATED, DEADLINE_S, RECIPE, RUNS, model_table, two_runs
from benchmarks.training_run import train

LORA = ("--model.lora.rank", "4")
MISMATCH_KL = 1e-3
"""Largest KL of trainer and engine in the last step: a target of the project; 8e-5 was measured on an H200."""


LIMIT = Limit("mismatch_kl", MISMATCH_KL, "engine and trainer compute the same policy")
REPEATED = Limit("differ", 0, "two equal runs have the same weights")
FIRST = "embedded, colocated"


def two_equal_runs(rows: CheckRows) -> None:
    with tempfile.TemporaryDirectory(prefix="tidemill-gpu-") as folder:
        _measure_twice(rows, Path(folder), FIRST)


def other_runs(rows: CheckRows) -> None:
    settings = rows.settings
    with tempfile.TemporaryDirectory(prefix="tidemill-gpu-") as name:
        folder = Path(name)
        rows.measure("resumed", partial(_resumed, settings, folder), [Limit("differ", 0, "the same weights")])
        rows.measure("adapter", partial(_adapter, settings, folder), [LIMIT, REPEATED])
        for row, (gpus, _) in RUNS.items():
            if row != FIRST and gpus == 1:
                _measure_twice(rows, folder, row)


def _measure_twice(rows: CheckRows, folder: Path, row: str) -> None:
    gpus, arguments = RUNS[row]
    cuda = rows.settings.device.type == "cuda"
    run = partial(_twice, folder, row, gpus, arguments, cuda=cuda, tiny=rows.settings.tiny)
    rows.measure(row, run, [LIMIT] if "vllm" in arguments else [LIMIT, REPEATED])


def _twice(*arguments: Any, cuda: bool, tiny: bool) -> dict[str, Any]:
    found = two_runs(*arguments, cuda=cuda, tiny=tiny)
    return {**found, "differ": int(not found["same_weights"])}


def _adapter(settings: Settings, folder: Path) -> Any:
    """Raises Skip: peft is missing."""
    if importlib.util.find_spec("peft") is None:
        raise Skip("peft is not installed")
    cuda = settings.device.type == "cuda"
    return _twice(folder, "adapter", 1, (*COLOCATED, *LORA), cuda=cuda, tiny=settings.tiny)


def _resumed(settings: Settings, folder: Path) -> dict[str, Any]:
    """A run of 2 + 2 steps against one of 4."""
    recipe = folder / "resumed.toml"
    tokens = 4 if settings.tiny else 32
    recipe.write_text(RECIPE.format(tokens=tokens, steps=4) + model_table(tiny=settings.tiny))
    common = COLOCATED if settings.device.type == "cuda" else (*COLOCATED, "--trainer.threads", "1")
    digests = {}
    for name, steps in (("parts", 2), ("parts", 4), ("whole", 4)):
        arguments = (*common, "--trainer.steps", str(steps), "--checkpoint.every_steps", "1")
        summary = train(recipe, folder / f"resumed-{name}", *arguments, progress=False, deadline_s=DEADLINE_S)
        digests[name] = summary["weights_digest"]
    return {"differ": int(digests["parts"] != digests["whole"]), "weights_digest": digests["whole"]}
