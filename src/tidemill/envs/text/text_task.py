"""A task as the rest of the run sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tidemill.core.errors import UserError
from tidemill.core.protocols import PromptSource
from tidemill.core.records import Prompt, count
from tidemill.envs.text.prompts import Item

Check: TypeAlias = Callable[[str, Prompt], float]
"""(completion, prompt) to a score, usually in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The longest prompt of a task: its tokens (or an upper bound), the start of its text, and its origin."""

    tokens: int
    text: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts in order, how the task itself judges a completion, and the figures a run is planned with."""

    source: PromptSource
    default_stop_strings: tuple[str, ...]
    check: Check | None  # the task's own scorer; None where comparing with the answer is all there is
    train_size: int  # distinct training prompts; an estimate where they are drawn from too many to list
    held_out_size: int
    longest: Longest
    digest: str  # of the content of both sides: another one on resume means that the prompts are no longer the same
    description: str

    @property
    def longest_prompt_tokens(self) -> int:
        return self.longest.tokens


def longest_of(items: Iterable[Item], render: Callable[[Item], Prompt]) -> Longest:
    """Tokenizes every item once; nothing of it is kept but the longest."""
    longest = Longest(tokens=-1, text="")
    for item in items:
        prompt = render(item)
        if count(prompt.token_ids) > longest.tokens:
            longest = Longest(tokens=count(prompt.token_ids), text=prompt.text, where=item.where)
    return longest


def check_fits(task: Task, context_limit: int, max_new_tokens: int) -> None:
    """Every prompt of the task must leave room for its completion. All lengths in tokens.

    Raises:
        UserError: naming the longest prompt, when prompt and `max_new_tokens` together pass `context_limit`.
    """
    longest = task.longest
    if longest.tokens + max_new_tokens <= context_limit:
        return
    room = context_limit - longest.tokens
    start = longest.text[:60] + ("…" if len(longest.text) > 60 else "")
    raise UserError(
        f"the prompt starting {start!r} has {longest.tokens} tokens and with {max_new_tokens} new ones "
        f"does not fit the context of {context_limit}",
        where=longest.where,
        hint=(f"set sampling.max_new_tokens to at most {room}, or " if room > 0 else "")
        + "shorten the prompt, or take a model (or engine.context_tokens) with a longer context",
    )
