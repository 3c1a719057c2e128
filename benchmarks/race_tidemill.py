"""Our side of the learning race: `tidemill train`, one turn per step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.race_common import GROUP_SIZE, PROMPTS, Evaluator, RaceSettings, prompts_key
from benchmarks.race_plain import PlainLearner, Sampled
from benchmarks.race_tasks import Question, right_share
from benchmarks.turns import Turns, Work
from tidemill.config.schema import RunSpec
from tidemill.core.records import Prompt, StepMetrics, Trajectory, unpack_tokens
from tidemill.jobs.train import train
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import TRAINING_PURPOSE
from tidemill.trainer.policy import PolicyTrainer


def in_order(step: int, count: int, rows: Sequence[Any]) -> list[int]:
    """The run's `batch.sampler`: rows one after another."""
    return [((step - 1) * count + index) % len(rows) for index in range(count)]


def shares(prompt: str, completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """The run's reward."""
    return right_share(completion, answer, metadata["part"])


def tidemill_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: race (`RaceSettings`)."""
    race: RaceSettings = settings["race"]
    _hand_over_turns(turns, race)
    with tempfile.TemporaryDirectory() as folder:
        train(_spec(Path(folder), race))


def _spec(folder: Path, race: RaceSettings) -> RunSpec:
    task = race.found
    training, held_out = task.questions()
    _write(folder / "train.jsonl", training, task.part)
    _write(folder / "held_out.jsonl", held_out[:1], task.part)
    chosen: dict[str, Any] = {"batch": {"sampler": f"{__file__}:in_order"}, "trainer": {}}
    if not race.defaults:
        chosen["batch"]["microbatch_tokens"] = race.microbatch
        chosen["trainer"]["precision"] = "fp32"
    return RunSpec.model_validate(
        {
            "run": {"dir": folder / "run", "seed": race.seed},
            "model": {"source": str(task.start())},
            "task": {"kind": "file", "path": folder / "train.jsonl", "held_out_path": folder / "held_out.jsonl"},
            "scoring": {"rewards": [{"kind": "python", "function": f"{__file__}:shares"}]},
            "sampling": {"max_new_tokens": task.new_tokens},
            "batch": {"prompts": PROMPTS, "group_size": GROUP_SIZE, **chosen["batch"]},
            "optimizer": {"learning_rate": race.learning_rate},
            "trainer": {"steps": race.steps + 1, "threads": 1, **chosen["trainer"]},
            "eval": {"every_steps": 0, "prompts": 1},
            "checkpoint": {"every_steps": 0},
            "telemetry": {"live": False},
        }
    )


def _write(path: Path, questions: Sequence[Question], part: int) -> None:
    rows = ({"prompt": each.prompt, "answer": each.answer, "part": part} for each in questions)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _hand_over_turns(turns: Turns, race: RaceSettings) -> None:
    """Make the recorder wait for its turn after every step, and evaluate between the turns."""
    record_step, record_samples, finish_batch = Recorder.step, Recorder.samples, PolicyTrainer.finish_batch
    evaluator, plain = Evaluator(race.found), PlainLearner.of(race)
    trainers, batches = list[PolicyTrainer](), list[tuple[list[Any], list[Any]]]()

    def finish(self: PolicyTrainer, step: int) -> StepMetrics:
        trainers[:] = [self]
        return finish_batch(self, step)

    def samples(self: Recorder, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        record_samples(self, step, trajectories, prompts)
        if trajectories and trajectories[0].sample_id.purpose == TRAINING_PURPOSE:
            batches.append((list(trajectories), list(prompts)))

    def step(self: Recorder, metrics: StepMetrics) -> None:
        record_step(self, metrics)
        if metrics.step > 0:
            turns.stop_clock()
            (trajectories, prompts), values = batches.pop(), metrics.values
            notes = {
                "reward": values["reward_mean"],
                "grad_norm": values.get("grad_norm", 0.0),  # absent if no group has signal
                "prompts": prompts_key([each.text for each in prompts]),
                "completion_tokens": float(sum(each.completion_length for each in trajectories)),
                "groups_without_signal": values["groups_without_signal"],
            }
            samples = [_sampled(*pair) for pair in zip(trajectories, prompts, strict=True)]
            notes |= plain.notes(metrics.step, samples, trainers[0].model.state_dict())
            if race.evaluate_every and metrics.step % race.evaluate_every == 0:
                notes |= evaluator.accuracy(trainers[0].model.state_dict())
            work = Work(
                samples=len(trajectories),
                prompt_tokens=sum(each.prompt_length for each in trajectories),
                completion_tokens=0,  # in the notes: sampled lengths differ
            )
            turns.end(work, **notes)
        turns.begin()

    Recorder.step, Recorder.samples = step, samples  # type: ignore[method-assign]
    PolicyTrainer.finish_batch = finish  # type: ignore[method-assign]


def _sampled(trajectory: Trajectory, prompt: Prompt) -> Sampled:
    tokens = unpack_tokens(trajectory.token_ids)
    return Sampled(
        prompt_ids=tokens[: trajectory.prompt_length],
        completion_ids=tokens[trajectory.prompt_length :],
        answer=prompt.answer or "",
    )
