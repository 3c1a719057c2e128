"""What both sides of the learning race share: settings and held-out accuracy."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.race_tasks import TASKS, RaceTask, right_share
from tidemill.models.auto import quiet

PROMPTS, GROUP_SIZE = 8, 8


@dataclass(frozen=True, kw_only=True)
class RaceSettings:
    """Of one side. `microbatch` is in tokens on our side and in samples on TRL's."""

    task: str
    seed: int
    steps: int
    learning_rate: float
    evaluate_every: int  # steps; 0: never
    microbatch: int
    defaults: bool = False  # everything but the task, the batch and the learning rate as the library has it
    replay: bool = False  # every step in plain torch, not only the gradient of the first

    @property
    def found(self) -> RaceTask:
        return next(task for task in TASKS if task.name == self.task)


class Evaluator:
    """A stock `transformers` model on which a side's weights are evaluated."""

    def __init__(self, task: RaceTask) -> None:
        self._task, folder = task, task.start()
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def accuracy(self, weights: Any) -> dict[str, float]:
        """Shares of held-out questions and of their parts answered right by greedy decoding; None: of the start."""
        if weights is not None:
            self._model.load_state_dict(weights)
        questions = self._task.questions()[1]
        inputs = self._tokenizer(
            [each.prompt for each in questions], return_tensors="pt", padding_side="left", padding=True
        )
        width = inputs.input_ids.shape[1]
        out = self._model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=False,
            max_new_tokens=self._task.new_tokens,
        )
        texts = self._tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        rewards = [right_share(text, each.answer, self._task.part) for text, each in zip(texts, questions, strict=True)]
        return {"accuracy": sum(each == 1.0 for each in rewards) / len(rewards), "greedy": sum(rewards) / len(rewards)}


def prompts_key(prompts: Sequence[str]) -> float:
    """A number that is equal for equal prompts in equal order; repeats are dropped."""
    return float(zlib.crc32("\0".join(dict.fromkeys(prompts)).encode()))
