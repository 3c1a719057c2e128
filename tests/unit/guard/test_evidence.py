from __future__ import annotations

from tidemill.core.records import SampleId
from tidemill.guard.evidence import chosen_for_gold


def ids(count: int, *, seed: int = 0) -> list[SampleId]:
    return [
        SampleId(run_seed=seed, purpose="train", prompt_id=f"p{index // 8}", epoch=0, index=index % 8)
        for index in range(count)
    ]


def test_the_choice_is_a_function_of_the_ids_and_not_of_their_order() -> None:
    samples = ids(64)
    chosen = {samples[index] for index in chosen_for_gold(samples, share=0.1, most=8)}
    backwards = samples[::-1]
    assert {backwards[index] for index in chosen_for_gold(backwards, share=0.1, most=8)} == chosen


def test_the_share_of_a_batch_is_chosen_at_least_one_and_at_most_so_many() -> None:
    # 0.1 of 64 is 6.4; of 100, 10, more than 8; of 2, 0.2.
    counts = [len(chosen_for_gold(ids(count), share=0.1, most=8)) for count in (64, 100, 2, 0)]
    assert counts == [6, 8, 1, 0]
    assert len(chosen_for_gold(ids(64), share=1.0, most=5)) == 5
