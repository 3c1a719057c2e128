"""Reward models from preference pairs: chosen and rejected share their prompt in one token tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tidemill.algos.preference import bradley_terry
from tidemill.config.schema import RunSpec
from tidemill.core.buffers import count
from tidemill.core.records import PreferencePair
from tidemill.models.codec import load_codec
from tidemill.models.heads import load_head, reward_head, save_head
from tidemill.models.reward_model import hidden_size, sequence_scores
from tidemill.models.token_tree import Tokens
from tidemill.trainer.fitting import FitResult, Workbench, fit
from tidemill.trainer.minibatches import split_by_tokens
from tidemill.trainer.objective import Objective, Outcome
from tidemill.trainer.sequences import tokens_of

CENTRED_ON = 64
"""Pairs, at most, whose mean score a new head takes off."""


def train_reward_model(
    spec: RunSpec, *, train: Sequence[PreferencePair], held_out: Sequence[PreferencePair], bench: Workbench
) -> FitResult:
    """Make a reward model of `bench.model` and a new head; the result names its folder.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
    """
    return fit(spec, RewardObjective(spec, bench), train=train, held_out=held_out, bench=bench)


class RewardObjective(Objective[PreferencePair]):
    """Bradley-Terry on the scores of both sides, averaged over the pairs of a minibatch."""

    def __init__(self, spec: RunSpec, bench: Workbench) -> None:
        self.head = head = reward_head(hidden_size(bench.model), seed=spec.run.seed).to(bench.device)
        self.trained = nn.ModuleDict({"model": bench.model, "head": head})
        self._head, self._bench, self._config = head, bench, spec.reward_model
        self._microbatch_tokens = spec.supervised.microbatch_tokens
        self._vocabulary_digest = load_codec(bench.source).vocabulary_digest

    @torch.no_grad()
    def prepare(self, examples: Sequence[PreferencePair]) -> None:
        """Let scores begin around zero.

        What all hidden states have in common gives a new head's scores an offset, by chance a large one. Pairs do not
        see it, but centring does, and the first steps would be spent on little else.
        """
        runs = split_by_tokens(examples[:CENTRED_ON], self.sequences, self._microbatch_tokens)
        outcomes = [self.outcome(run) for run in runs]
        total = sum(float(outcome.figures["score_mean"]) for outcome in outcomes)
        self._head.bias.sub_(total / sum(outcome.weight for outcome in outcomes))

    def sequences(self, example: PreferencePair) -> Sequence[Tokens]:
        return tuple(tokens_of(example.prompt_ids + side) for side in (example.chosen_ids, example.rejected_ids))

    def outcome(self, examples: Sequence[PreferencePair]) -> Outcome:
        sides = [sequence for example in examples for sequence in self.sequences(example)]
        with self._bench.autocasting():
            scores, computed = sequence_scores(self._bench.model, self._head, sides)
        chosen_P, rejected_P = scores[0::2], scores[1::2]
        margins_P = torch.tensor([each.margin for each in examples], device=scores.device)
        loss_P = bradley_terry(
            chosen_P,
            rejected_P,
            margins_P=margins_P if self._config.margins else None,
            centring=self._config.centring,
        )
        difference_P = (chosen_P - rejected_P).detach()
        return Outcome(
            loss=loss_P.sum(),
            weight=len(examples),
            figures={
                "pairwise_accuracy": (difference_P > 0).sum(),
                "score_margin": difference_P.sum(),
                "score_mean": (chosen_P + rejected_P).detach().sum() / 2,
            },
            tokens_trained=sum(count(each.chosen_ids) + count(each.rejected_ids) for each in examples),
            tokens_packed=computed,
            tokens_unpacked=sum(map(len, sides)),
        )

    def write(self, directory: Path) -> None:
        save_head(
            directory,
            self._head,
            kind="reward_model",
            pooling="last_token",
            vocabulary_digest=self._vocabulary_digest,
        )

    def read(self, directory: Path) -> None:
        stored, _ = load_head(directory, "reward_model", device=self._bench.device)
        self._head.load_state_dict(stored.state_dict())
