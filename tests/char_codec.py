"""A codec without a model: one token per character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Message, Prompt, SampleId, Segment, Trajectory, pack_logprobs, pack_tokens

END, END_OF_TURN = 0, 1


class CharCodec:
    """Token ids are code points; the chat template is `<role>content` for each message and an open `<assistant>`.

    A completion ends with 0, in a chat with 1; "\t" has no token.
    """

    def encode(self, text: str) -> list[int]:
        if "\t" in text:
            raise UserError("the model's vocabulary cannot express '\\t'", where="the prompt", hint="add it")
        return [ord(char) for char in text]

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        text = "".join(f"<{message.role}>{message.content}" for message in messages) + "<assistant>"
        return text, self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids)

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def end_token_id(self, *, chat: bool) -> int:
        return END_OF_TURN if chat else END

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (END, END_OF_TURN)


def make_prompt(text: str = "1+1=", answer: str = "2", **metadata: object) -> Prompt:
    return Prompt(
        prompt_id="p", token_ids=pack_tokens(map(ord, text)), text=text, answer=answer, metadata=dict(metadata)
    )


def make_trajectory(prompt: Prompt, completion: str, *, index: int = 0, epoch: int = 0) -> Trajectory:
    start, length = len(prompt.text), len(completion)
    return Trajectory(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id=prompt.prompt_id, epoch=epoch, index=index),
        token_ids=prompt.token_ids + pack_tokens(map(ord, completion)),
        segments=(
            Segment(role="prompt", start=0, end=start, trained=False),
            Segment(role="action", start=start, end=start + length, trained=True),
        ),
        rollout_logprobs=pack_logprobs([-1.0] * length),
        versions=(),
        finish="stop",
        text=completion,
    )
