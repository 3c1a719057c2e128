"""The plain-torch learner of the learning race finds wrong steps and wrong samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.race_common import GROUP_SIZE, PROMPTS
from benchmarks.race_plain import PlainLearner, Sampled
from benchmarks.race_replay import agrees, figures_of
from benchmarks.race_tasks import right_share
from benchmarks.turns import Turn, Work
from tests.model_families import FAMILIES, build_family
from tests.model_folders import save_folder, small_tokenizer

LENGTH, LEARNING_RATE = 24, 1e-3
PROMPT_IDS = [ord(each) for each in "sort: "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(build_family("llama", FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def text_of(completion_ids: Sequence[int]) -> str:
    return str(small_tokenizer().decode([*completion_ids], skip_special_tokens=True))


def sampled(model: Any, temperature: float, seed: int) -> list[Sampled]:
    """Each answer is the first part of another sample, so that groups have signal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = torch.tensor([PROMPT_IDS] * (PROMPTS * GROUP_SIZE))
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=LENGTH,
            eos_token_id=None,
        )
    completions = out[:, len(PROMPT_IDS) :].tolist()
    answers = [text_of(each) for each in completions]
    return [
        Sampled(prompt_ids=PROMPT_IDS, completion_ids=ids, answer=answers[at // GROUP_SIZE * GROUP_SIZE])
        for at, ids in enumerate(completions)
    ]


def grpo_step(model: Any, optimizer: torch.optim.Optimizer, samples: Sequence[Sampled]) -> float:
    """All samples in one batch, with the loss as the sum over tokens of weights."""
    texts = [text_of(each.completion_ids) for each in samples]
    rewards = torch.tensor([right_share(text, each.answer, 1) for text, each in zip(texts, samples, strict=True)]).view(
        PROMPTS, GROUP_SIZE
    )
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    ids = torch.tensor([[*each.prompt_ids, *each.completion_ids] for each in samples])
    logprobs = model(input_ids=ids).logits[:, len(PROMPT_IDS) - 1 : -1].log_softmax(-1)
    chosen = logprobs.gather(2, ids[:, len(PROMPT_IDS) :, None])[..., 0]
    optimizer.zero_grad()
    (-advantages.flatten()[:, None] * chosen).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def replayed(
    folder: Path,
    *,
    learning_rate: float = LEARNING_RATE,
    temperature: float = 1.0,
    copied: bool = False,
    steps: int = 3,
) -> Mapping[str, Any]:
    model = build_family("llama", FAMILIES["llama"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    plain = PlainLearner(folder, part=1, learning_rate=LEARNING_RATE, replayed=True)
    turns = []
    for step in range(1, steps + 1):
        samples = sampled(model, temperature, seed=step)
        if copied:  # half of a group is one sample
            samples = [samples[at // 4 * 4] for at in range(len(samples))]
        norm = grpo_step(model, optimizer, samples)
        notes = plain.notes(step, samples, weights(model))
        assert math.isclose(notes["plain_grad_norm"], norm, rel_tol=1e-3) or learning_rate != LEARNING_RATE
        notes["completion_tokens"] = float(sum(len(each.completion_ids) for each in samples))
        work = Work(samples=len(samples), prompt_tokens=0, completion_tokens=0)
        turns.append(Turn(wall_s=1.0, cpu_s=1.0, work=work, notes=notes))
    return figures_of([turns])


def weights(model: Any) -> Mapping[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_same_steps_and_samples_agree(folder: Path) -> None:
    found = replayed(folder)
    assert found["tokens"] == 3 * PROMPTS * GROUP_SIZE * LENGTH
    assert found["weights_off"] < 1e-2
    assert agrees(found)


def test_another_learning_rate_is_found(folder: Path) -> None:
    found = replayed(folder, learning_rate=1.1 * LEARNING_RATE, steps=1)
    assert found["weights_off"] == pytest.approx(0.1, rel=0.05)
    assert not agrees(found)


def test_another_temperature_is_found(folder: Path) -> None:
    found = replayed(folder, temperature=0.8)
    assert found["weights_off"] < 1e-2
    assert found["logprob_errors"] > 4
    assert not agrees(found)


def test_equal_siblings_are_found(folder: Path) -> None:
    found = replayed(folder, copied=True)
    assert found["weights_off"] < 1e-2
    assert abs(found["logprob_errors"]) < 4
    assert found["siblings_errors"] > 4
    assert not agrees(found)


def test_without_replay_only_the_first_step_has_a_gradient(folder: Path) -> None:
    plain = PlainLearner(folder, part=1, learning_rate=LEARNING_RATE, replayed=False)
    model = build_family("llama", FAMILIES["llama"])
    samples = sampled(model, 1.0, seed=0)
    assert set(plain.notes(1, samples, weights(model))) == {"plain_grad_norm"}
    assert plain.notes(2, samples, weights(model)) == {}
