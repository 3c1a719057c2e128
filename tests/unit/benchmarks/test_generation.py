"""The generation benchmark fails if a side generates another number of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.generation_hf import generate_batch
from benchmarks.generation_tidemill import check_generated
from benchmarks.workload import demo_shape


def test_our_side_must_generate_all_tokens() -> None:
    check_generated(64 * 3, demo_shape(rounds=1))
    with pytest.raises(RuntimeError, match="generated 191 tokens, expected 192"):
        check_generated(64 * 3 - 1, demo_shape(rounds=1))


@pytest.mark.parametrize("missing", [0, 1])
def test_the_other_side_must_generate_all_tokens(missing: int) -> None:
    def generate(input_ids: torch.Tensor, max_new_tokens: int, **more: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), input_ids.shape[1] + max_new_tokens - missing)

    model, rows, lengths = SimpleNamespace(generate=generate), [[1, 2], [3]], [4, 5]
    if missing:
        with pytest.raises(RuntimeError, match=r"generated \(2, 6\), expected \(2, 7\)"):
            generate_batch(model, rows, lengths)
    else:
        generate_batch(model, rows, lengths)
