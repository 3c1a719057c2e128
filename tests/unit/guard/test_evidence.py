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


def test_about_the_share_is_chosen_and_never_more_than_most() -> None:
    counts = [len(chosen_for_gold(ids(64, seed=seed), share=0.1, most=64)) for seed in range(200)]
    assert 5.8 < sum(counts) / 200 < 7.0  # 6.4 ± 2.5 standard errors of sqrt(64 * 0.1 * 0.9 / 200) = 0.17
    assert max(len(chosen_for_gold(ids(64, seed=seed), share=0.1, most=8)) for seed in range(200)) == 8
    assert len(chosen_for_gold(ids(64), share=1.0, most=5)) == 5
    assert chosen_for_gold([], share=0.5, most=8) == []
