from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.engine_parity import compared, requests


def side(drawn: list[int]) -> dict[str, Any]:
    (one,) = requests(1, 3, 10)
    return {"drawn": {one.sample_id: drawn}, "logprobs": {one.sample_id: [-1.0] * len(drawn)}, "tokens": len(drawn)}


def test_a_side_that_generates_fewer_tokens_fails() -> None:
    def logits(known: list[int]) -> torch.Tensor:
        return torch.zeros(10)

    asked = requests(1, 3, 10)
    assert compared(asked, side([1, 2, 3]), side([1, 2, 3]), logits)["draws"] == 3
    with pytest.raises(RuntimeError, match=r"different numbers of tokens: {'asked': 3, 'ours': 3, 'vLLM': 2}"):
        compared(asked, side([1, 2, 3]), side([4, 5]), logits)  # the first draw differs: nothing later is compared
