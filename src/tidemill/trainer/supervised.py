"""Supervised fine-tuning: demonstrations packed into one token tree, cross-entropy on their completion tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.algos.supervised import cross_entropy
from tidemill.config.schema import RunSpec
from tidemill.core.records import Demonstration
from tidemill.models.token_tree import Tokens
from tidemill.trainer.fitting import FitResult, Workbench, fit
from tidemill.trainer.logprobs import hits, token_logprobs
from tidemill.trainer.objective import Objective, Outcome
from tidemill.trainer.sequences import pack_completions, tokens_of

MEGABYTE = 1 << 20


def train_sft(
    spec: RunSpec, *, train: Sequence[Demonstration], held_out: Sequence[Demonstration], bench: Workbench
) -> FitResult:
    """Fine-tune `bench.model` on demonstrations; the result names the folder of the new model.

    Raises:
        UserError: there is nothing to learn from, or the disk is full; nothing checkpointed is lost.
    """
    return fit(spec, SupervisedObjective(spec, bench), train=train, held_out=held_out, bench=bench)


class SupervisedObjective(Objective[Demonstration]):
    """-log π of every completion token, averaged over the tokens of a minibatch."""

    def __init__(self, spec: RunSpec, bench: Workbench) -> None:
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
