"""Objectives of supervised training: fine-tuning, reward models and preference optimisation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from tidemill.algos.preference import PREFERENCE_LOSSES, bradley_terry, cross_entropy
from tidemill.config.schema import RunSpec
from tidemill.core.records import Demonstration, PreferencePair, count
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import hidden_size, load_head, reward_head, save_head, sequence_scores
from tidemill.models.token_tree import Tokens
from tidemill.models.transfer import on_device
from tidemill.models.weights_digest import weights_digest
from tidemill.telemetry.jsonl import write_atomically
from tidemill.trainer.packing import MaskedCompletion, PackedCompletions, pack_completions, split_by_tokens
from tidemill.trainer.scoring import token_logprobs
from tidemill.trainer.supervised_loop import FitContext, LossSums, Objective

CENTRING_PAIRS = 64
"""Maximum number of pairs used to centre the scores of a new head."""
REFERENCE = "reference.safetensors"
"""File in the run directory with the summed reference logprobs of preference pairs."""


def logits_bytes(spec: RunSpec, context: FitContext) -> int:
    return spec.trainer.logits_bytes(on_gpu=context.device.type == "cuda")


def _masked(example: Demonstration) -> MaskedCompletion:
    return MaskedCompletion(example.prompt_ids, example.completion_ids, example.trained, example.branches)


def _sides(pair: PreferencePair) -> tuple[MaskedCompletion, MaskedCompletion]:
    """Chosen and rejected."""
    return (
        MaskedCompletion(pair.prompt_ids, pair.chosen_ids, pair.chosen_trained, pair.chosen_branches),
        MaskedCompletion(pair.prompt_ids, pair.rejected_ids, pair.rejected_trained, pair.rejected_branches),
    )


class SupervisedObjective(Objective[Demonstration]):
    """-log π of every trained token, averaged over the tokens of a minibatch."""

    def __init__(self, spec: RunSpec, context: FitContext) -> None:
        self.trained = context.model
        self._context, self._logits_bytes = context, logits_bytes(spec, context)

    def sequences(self, example: Demonstration) -> Sequence[Tokens]:
        return [tokens[:-1] for tokens, _ in _masked(example).rows]

    def losses(self, examples: Sequence[Demonstration]) -> LossSums:
        packed = pack_completions([_masked(example) for example in examples], self._context.device)
        output = token_logprobs(
            self._context.forward, packed, temperature=1.0, logits_budget_bytes=self._logits_bytes, statistic="hit"
        )
        tokens = len(packed.targets)
        return LossSums(
            loss=cross_entropy(output.logprobs).sum(),
            weight=tokens,
            figures={"token_accuracy": output.statistic.sum()},
            tokens_trained=tokens,
            tokens_packed=packed.tree.size,
            tokens_unpacked=packed.unpacked_tokens,
        )


class RewardObjective(Objective[PreferencePair]):
    """Bradley-Terry loss on the scores of both completions, averaged over the pairs of a minibatch."""

    def __init__(self, spec: RunSpec, context: FitContext) -> None:
        self._head = self.head = reward_head(hidden_size(context.model), seed=spec.run.seed).to(context.device)
        self.trained = nn.ModuleDict({"model": context.model, "head": self._head})
        self._context, self._config = context, spec.reward_model
        self._microbatch_tokens = spec.supervised.microbatch_tokens
        self._vocabulary_digest = load_codec(context.source).vocabulary_digest

    @torch.no_grad()
    def prepare(self, examples: Sequence[PreferencePair]) -> None:
        """Subtract the mean score of the first pairs from the bias of the new head.

        The common part of all hidden states gives scores a random offset, possibly a large one. Differences of scores
        do not depend on it, but the centring penalty does, and would dominate the first steps.
        """
        runs = split_by_tokens(examples[:CENTRING_PAIRS], self.sequences, self._microbatch_tokens)
        sums = [self.losses(run) for run in runs]
        total = sum(float(each.figures["score_mean"]) for each in sums)
        self._head.bias.sub_(total / sum(each.weight for each in sums))

    def sequences(self, example: PreferencePair) -> Sequence[Tokens]:
        return tuple(side.rows[-1][0] for side in _sides(example))

    def losses(self, examples: Sequence[PreferencePair]) -> LossSums:
        sequences = [sequence for example in examples for sequence in self.sequences(example)]
        scores, computed = sequence_scores(self._context.forward, self._head, sequences)
        chosen_P, rejected_P = scores[0::2], scores[1::2]
        margins_P = on_device(np.array([each.margin for each in examples], np.float32), scores.device)
        loss_P = bradley_terry(chosen_P, rejected_P, margins_P=margins_P, centring=self._config.centring)
        difference_P = (chosen_P - rejected_P).detach()
        return LossSums(
            loss=loss_P.sum(),
            weight=len(examples),
            figures={
                "pairwise_accuracy": (difference_P > 0).sum(),
                "score_margin": difference_P.sum(),
                "score_mean": (chosen_P + rejected_P).detach().sum() / 2,
            },
            tokens_trained=sum(count(each.chosen_ids) + count(each.rejected_ids) for each in examples),
            tokens_packed=computed,
            tokens_unpacked=sum(map(len, sequences)),
        )

    def write(self, directory: Path) -> None:
        digest = self._vocabulary_digest
        save_head(directory, self._head, kind="reward_model", pooling="last_token", vocabulary_digest=digest)

    def read(self, directory: Path) -> None:
        stored, _ = load_head(directory, "reward_model", device=self._context.device)
        self._head.load_state_dict(stored.state_dict())


class PreferenceObjective(Objective[PreferencePair]):
    """A loss of `algos.preference`, averaged over the pairs of a minibatch.

    `context.model` as loaded is the reference. Its logprobs are computed once, before training or restoring, and stored
    in the run directory, so no second model is needed.
    """

    def __init__(self, spec: RunSpec, context: FitContext) -> None:
        self.trained = context.model
        self._spec, self._context = spec, context
        self._reference: dict[str, tuple[float, float]] = {}  # summed logprobs of (chosen, rejected) by pair

    def sequences(self, example: PreferencePair) -> Sequence[Tokens]:
        return [tokens[:-1] for side in _sides(example) for tokens, _ in side.rows]

    def prepare(self, examples: Sequence[PreferencePair]) -> None:
        context, hashed = self._context, hashlib.blake2b(digest_size=16)
        hashed.update(f"{weights_digest(context.model, context.ranks)} {context.forward.autocast}".encode())
        for example in examples:
            hashed.update(f"\0{example.id}".encode())
        path, digest = context.directory / REFERENCE, hashed.hexdigest()
        try:
            sums = load_file(path).get(digest)
        except (OSError, SafetensorError):
            sums = None
        if sums is None:
            sums = self._reference_sums(examples)  # on every rank: the first one's file does not exist yet
            if context.ranks.index == 0:
                write_atomically(path, save({digest: sums}))
        self._reference = {
            example.id: (float(chosen), float(rejected))
            for example, (chosen, rejected) in zip(examples, sums.tolist(), strict=True)
        }

    def losses(self, examples: Sequence[PreferencePair]) -> LossSums:
        packed, logprobs_T = self._logprobs(examples)
        config, samples = self._spec.preference, packed.samples
        sums_S, lengths_S = samples.sum(logprobs_T), samples.sum(torch.ones_like(logprobs_T))
        reference = np.array([self._reference[each.id] for each in examples], np.float32)
        ref_S = on_device(reference.reshape(-1), sums_S.device)
        loss = PREFERENCE_LOSSES[config.loss]
        policy_S, ref_S = (sums_S / lengths_S, ref_S / lengths_S) if loss.reduce == "mean" else (sums_S, ref_S)
        loss_P = loss.function(
            policy_S[0::2],
            policy_S[1::2],
            ref_S[0::2],
            ref_S[1::2],
            **{name: getattr(config, name) for name in loss.settings},
        )
        rewards_S = config.beta * (policy_S - ref_S).detach()
        margin_P = rewards_S[0::2] - rewards_S[1::2]
        return LossSums(
            loss=loss_P.sum(),
            weight=len(examples),
            figures={
                "pairwise_accuracy": (margin_P > 0).sum(),
                "reward_margin": margin_P.sum(),
                "reward_chosen": rewards_S[0::2].sum(),
                "reward_rejected": rewards_S[1::2].sum(),
            },
            tokens_trained=len(packed.targets),
            tokens_packed=packed.tree.size,
            tokens_unpacked=packed.unpacked_tokens,
        )

    def _logprobs(self, examples: Sequence[PreferencePair]) -> tuple[PackedCompletions, Tensor]:
        """Logprobs [T] of 2P completions, chosen and rejected alternating."""
        packed = pack_completions([side for each in examples for side in _sides(each)], self._context.device)
        output = token_logprobs(
            self._context.forward,
            packed,
            temperature=1.0,
            logits_budget_bytes=logits_bytes(self._spec, self._context),
            statistic="none",
        )
        return packed, output.logprobs

    @torch.no_grad()
    def _reference_sums(self, examples: Sequence[PreferencePair]) -> Tensor:
        """Summed logprobs of chosen and rejected completions, float32 [N, 2]."""
        runs = split_by_tokens(examples, self.sequences, self._spec.supervised.microbatch_tokens)
        parts = []
        for done, run in enumerate(runs):
            packed, logprobs_T = self._logprobs(run)
            parts.append(packed.samples.sum(logprobs_T).reshape(-1, 2).cpu())
            self._context.telemetry.progress("reference", done + 1, len(runs))
        return torch.cat(parts) if parts else torch.empty(0, 2)


SupervisedKind: TypeAlias = Literal["sft", "reward_model", "dpo"]

OBJECTIVES: dict[SupervisedKind, Callable[[RunSpec, FitContext], Objective[Any]]] = {
    "sft": SupervisedObjective,
    "reward_model": RewardObjective,
    "dpo": PreferenceObjective,
}
