"""Rows of data files from a task: answers written out, and a model's own completions, right against wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tidemill.core.errors import UserError
from tidemill.core.records import Prompt

Row = dict[str, Any]


class Judged(NamedTuple):
    """One completion of a prompt; its place among the prompt's samples names it."""

    text: str
    right: bool
    ended: bool  # by the model, not by the token limit


def demonstration_row(prompt: Prompt, *, ending: str) -> Row:
    """The prompt with its answer as the completion.

    Args:
        ending: what ends a completion of this task, a stop string or nothing.

    Raises:
        UserError: the prompt has no answer.
    """
    if not prompt.answer.strip():
        raise UserError(
            f"the prompt {prompt.text[:40]!r} has no answer to write out", where="task", hint="take a task with answers"
        )
    return {**question_row(prompt), "completion": prompt.answer + ending}


def pair_rows(prompt: Prompt, samples: Sequence[Judged], *, most: int) -> list[Row]:
    """Up to `most` pairs of one prompt: each different wrong completion once, against the different right ones in turn.

    A right one must have been ended by the model; a wrong one may have been cut. Empty completions prefer nothing.
    """
    right = list(_different(samples, right=True))
    wrong = list(_different(samples, right=False))[:most]
    if not right:
        return []
    return [
        {
            **question_row(prompt),
            "chosen": samples[right[at % len(right)]].text,
            "rejected": samples[index].text,
            "chosen_sample": right[at % len(right)],
            "rejected_sample": index,
            "prompt_id": prompt.prompt_id,
        }
        for at, index in enumerate(wrong)
    ]


def question_row(prompt: Prompt) -> Row:
    """The prompt's own fields: as it is read back, the model sees the same tokens."""
    if prompt.messages:
        return {"messages": [{"role": message.role, "content": message.content} for message in prompt.messages]}
    return {"prompt": prompt.text}


def _different(samples: Sequence[Judged], *, right: bool) -> Iterator[int]:
    """Places of the first sample of each text."""
    seen = set[str]()
    for index, sample in enumerate(samples):
        usable = sample.right is right and (sample.ended or not right) and sample.text.strip()
        if usable and sample.text not in seen:
            seen.add(sample.text)
            yield index
