from __future__ import annotations

import pytest

from benchmarks.matrix_rate import check_decoded


def test_steps_that_decode_fewer_samples_than_the_products_have_rows_fail() -> None:
    check_decoded(3 * 10 * 64)  # rounds x steps x samples
    with pytest.raises(RuntimeError, match="decoded 1919 tokens, expected 1920"):
        check_decoded(3 * 10 * 64 - 1)
