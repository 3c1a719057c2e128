"""A resumed run keeps what its first session chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.train import DATA_DIGEST, record_start, run_session


def session(directory: Path, *, chosen: int, **batch: Any) -> int:
    """Tokens of a microbatch with which a session starts; 0 if it may choose them, and then it takes `chosen`."""
    spec = RunSpec.model_validate({"run": {"dir": str(directory)}, "batch": batch})
    with run_session(spec, None, planned_steps=lambda _: 1) as (resumed, run, _):
        record_start(
            run,
            model_digest="model",
            data_key=DATA_DIGEST,
            data_digest="data",
            data_changed=UserError("changed"),
            threads=1,
            schedule_steps=1,
            microbatch_tokens=resumed.batch.microbatch_tokens or chosen,
        )
    return resumed.batch.microbatch_tokens


def test_another_gpu_keeps_the_microbatches_of_the_first(tmp_path: Path) -> None:
    assert session(tmp_path, chosen=8192) == 0
    assert session(tmp_path, chosen=16_384) == 8192
    assert session(tmp_path, chosen=2048) == 8192
    with pytest.raises(UserError, match=r"batch.microbatch_tokens = 4096, the run has 0"):
        session(tmp_path, chosen=0, microbatch_tokens=4096)


def test_configured_microbatches_stay(tmp_path: Path) -> None:
    assert [session(tmp_path, chosen=1, microbatch_tokens=300) for _ in range(2)] == [300, 300]
