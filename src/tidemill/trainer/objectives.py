"""Objectives of the supervised loop: demonstrations, reward models, and preference optimisation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from tidemill.algos.preference import PREFERENCE_LOSSES, bradley_terry, cross_entropy
from tidemill.config.schema import RunSpec
from tidemill.core.records import Demonstration, PreferencePair, count
from tidemill.models.codec import load_codec
from tidemill.models.loading import weights_digest
from tidemill.models.reward_model import hidden_size, load_head, reward_head, save_head, sequence_scores
from tidemill.models.token_tree import Tokens
from tidemill.telemetry.jsonl import write_atomically
from tidemill.trainer.packing import PackedCompletions, pack_completions, tokens_of
from tidemill.trainer.scoring import hits, token_logprobs
from tidemill.trainer.supervised_loop import FitContext, FitResult, Objective, Outcome, fit, split_by_tokens

MEGABYTE = 1 << 20


def train_sft(
    spec: RunSpec, *, train: Sequence[Demonstration], held_out: Sequence[Demonstration], bench: FitContext
) -> FitResult:
    """Fine-tune `bench.model` on demonstrations; the result names the folder of the new model.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
    """
    return fit(spec, SupervisedObjective(spec, bench), train=train, held_out=held_out, bench=bench)


class SupervisedObjective(Objective[Demonstration]):
    """-log π of every completion token, averaged over the tokens of a minibatch."""

    def __init__(self, spec: RunSpec, bench: FitContext) -> None:
        self.trained = bench.model
        self._bench, self._logits_bytes = bench, spec.trainer.logits_budget_mb * MEGABYTE

    def sequences(self, example: Demonstration) -> Sequence[Tokens]:
        return (tokens_of(example.prompt_ids + example.completion_ids)[:-1],)

    def outcome(self, examples: Sequence[Demonstration]) -> Outcome:
        packed = pack_completions([(each.prompt_ids, each.completion_ids) for each in examples], self._bench.device)
        with self._bench.autocasting():
            logprobs_T, hits_T = token_logprobs(
                self._bench.model, packed, temperature=1.0, logits_budget_bytes=self._logits_bytes, figure=hits
            )
        tokens = len(packed.targets)
        return Outcome(
            loss=cross_entropy(logprobs_T).sum(),
            weight=tokens,
            figures={"token_accuracy": hits_T.sum()},
            tokens_trained=tokens,
            tokens_packed=packed.tree.size,
            tokens_unpacked=packed.unpacked_tokens,
        )


CENTRED_ON = 64
"""Pairs, at most, whose mean score a new head takes off."""


def train_reward_model(
    spec: RunSpec, *, train: Sequence[PreferencePair], held_out: Sequence[PreferencePair], bench: FitContext
) -> FitResult:
    """Make a reward model of `bench.model` and a new head; the result names its folder.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
    """
    return fit(spec, RewardObjective(spec, bench), train=train, held_out=held_out, bench=bench)


class RewardObjective(Objective[PreferencePair]):
    """Bradley-Terry on the scores of both sides, averaged over the pairs of a minibatch."""

    def __init__(self, spec: RunSpec, bench: FitContext) -> None:
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
            margins_P=margins_P,
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


REFERENCE = "reference.safetensors"


def train_dpo(
    spec: RunSpec, *, train: Sequence[PreferencePair], held_out: Sequence[PreferencePair], bench: FitContext
) -> FitResult:
    """Fine-tune `bench.model`, which is the reference as it is now, on preference pairs.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
    """
    return fit(spec, PreferenceObjective(spec, bench), train=train, held_out=held_out, bench=bench)


class PreferenceObjective(Objective[PreferencePair]):
    """The configured loss of `algos.preference`, averaged over the pairs of a minibatch.

    The reference's logprobs are measured once, with the model as it is before anything is learned or restored, and kept
    in the run directory: no second copy of the model is ever needed.
    """

    def __init__(self, spec: RunSpec, bench: FitContext) -> None:
        self.trained = bench.model
        self._spec, self._bench = spec, bench
        self._reference: dict[str, tuple[float, float]] = {}  # summed logprobs of chosen and rejected, by pair

    def sequences(self, example: PreferencePair) -> Sequence[Tokens]:
        sides = (example.chosen_ids, example.rejected_ids)
        return tuple(tokens_of(example.prompt_ids + side)[:-1] for side in sides)

    def prepare(self, examples: Sequence[PreferencePair]) -> None:
        path, digest = self._bench.directory / REFERENCE, self._digest(examples)
        sums = _stored(path, digest)
        if sums is None:
            sums = self._measure(examples)
            write_atomically(path, save({digest: sums}))
        self._reference = {
            example.id: (float(chosen), float(rejected))
            for example, (chosen, rejected) in zip(examples, sums.tolist(), strict=True)
        }

    def outcome(self, examples: Sequence[PreferencePair]) -> Outcome:
        packed, logprobs_T = self._logprobs(examples)
        config, samples = self._spec.preference, packed.samples
        sums_S, lengths_S = samples.sum(logprobs_T), samples.sum(torch.ones_like(logprobs_T))
        ref_S = torch.tensor([self._reference[each.id] for each in examples], device=sums_S.device).flatten()
        loss = PREFERENCE_LOSSES[config.loss]
        policy_S, held_S = (sums_S / lengths_S, ref_S / lengths_S) if loss.reduce == "mean" else (sums_S, ref_S)
        loss_P = loss.function(
            policy_S[0::2],
            policy_S[1::2],
            held_S[0::2],
            held_S[1::2],
            **{name: getattr(config, name) for name in loss.settings},
        )
        rewards_S = config.beta * (policy_S - held_S).detach()
        margin_P = rewards_S[0::2] - rewards_S[1::2]
        return Outcome(
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
        """[T], of the tokens of 2P completions: chosen and rejected in turns."""
        sides = [(each.prompt_ids, side) for each in examples for side in (each.chosen_ids, each.rejected_ids)]
        packed = pack_completions(sides, self._bench.device)
        with self._bench.autocasting():
            logprobs_T, _ = token_logprobs(
                self._bench.model,
                packed,
                temperature=1.0,
                logits_budget_bytes=self._spec.trainer.logits_budget_mb * MEGABYTE,
                figure=hits,
            )
        return packed, logprobs_T

    @torch.no_grad()
    def _measure(self, examples: Sequence[PreferencePair]) -> Tensor:
        """float32 [N, 2]."""
        runs = split_by_tokens(examples, self.sequences, self._spec.supervised.microbatch_tokens)
        parts = []
        for done, run in enumerate(runs):
            packed, logprobs_T = self._logprobs(run)
            parts.append(packed.samples.sum(logprobs_T).reshape(-1, 2).cpu())
            self._bench.telemetry.progress("reference", done + 1, len(runs))
        return torch.cat(parts) if parts else torch.empty(0, 2)

    def _digest(self, examples: Sequence[PreferencePair]) -> str:
        """Names the model, how it is computed, and the pairs in their order."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{weights_digest(self._bench.model)} {self._bench.autocast}".encode())
        for example in examples:
            digest.update(f"\0{example.id}".encode())
        return digest.hexdigest()


def _stored(path: Path, digest: str) -> Tensor | None:
    """What an earlier session measured; None when it did not, or of something else."""
    try:
        return load_file(path).get(digest)
    except (OSError, SafetensorError):
        return None
