"""Data order as arithmetic: a position names a prompt, so a run resumes from a step number alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from tidemill.core.records import Prompt
from tidemill.envs.text.content import Item, hash_number, prompt_id

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
    """A finite training set. Step s takes positions [(s-1)·B, s·B); position p is in epoch p // N.

    Every epoch is a permutation of all N prompts drawn from the seed, whatever order they were listed in. With N ≥ 2B
    no batch holds a prompt twice, also where it straddles two epochs; in a smaller set it may, under different epochs.
    """

    def __init__(
        self, train: Sequence[Item], held_out: Sequence[Item], *, batch_prompts: int, seed: int, render: Render
    ) -> None:
        super().__init__(held_out, render)
        self._train = train
        self._ids = [prompt_id(item) for item in train]
        self._batch, self._seed = batch_prompts, seed
        self._drawn = lru_cache(maxsize=3)(self._draw)
        self._order = lru_cache(maxsize=2)(self._without_straddling_repeats)

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`: a pure function of seed, step and the training set."""
        first = (step - 1) * self._batch
        places = [divmod(position, len(self._train)) for position in range(first, first + self._batch)]
        return [(epoch, self._render(self._train[self._order(epoch)[place]])) for epoch, place in places]

    def _draw(self, epoch: int) -> list[int]:
        return sorted(
            range(len(self._ids)), key=lambda index: hash_number("epoch", self._seed, epoch, self._ids[index])
        )

    def _without_straddling_repeats(self, epoch: int) -> list[int]:
        drawn, carried = self._drawn(epoch), (epoch * len(self._ids)) % self._batch
        if not epoch or not carried or len(drawn) < 2 * self._batch:
            return drawn
        # The last B places stay as drawn: so the next epoch can look at them without knowing what was moved here.
        movable, fixed = drawn[: -self._batch], drawn[-self._batch :]
        just_seen = set(self._drawn(epoch - 1)[-carried:])
        return sorted(movable, key=lambda index: index in just_seen) + fixed


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
            items.setdefault(prompt_id(item), item)
            number += 1
        return [(step - 1, self._render(item)) for item in items.values()]
