from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.matrix_rate import check_decoded, check_gradients


def test_steps_that_decode_fewer_samples_than_the_products_have_rows_fail() -> None:
    check_decoded(3 * 10 * 64)  # rounds x steps x samples
    with pytest.raises(RuntimeError, match="decoded 1919 tokens, expected 1920"):
        check_decoded(3 * 10 * 64 - 1)


def test_a_backward_pass_that_stops_early_fails() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    check_gradients(model)
    model.zero_grad()
    model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()
    with pytest.raises(RuntimeError, match=r"no gradient of 0\.weight and 1 other"):
        check_gradients(model)
