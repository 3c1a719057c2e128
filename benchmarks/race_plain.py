"""GRPO in plain torch, on the samples of a side of the learning race: what the side's step should have done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.race_common import GROUP_SIZE, RaceSettings
from benchmarks.race_tasks import right_share
from tidemill.models.auto import quiet

STD_FLOOR = 1e-4  # of the advantages, on both sides
MAX_NORM = 1.0  # of the gradient, on both sides


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A completion of a step."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    answer: str


class PlainLearner:
    """A stock `transformers` model with torch's AdamW, which starts as both sides do."""

    def __init__(self, folder: Path, *, part: int, learning_rate: float, replayed: bool) -> None:
        """
        Args:
            part: of an answer, in characters.
            replayed: every step, not only the gradient of the first.
        """
        self._part, self._replayed = part, replayed
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._start = {name: value.clone() for name, value in self._model.state_dict().items()}

    @classmethod
    def of(cls, race: RaceSettings) -> PlainLearner:
        task = race.found
        return cls(task.start(), part=task.part, learning_rate=race.learning_rate, replayed=race.replay)

    def notes(self, step: int, samples: Sequence[Sampled], weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Of a side's step with these samples and with the weights after it.

        Returns:
            plain_grad_norm: of the first step, or of each one that is replayed. If replayed, also weights_off: distance
            to the side's weights, relative to the distance to the start; and the sums of `_excess`.
        """
        if not self._replayed:
            return {"plain_grad_norm": self._gradient_norm(samples)} if step == 1 else {}
        sums = self._excess(samples)
        norm = self._gradient_norm(samples)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        mine = self._model.state_dict()
        off = _distance(mine, weights) / _distance(mine, self._start)
        return {"plain_grad_norm": norm, "weights_off": off, **sums}

    def _gradient_norm(self, samples: Sequence[Sampled]) -> float:
        """Of GRPO's loss: the mean over samples of the mean over their tokens."""
        self._model.zero_grad()
        rewards = torch.tensor([self._reward(each) for each in samples]).view(-1, GROUP_SIZE)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + STD_FLOOR)).flatten().tolist()
        for sample, advantage, logprobs in zip(samples, advantages, self._logprobs(samples), strict=True):
            chosen = logprobs.gather(1, torch.tensor(sample.completion_ids)[:, None])
            (-advantage * chosen.mean() / len(samples)).backward()
        norms = [each.grad.norm() for each in self._model.parameters() if each.grad is not None]
        return float(torch.stack(norms).norm())

    @torch.no_grad()
    def _excess(self, samples: Sequence[Sampled]) -> dict[str, float]:
        """How far the samples are from independent draws of the model's distribution: sums, each with its variance.

        Expected to be 0: over tokens, the logprob plus the entropy, and 1 if it is the most probable token less that
        probability; over pairs of siblings, the product of the samples' sums of the first.
        """
        logprob, logprob_variance, top, top_variance = (torch.zeros(len(samples)) for _ in range(4))
        for at, (sample, logprobs) in enumerate(zip(samples, self._logprobs(samples), strict=True)):
            chosen, probabilities = torch.tensor(sample.completion_ids), logprobs.exp()
            mean = (probabilities * logprobs).sum(1)
            highest, best = probabilities.max(1)
            logprob[at] = (logprobs.gather(1, chosen[:, None])[:, 0] - mean).sum()
            logprob_variance[at] = ((probabilities * logprobs.square()).sum(1) - mean.square()).sum()
            top[at] = ((chosen == best).float() - highest).sum()
            top_variance[at] = (highest * (1 - highest)).sum()
        found = {
            "logprob": logprob,
            "logprob_variance": logprob_variance,
            "top": top,
            "top_variance": top_variance,
            "siblings": _products_of_pairs(logprob),
            "siblings_variance": _products_of_pairs(logprob_variance),
        }
        return {name: float(values.sum()) for name, values in found.items()}

    def _logprobs(self, samples: Sequence[Sampled]) -> Iterator[Tensor]:
        """Of every token of the vocabulary at each completion token of each sample: [completion length, vocabulary]."""
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
            logits = self._model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            yield logits.log_softmax(-1)

    def _reward(self, sample: Sampled) -> float:
        text = self._tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
        return right_share(text, sample.answer, self._part)


def _products_of_pairs(values: Tensor) -> Tensor:
    """The sum over the pairs of each group: ((sum of x)^2 - sum of x^2) / 2."""
    groups = values.view(-1, GROUP_SIZE)
    return (groups.sum(1).square() - groups.square().sum(1)) / 2


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(torch.stack([(value - other[name]).norm() for name, value in one.items()]).norm())
