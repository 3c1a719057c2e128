from __future__ import annotations

import gc

import pytest

from tidemill.runtime.compute import RARELY, collected_rarely


def test_the_thresholds_are_restored_also_after_an_error() -> None:
    before = gc.get_threshold()

    def fail() -> None:
        with collected_rarely():
            assert gc.get_threshold() == RARELY
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert gc.get_threshold() == before
