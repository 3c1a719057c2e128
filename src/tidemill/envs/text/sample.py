"""A finished sample as rewards see it."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.buffers import TokenBuffer
from tidemill.core.records import Prompt, SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward sees."""

    prompt: Prompt
    completion: str  # decoded, with the stop string that ended it
    completion_tokens: int
    sample_id: SampleId
    token_ids: TokenBuffer = b""  # int32 [P + T], prompt and completion as they were generated
