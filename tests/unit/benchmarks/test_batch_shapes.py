from __future__ import annotations

import pytest

from benchmarks.batch_shapes import check_interrupted
from tidemill.core.records import GenerateRequest, SampleId, SamplingParams, pack_tokens


def request(prefix: int) -> GenerateRequest:
    return GenerateRequest(
        sample_id=SampleId(run_seed=0, purpose="bench", prompt_id="0", epoch=0, index=0),
        lease_id="bench",
        attempt=0,
        prompt_ids=pack_tokens([1]),
        prefix_ids=pack_tokens(range(prefix)),
        sampling=SamplingParams(max_new_tokens=8),
    )


def test_the_second_engine_must_continue_interrupted_samples() -> None:
    check_interrupted([request(0), request(3)], new_tokens=8)
    with pytest.raises(RuntimeError, match="no interrupted samples"):
        check_interrupted([request(0), request(8)], new_tokens=8)  # one not begun, one finished
