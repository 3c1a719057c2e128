"""The three objectives against a plain computation, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.model_folders import save_folder
from tests.model_shapes import HIDDEN, MODEL_SHAPES, VOCABULARY, llama
from tests.workbench import demonstrations, fit_context, pairs, supervised_spec
from tidemill.algos.preference import PREFERENCE_LOSSES
from tidemill.core.records import Demonstration, PreferencePair, pack_tokens, unpack_tokens
from tidemill.models.reward_model import reward_head
from tidemill.trainer.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from tidemill.trainer.packing import split_by_tokens
from tidemill.trainer.supervised_loop import Objective, Totals

BETA, CENTRING = 0.2, 0.05


def plain_logprobs(model: PreTrainedModel, prompt: bytes, completion: bytes) -> Tensor:
    ids, start = unpack_tokens(prompt + completion), len(unpack_tokens(prompt))
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].float()
    logprobs: Tensor = logits.log_softmax(-1)[torch.arange(len(ids) - start), torch.tensor(ids[start:])]
    return logprobs


def plain_score(model: PreTrainedModel, head: torch.nn.Module, prompt: bytes, completion: bytes) -> Tensor:
    output = model(torch.tensor([unpack_tokens(prompt + completion)]), use_cache=False, output_hidden_states=True)
    score: Tensor = head(output.hidden_states[-1][0, -1:])[0]
    return score


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def learned(objective: Objective[Any], examples: Sequence[Any], budget: int) -> tuple[Totals, dict[str, Tensor]]:
    """Loss sums and summed gradients over microbatches of `budget` tokens."""
    totals = Totals()
    for run in split_by_tokens(examples, objective.sequences, budget):
        sums = objective.losses(run)
        sums.loss.backward()
        totals.add(sums)
    return totals, gradients(objective.trained)


def assert_equal_gradients(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("budget", [10_000, 40, 1])
def test_sft(shape: str, budget: int, tmp_path: Path) -> None:
    examples, model = demonstrations(6), MODEL_SHAPES[shape]()
    logprobs = [plain_logprobs(model, each.prompt_ids, each.completion_ids) for each in examples]
    (-torch.cat(logprobs).sum()).backward()
    objective = SupervisedObjective(supervised_spec(), fit_context(tmp_path, model=MODEL_SHAPES[shape]()))
    totals, ours = learned(objective, examples, budget)
    assert_equal_gradients(ours, gradients(model))
    means = totals.means()
    assert totals.weight == totals.tokens_trained == sum(map(len, logprobs))
    assert means["loss"] == pytest.approx(-float(torch.cat(logprobs).detach().mean()), rel=1e-5)
    correct = [
        int(model(torch.tensor([ids[:at]]), use_cache=False).logits[0, -1].argmax()) == ids[at]
        for each in examples
        for ids in [unpack_tokens(each.prompt_ids + each.completion_ids)]
        for at in range(len(unpack_tokens(each.prompt_ids)), len(ids))
    ]
    assert means["token_accuracy"] == pytest.approx(sum(correct) / len(correct))


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("budget", [10_000, 1])
def test_reward_model(shape: str, budget: int, tmp_path: Path) -> None:
    examples = pairs(5, margin=0.1)
    source = save_folder(llama(), tmp_path / "folder")
    model, head = MODEL_SHAPES[shape](), reward_head(HIDDEN, seed=7)
    losses, correct = [], 0
    for each in examples:
        chosen = plain_score(model, head, each.prompt_ids, each.chosen_ids)
        rejected = plain_score(model, head, each.prompt_ids, each.rejected_ids)
        losses.append(
            -torch.nn.functional.logsigmoid(chosen - rejected - each.margin) + CENTRING * (chosen + rejected) ** 2
        )
        correct += int(chosen > rejected)
    torch.stack(losses).sum().backward()
    spec = supervised_spec(reward_model={"centring": CENTRING}, run={"seed": 7})
    objective = RewardObjective(spec, fit_context(tmp_path, model=MODEL_SHAPES[shape](), source=source))
    totals, ours = learned(objective, examples, budget)
    plain = {f"model.{name}": g for name, g in gradients(model).items()}
    assert_equal_gradients(ours, plain | {f"head.{name}": g for name, g in gradients(head).items()})
    assert totals.means()["loss"] == pytest.approx(float(torch.stack(losses).detach().mean()), rel=1e-5)
    assert totals.means()["pairwise_accuracy"] == correct / 5


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
@pytest.mark.parametrize("budget", [10_000, 1])
def test_preference_losses(loss: str, budget: int, tmp_path: Path) -> None:
    """With weights that differ from those of the reference."""
    examples, initial, moved = pairs(5), llama(0), llama(1)
    spec = supervised_spec(preference={"loss": loss, "beta": BETA})
    subject = fit_context(tmp_path, model=llama(0))
    objective = PreferenceObjective(spec, subject)
    objective.prepare(examples)
    subject.model.load_state_dict(moved.state_dict())
    losses, margins = [], []
    for each in examples:
        sides = []
        for side in (each.chosen_ids, each.rejected_ids):
            policy = plain_logprobs(moved, each.prompt_ids, side)
            with torch.no_grad():
                ref = plain_logprobs(initial, each.prompt_ids, side)
            ratio = policy - ref
            sides.append(ratio.mean() if loss == "ipo" else ratio.sum())
        h = sides[0] - sides[1]
        losses.append((h - 1 / (2 * BETA)) ** 2 if loss == "ipo" else -torch.nn.functional.logsigmoid(BETA * h))
        margins.append(BETA * float(h.detach()))
    torch.stack(losses).sum().backward()
    totals, ours = learned(objective, examples, budget)
    assert_equal_gradients(ours, gradients(moved))
    assert totals.means()["loss"] == pytest.approx(float(torch.stack(losses).detach().mean()), rel=1e-5)
    assert totals.means()["reward_margin"] == pytest.approx(sum(margins) / 5, rel=1e-4, abs=1e-5)
    assert totals.means()["pairwise_accuracy"] == sum(m > 0 for m in margins) / 5


def test_scores_of_a_new_head_have_mean_zero(tmp_path: Path) -> None:
    source, model, examples = save_folder(llama(), tmp_path / "folder"), llama(), pairs(6)
    objective = RewardObjective(supervised_spec(), fit_context(tmp_path, source=source))
    assert objective.head is not None
    scores = [
        plain_score(model, objective.head, pair.prompt_ids, side).item()
        for pair in examples
        for side in (pair.chosen_ids, pair.rejected_ids)
    ]
    before = objective.losses(examples).figures
    assert abs(sum(scores)) > 1e-2
    objective.prepare(examples)
    after = objective.losses(examples).figures
    # The bias subtracts the mean of all twelve scores; differences within pairs are unchanged.
    assert objective.head.bias.item() == pytest.approx(-sum(scores) / 12, abs=1e-5)
    assert float(after["score_mean"]) == pytest.approx(0.0, abs=1e-4)
    assert float(after["score_margin"]) == pytest.approx(float(before["score_margin"]), abs=1e-4)


def test_the_initial_policy_has_loss_log_2(tmp_path: Path) -> None:
    objective = PreferenceObjective(supervised_spec(), fit_context(tmp_path))
    examples = pairs(4)
    objective.prepare(examples)
    means = learned(objective, examples, 10_000)[0].means()
    assert means["loss"] == pytest.approx(0.693147, abs=1e-5)  # -log σ(0) = log 2
    assert means["reward_margin"] == pytest.approx(0.0, abs=1e-5)


def test_the_reference_is_computed_once_per_data_and_weights(tmp_path: Path) -> None:
    def runs_needed(examples: list[PreferencePair], seed: int = 0) -> int:
        subject = fit_context(tmp_path, model=llama(seed))
        runs: list[int] = []
        subject.model.base_model.register_forward_hook(lambda *_: runs.append(1))
        PreferenceObjective(supervised_spec(), subject).prepare(examples)
        return len(runs)

    examples = pairs(6)
    assert runs_needed(examples) > 0
    assert runs_needed(examples) == 0
    assert runs_needed(examples[1:]) > 0
    assert runs_needed(examples, seed=1) > 0
    (tmp_path / "reference.safetensors").write_bytes(b"torn")
    assert runs_needed(examples, seed=1) > 0


def test_pairs_share_their_prompt_and_all_share_the_header(tmp_path: Path) -> None:
    header, one, other = [60, 61, 62, 63], [5, 6, 7], [8, 9]
    examples = [
        PreferencePair(
            id=str(prompt), prompt_ids=pack_tokens([*header, *prompt]), chosen_ids=pack_tokens([10, 1]),
            rejected_ids=pack_tokens([11, 12, 1]),
        )
        for prompt in (one, other)
    ]  # fmt: skip
    source = save_folder(llama(), tmp_path / "folder")
    sums = RewardObjective(supervised_spec(), fit_context(tmp_path, source=source)).losses(examples)
    # header 4, prompts 3 + 2, completions 2 + 3 for each prompt; without sharing 9 + 10 + 8 + 9
    assert (sums.tokens_packed, sums.tokens_unpacked) == (4 + 5 + 2 * 5, 9 + 10 + 8 + 9)


def test_a_first_token_without_a_prompt_is_not_trained(tmp_path: Path) -> None:
    objective = SupervisedObjective(supervised_spec(), fit_context(tmp_path))
    example = Demonstration(id="bare", prompt_ids=b"", completion_ids=pack_tokens([5, 6, 7]))
    sums = objective.losses([example])
    expected = plain_logprobs(llama(), pack_tokens([5]), pack_tokens([6, 7]))
    assert sums.weight == 2
    assert float(sums.loss.detach()) == pytest.approx(-float(expected.detach().sum()), rel=1e-5)


# Three turns after the prompt 5 6 7: 20 21 1 is generated, 30 31 seen; then a new context 5 40 41, in which 22 1 and
# 23 24 1 are generated and 32 is seen.
PROMPT, TURNS = [5, 6, 7], [20, 21, 1, 30, 31, 5, 40, 41, 22, 1, 32, 23, 24, 1]
TRAINED, BRANCHES = ((0, 3), (8, 10), (11, 14)), (5,)


def turn_logprobs(model: PreTrainedModel) -> Tensor:
    """Of the eight generated tokens, each after all that the model saw."""
    seen = [([5, 6, 7], [20, 21, 1]), ([5, 40, 41], [22, 1]), ([5, 40, 41, 22, 1, 32], [23, 24, 1])]
    return torch.cat([plain_logprobs(model, pack_tokens(before), pack_tokens(turn)) for before, turn in seen])


@pytest.mark.parametrize("budget", [10_000, 1])
def test_only_turns_are_trained_and_each_in_its_context(budget: int, tmp_path: Path) -> None:
    example = Demonstration(
        id="turns",
        prompt_ids=pack_tokens(PROMPT),
        completion_ids=pack_tokens(TURNS),
        trained=TRAINED,
        branches=BRANCHES,
    )
    (plain,), model = demonstrations(1), llama()
    logprobs = torch.cat([turn_logprobs(model), plain_logprobs(model, plain.prompt_ids, plain.completion_ids)])
    (-logprobs.sum()).backward()
    objective = SupervisedObjective(supervised_spec(), fit_context(tmp_path))
    totals, ours = learned(objective, [example, plain], budget)
    assert_equal_gradients(ours, gradients(model))
    assert totals.weight == totals.tokens_trained == len(logprobs) == 8 + len(unpack_tokens(plain.completion_ids))
    # Rows of 8 and 9 tokens without their last ones.
    assert sum(map(len, objective.sequences(example))) == 7 + 8


def test_preferences_between_conversations(tmp_path: Path) -> None:
    pair = PreferencePair(
        id="turns",
        prompt_ids=pack_tokens(PROMPT),
        chosen_ids=pack_tokens([9, 1]),
        rejected_ids=pack_tokens(TURNS),
        rejected_trained=TRAINED,
        rejected_branches=BRANCHES,
    )
    initial, moved, subject = llama(0), llama(1), fit_context(tmp_path, model=llama(0))
    spec = supervised_spec(preference={"beta": BETA})
    objective = PreferenceObjective(spec, subject)
    objective.prepare([pair])
    subject.model.load_state_dict(moved.state_dict())
    with torch.no_grad():
        policy, ref = (
            plain_logprobs(model, pair.prompt_ids, pair.chosen_ids).sum() - turn_logprobs(model).sum()
            for model in (moved, initial)
        )
    sums = objective.losses([pair])
    assert float(sums.figures["reward_margin"]) == pytest.approx(BETA * float(policy - ref), rel=1e-4)
    assert sums.tokens_trained == 2 + 8


def test_a_reward_model_reads_the_last_context_of_a_conversation(tmp_path: Path) -> None:
    pair = PreferencePair(
        id="turns",
        prompt_ids=pack_tokens(PROMPT),
        chosen_ids=pack_tokens(TURNS),
        rejected_ids=pack_tokens([9, 1]),
        chosen_trained=TRAINED,
        chosen_branches=BRANCHES,
    )
    objective = RewardObjective(supervised_spec(), fit_context(tmp_path, source=save_folder(llama(), tmp_path / "f")))
    assert [each.tolist() for each in objective.sequences(pair)] == [TURNS[5:], [*PROMPT, 9, 1]]


def test_vocabulary_in_chunks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = demonstrations(4)
    whole = learned(SupervisedObjective(supervised_spec(), fit_context(tmp_path)), examples, 10_000)
    monkeypatch.setattr("tidemill.config.learning.MEGABYTE", 3 * VOCABULARY * 4)  # three rows of logits per chunk
    spec = supervised_spec(trainer={"logits_budget_mb": 1})
    chunked = learned(SupervisedObjective(spec, fit_context(tmp_path)), examples, 10_000)
    assert_equal_gradients(chunked[1], whole[1])
    assert chunked[0].means() == pytest.approx(whole[0].means())


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.train()
    examples, spec = demonstrations(4), supervised_spec()
    _, plain = learned(SupervisedObjective(spec, fit_context(tmp_path)), examples, 10_000)
    _, ours = learned(SupervisedObjective(spec, fit_context(tmp_path, model=model)), examples, 10_000)
    assert_equal_gradients(ours, plain)
