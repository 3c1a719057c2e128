"""TRL's side of the GRPO step: its trainer with its fastest settings here, doing equal work."""

from __future__ import annotations

import random
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

from benchmarks.turns import Turns, Work

MANY_STEPS = 10_000  # the turns decide when it ends


class CountingTrainer(GRPOTrainer):
    """Counts generated tokens, to check that both sides do the same work."""

    done = Work(samples=0, prompt_tokens=0, completion_tokens=0)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.done = Work(
            samples=len(prompt_ids),
            prompt_tokens=sum(len(ids) for ids in prompt_ids),
            completion_tokens=sum(len(ids) for ids in generated[0]),
        )
        return generated

    @property
    def groups_without_signal(self) -> float:
        """Of the last step: those whose rewards are all equal."""
        share = self._metrics["train"]["frac_reward_zero_std"][-1]
        return float(round(share * self.done.samples / self.num_generations))


class TakeTurns(TrainerCallback):
    """One optimizer step per turn: from before its generation to after its update."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.trainer: CountingTrainer | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._turns.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.trainer is not None
        self._turns.end(self.trainer.done, groups_without_signal=self.trainer.groups_without_signal)


def trl_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: model (folder), prompts (texts), group_size, new_tokens, bf16, microbatch (samples)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    prompts: list[str] = settings["prompts"]
    samples = len(prompts) * settings["group_size"]
    rewards = random.Random(0)

    def random_reward(completions: list[str], **_: Any) -> list[float | None]:
        return [rewards.random() for _ in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=settings["bf16"],
            gradient_checkpointing=False,  # on by default; off is faster
            per_device_train_batch_size=settings["microbatch"],
            gradient_accumulation_steps=samples // settings["microbatch"],
            num_generations=settings["group_size"],
            max_completion_length=settings["new_tokens"],
            generation_kwargs={"min_new_tokens": settings["new_tokens"]},  # no early end: equal work
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            max_steps=MANY_STEPS,
            logging_steps=MANY_STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        callback = TakeTurns(turns)
        trainer = CountingTrainer(
            model=model,
            args=config,
            reward_funcs=random_reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        callback.trainer = trainer
        trainer.train()
