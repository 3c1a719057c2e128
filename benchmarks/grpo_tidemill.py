"""Our side of the GRPO step: `tidemill train` with ledger, metrics and samples on disk.

One turn is one step of the training loop, from opening a batch to the line in metrics.jsonl.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import Turns, Work
from tidemill.config.schema import RunSpec
from tidemill.core.records import Prompt, StepMetrics, Trajectory
from tidemill.jobs.train import train
from tidemill.models.codec import TextCodec
from tidemill.telemetry.recorder import Recorder
from tidemill.trainer.policy import PolicyTrainer

REWARD = Path(__file__).with_name("varied_reward.py")
MANY_STEPS = 10_000  # the turns decide when it ends


def tidemill_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: model (folder), prompts (texts), group_size, new_tokens, bf16; optional: algorithm, reward, batch
    (keys of `[batch]`)."""
    _hand_over_turns(turns)
    with tempfile.TemporaryDirectory() as folder:
        train(_spec(Path(folder), settings))


def _spec(folder: Path, settings: Mapping[str, Any]) -> RunSpec:
    _write_prompts(folder / "prompts.jsonl", settings["prompts"])
    _write_prompts(folder / "held_out.jsonl", ["0+0="])
    task = {"kind": "file", "path": folder / "prompts.jsonl", "held_out_path": folder / "held_out.jsonl"}
    return RunSpec.model_validate(
        {
            "run": {"dir": folder / "run"},
            "model": {"source": settings["model"]},
            "task": task,
            "scoring": {"rewards": [{"kind": "python", "function": settings.get("reward", f"{REWARD}:varied_reward")}]},
            "sampling": {"max_new_tokens": settings["new_tokens"]},
            "batch": {
                "prompts": len(settings["prompts"]),
                "group_size": settings["group_size"],
                **settings.get("batch", {}),
            },
            "trainer": {"steps": MANY_STEPS, "threads": 1, "precision": "bf16" if settings["bf16"] else "fp32"},
            "algorithm": settings.get("algorithm", {}),
            "eval": {"every_steps": 0, "prompts": 1},
            "checkpoint": {"every_steps": 0},
            "telemetry": {"live": False},
        }
    )


def _write_prompts(path: Path, prompts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts))


def _hand_over_turns(turns: Turns) -> None:
    """Make the recorder wait for its turn after every step, and prevent early stops (equal work)."""
    record_step, record_samples, add_microbatch = Recorder.step, Recorder.samples, PolicyTrainer._add_microbatch
    done: list[Work] = []
    microbatches = 0

    def counted(self: PolicyTrainer, *arguments: Any, **more: Any) -> None:
        nonlocal microbatches
        microbatches += 1
        add_microbatch(self, *arguments, **more)

    def step(self: Recorder, metrics: StepMetrics) -> None:
        nonlocal microbatches
        record_step(self, metrics)
        if metrics.step > 0:
            notes = {name: metrics.values[name] for name in ("tokens_packed", "groups_without_signal", "grad_norm")}
            turns.end(done[-1], microbatches=microbatches, **notes)
        microbatches = 0
        turns.begin()

    def samples(self: Recorder, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        record_samples(self, step, trajectories, prompts)
        done.append(
            Work(
                samples=len(trajectories),
                prompt_tokens=sum(trajectory.prompt_length for trajectory in trajectories),
                completion_tokens=sum(trajectory.completion_length for trajectory in trajectories),
            )
        )

    Recorder.step, Recorder.samples = step, samples  # type: ignore[method-assign]
    PolicyTrainer._add_microbatch = counted  # type: ignore[method-assign]
    TextCodec.stop_token_ids = property(lambda self: (), lambda self, ids: None)  # type: ignore[assignment]
