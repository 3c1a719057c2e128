"""TRL's side of the learning race: its `GRPOTrainer`, one turn per step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.race_common import GROUP_SIZE, PROMPTS, Evaluator, RaceSettings, prompts_key
from benchmarks.race_plain import PlainLearner, Sampled
from benchmarks.race_tasks import right_share
from benchmarks.turns import Turns, Work


class WatchedTrainer(GRPOTrainer):
    """Keeps what the turns report of the last batch."""

    generated: tuple[list[list[int]], list[list[int]]] = ([], [])
    asked: list[str]
    answers: list[str]
    rewards: list[float]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generated = [list(ids) for ids in prompt_ids], [list(ids) for ids in generated[0]]
        return generated


class TakeTurns(TrainerCallback):
    """One optimizer step per turn: from before its generation to after its update; evaluates between the turns."""

    def __init__(self, turns: Turns, race: RaceSettings) -> None:
        self._turns, self._race = turns, race
        self._evaluator, self._plain = Evaluator(race.found), PlainLearner.of(race)
        self.trainer: WatchedTrainer | None = None
        self.grad_norm = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._turns.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._turns.stop_clock()
        trainer, race = self.trainer, self._race
        assert trainer is not None
        prompt_ids, completion_ids = trainer.generated
        groups = [trainer.rewards[at : at + GROUP_SIZE] for at in range(0, len(trainer.rewards), GROUP_SIZE)]
        notes = {
            "reward": sum(trainer.rewards) / len(trainer.rewards),
            "grad_norm": self.grad_norm,
            "prompts": prompts_key(trainer.asked),
            "completion_tokens": float(sum(map(len, completion_ids))),
            "groups_without_signal": float(sum(len(set(group)) == 1 for group in groups)),
        }
        samples = [
            Sampled(prompt_ids=prompt, completion_ids=completion, answer=answer)
            for prompt, completion, answer in zip(prompt_ids, completion_ids, trainer.answers, strict=True)
        ]
        notes |= self._plain.notes(state.global_step, samples, trainer.model.state_dict())
        if race.evaluate_every and state.global_step % race.evaluate_every == 0:
            notes |= self._evaluator.accuracy(trainer.model.state_dict())
        work = Work(samples=len(completion_ids), prompt_tokens=sum(map(len, prompt_ids)), completion_tokens=0)
        self._turns.end(work, **notes)


def trl_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: race (`RaceSettings`)."""
    race: RaceSettings = settings["race"]
    task = race.found
    model = AutoModelForCausalLM.from_pretrained(task.start(), dtype=torch.float32)
    questions = task.questions()[0]
    rows = {"prompt": [each.prompt for each in questions], "answer": [each.answer for each in questions]}
    callback = TakeTurns(turns, race)

    def shares(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        rewards = [right_share(text, right, task.part) for text, right in zip(completions, answer, strict=True)]
        assert callback.trainer is not None
        callback.trainer.asked, callback.trainer.answers, callback.trainer.rewards = prompts, answer, rewards
        return [*rewards]

    chosen: dict[str, Any] = {"per_device_train_batch_size": PROMPTS, "gradient_accumulation_steps": GROUP_SIZE}
    if not race.defaults:
        chosen = {
            "per_device_train_batch_size": race.microbatch,
            "gradient_accumulation_steps": PROMPTS * GROUP_SIZE // race.microbatch,
            "bf16": False,
            "gradient_checkpointing": False,  # on by default; off is faster
            "lr_scheduler_type": "constant",
            "loss_type": "grpo",
        }
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=race.seed,
            use_cpu=True,
            num_generations=GROUP_SIZE,
            max_completion_length=task.new_tokens,
            learning_rate=race.learning_rate,
            shuffle_dataset=False,
            max_steps=race.steps + 1,
            logging_steps=race.steps + 1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **chosen,
        )
        trainer = WatchedTrainer(
            model=model,
            args=config,
            reward_funcs=shares,
            train_dataset=Dataset.from_dict(rows),
            processing_class=AutoTokenizer.from_pretrained(task.start()),
            callbacks=[callback],
        )
        callback.trainer = trainer
        clip = trainer.accelerator.clip_grad_norm_

        def clip_and_note(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            callback.grad_norm = float(norm)
            return norm

        trainer.accelerator.clip_grad_norm_ = clip_and_note
        trainer.train()
