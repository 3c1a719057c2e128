"""Positions to prompts, by hand."""

from __future__ import annotations

from collections import Counter

from tests.char_codec import CharCodec
from tidemill.data.prompts import ListedSource, renderer, text_item

RENDER = renderer(CharCodec(), chat_template=False)


def listed(size: int, batch_prompts: int, seed: int = 0) -> ListedSource:
    items = [text_item(f"q{number}", "") for number in range(size)]
    return ListedSource(items, items[:1], batch_prompts=batch_prompts, seed=seed, render=RENDER)


def test_five_prompts_in_batches_of_two() -> None:
    # Positions 0-9 are steps 1-5: 0-4 are epoch 0, 5-9 epoch 1; step 3 holds positions 4 and 5, one of each.
    batches = [listed(5, 2).train_batch(step) for step in range(1, 6)]
    assert [[epoch for epoch, _ in batch] for batch in batches] == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1]]
    texts = [(epoch, prompt.text) for batch in batches for epoch, prompt in batch]
    assert len(set(texts)) == 10


def test_fewer_prompts_than_a_batch_come_round_under_new_epochs() -> None:
    batch = listed(3, 8).train_batch(1)
    assert [epoch for epoch, _ in batch] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert max(Counter((epoch, prompt.prompt_id) for epoch, prompt in batch).values()) == 1


def test_epochs_and_seeds_order_differently() -> None:
    def order(seed: int, epoch: int) -> list[str]:
        return [prompt.text for _, prompt in listed(20, 20, seed).train_batch(epoch + 1)]

    orders = {tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6


def test_the_order_of_the_file_does_not_matter() -> None:
    items = [text_item(f"q{number}", "") for number in range(20)]
    sources = [ListedSource(side, [], batch_prompts=4, seed=0, render=RENDER) for side in (items, items[::-1])]
    assert sources[0].train_batch(3) == sources[1].train_batch(3)


def test_held_out_prompts_are_made_once() -> None:
    items = [text_item(f"q{number}", "") for number in range(4)]
    source = ListedSource(items, items, batch_prompts=2, seed=0, render=RENDER)
    assert source.held_out()[0] is source.held_out(2)[0]
    assert (len(source.held_out(3)), len(source.held_out())) == (3, 4)
