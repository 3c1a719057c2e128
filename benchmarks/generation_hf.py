"""The other side of the generation benchmark: unmodified `transformers.generate` on left-padded batches.

It returns tokens only; logprobs would cost another forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from benchmarks.turns import Turns
from benchmarks.workload import Workload


class GivenLengths(StoppingCriteria):
    """Ends each row at its given length; the batch continues to the longest."""

    def __init__(self, prompt_length: int, lengths: torch.Tensor) -> None:
        self._ends = prompt_length + lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def transformers_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    """Settings: model (folder), workload."""
    torch.manual_seed(0)
    workload: Workload = settings["workload"]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # lengths are given
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    prompts = prompt_ids(workload, tokenizer)
    rows = [prompt for prompt in prompts for _ in range(workload.group_size)]
    generate_batch(model, rows[: workload.slots], [2] * len(rows[: workload.slots]))  # warm-up
    while True:
        turns.begin()
        for start in range(0, len(rows), workload.slots):
            part = slice(start, start + workload.slots)
            generate_batch(model, rows[part], list(workload.lengths[part]))
        turns.end(workload.work(prompts))


def prompt_ids(workload: Workload, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt."""
    if workload.texts:
        return [tokenizer.encode(text, add_special_tokens=False) for text in workload.texts]
    return [list(prompt) for prompt in workload.prompts]


def generate_batch(model: Any, rows: list[list[int]], lengths: list[int]) -> None:
    """One static batch, sampled at temperature 1 from the whole vocabulary, until its longest completion finishes."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        max_new_tokens=max(lengths),
        stopping_criteria=StoppingCriteriaList([GivenLengths(width, torch.tensor(lengths))]),
    )
    if output.shape != (len(rows), width + max(lengths)):
        raise RuntimeError(f"generated {tuple(output.shape)}, expected {(len(rows), width + max(lengths))}")
