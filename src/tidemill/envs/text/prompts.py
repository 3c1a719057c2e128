"""Data order as arithmetic: a position names a prompt, so a run resumes from a step number alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.core.records import Prompt
from tidemill.envs.text.content import Item, content_id, hash_number
from tidemill.envs.text.order import EpochOrder

Render = Callable[[Item], Prompt]


class _HeldOut:
    """The evaluation half of both sources: the same prompts in the same order, tokenized when first asked for."""

    def __init__(self, items: Sequence[Item], render: Render) -> None:
        self._items, self._render = items, render
        self._prompts: tuple[Prompt, ...] | None = None

    def held_out(self) -> Sequence[Prompt]:
        if self._prompts is None:
            self._prompts = tuple(self._render(item) for item in self._items)
        return self._prompts


class ListedSource(_HeldOut):
    """A finite training set. Step s takes positions [(s-1)·B, s·B) of an `EpochOrder`."""

    def __init__(
        self, train: Sequence[Item], held_out: Sequence[Item], *, batch_prompts: int, seed: int, render: Render
    ) -> None:
        super().__init__(held_out, render)
        self._train = train
        self._order = EpochOrder([content_id(item) for item in train], batch=batch_prompts, seed=seed)

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`: a pure function of seed, step and the training set."""
        return [(epoch, self._render(self._train[index])) for epoch, index in self._order.batch(step)]


class SampledSource(_HeldOut):
    """Training prompts drawn from more than can be listed: each step is an epoch of its own, without repeats in it.

    Args:
        draw: the training item number `n` of a stream named by `key`; the same arguments, the same item.
    """

    def __init__(
        self,
        draw: Callable[[int, int], Item],
        held_out: Sequence[Item],
        *,
        batch_prompts: int,
        seed: int,
        render: Render,
    ) -> None:
        super().__init__(held_out, render)
        self._draw_item, self._batch, self._seed = draw, batch_prompts, seed

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`, epoch being step - 1: a pure function of seed and step."""
        key = hash_number("step", self._seed, step)
        items: dict[str, Item] = {}
        number = 0
        while len(items) < self._batch:
            item = self._draw_item(key, number)
            items.setdefault(content_id(item), item)
            number += 1
        return [(step - 1, self._render(item)) for item in items.values()]
