"""The program in a completion."""

from __future__ import annotations

import pytest

from tests.char_codec import make_prompt
from tidemill.core.records import SampleId
from tidemill.scoring.batch_rewards import RewardInput
from tidemill.scoring.code_tests import program_of


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("First:\n```python\na\n```\nBetter:\n  ```py \nb\n  ``` \nDone.", "b\n"),
        ("```python\na\n```python\nb\n```", "a\n```python\nb\n"),
        ("```\na\n```\n```\nb", "a\n"),
        ("```c\na\n```\nb\n```", "b\n"),
        ("```python\n" * 50_000, "```python\n" * 50_000),  # minutes if every fence searched for its end
    ],
)
def test_the_last_closed_block_is_the_program(completion: str, program: str) -> None:
    named = SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=0)
    sample = RewardInput(prompt=make_prompt("p", ""), completion=completion, completion_tokens=1, sample_id=named)
    assert program_of(sample, with_prompt=False) == program
