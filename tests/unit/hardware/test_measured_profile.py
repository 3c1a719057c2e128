from __future__ import annotations

import msgspec
import pytest

from tests.trajectories import group as make_group
from tests.trajectories import trajectory
from tidemill.core.records import Group
from tidemill.hardware.measured_profile import MeasuredEngine, MeasuredTrainer, Packing

ENGINE = MeasuredEngine(
    slots=4, pass_s=1.0, row_s=0.1, context_token_s=0.01, drawn_s=0.2, prefill_token_s=0.05, new_prompt_share=0.5
)


def test_engine_passes() -> None:
    # 1 + 2 * 0.1 + 30 * 0.01 + 3 * 0.2 + 4 * 0.05
    assert ENGINE.forward_s(rows=2, context_tokens=30, drawn=3, prefilled=4) == pytest.approx(2.3)
    # Three passes of two rows over 30, 32 and 34 tokens: 3 * (1 + 0.2 + 0.4) + 96 * 0.01
    assert ENGINE.decode_s(2, 30, 3) == pytest.approx(5.76)
    assert ENGINE.decode_s(0, 0, 3) == 0.0
    assert ENGINE.prefill_s(10) == pytest.approx(10 * 0.5 * 0.05)
    assert [ENGINE.distinct(depth) for depth in (0, 1, 9)] == [1.0, 1.0, 1.0]
    shared = msgspec.structs.replace(ENGINE, new_by_depth=(0.5, 0.75))
    assert [shared.distinct(depth) for depth in (0, 1, 2, 9)] == [1.0, 0.5, 0.75, 0.75]


def test_packed_tokens_of_a_group() -> None:
    packing = Packing(prompt_tokens=5.0, new_by_depth=(0.5, 0.75), learned_share=1.0)
    # The last token is not read. Of a completion of 2: 0.5; of 3: 0.5 + 0.75; of 5, beyond what was seen: + 2 * 0.75.
    assert packing.packed([2, 3, 5]) == pytest.approx(5 + 0.5 + 1.25 + 2.75)
    assert Packing(prompt_tokens=5.0, new_by_depth=(), learned_share=0.5).packed([3]) == pytest.approx(0.5 * (5 + 2))


def group(tokens: int) -> Group:
    """One sample."""
    return make_group(0, [trajectory([1], [2] * tokens, 1.0)])


def trainer(**changes: object) -> MeasuredTrainer:
    packing = Packing(prompt_tokens=0.0, new_by_depth=(1.0,), learned_share=1.0)
    settings = {"step_s": 10.0, "token_s": 0.1, "pair_s": 0.01, "packing": packing, "batch_groups": 3}
    return MeasuredTrainer(**{**settings, "microbatch_tokens": 20, **changes})  # type: ignore[arg-type]


def test_a_full_microbatch_is_trained() -> None:
    one = trainer(first_s=5.0)
    # Groups of 9 tokens each (the last of 10 is not read): two fit 20, the third makes them full:
    # 18 * 0.1 + 18² * 0.01.
    assert [one.accumulate_s(group(10)) for _ in range(3)] == pytest.approx([0.0, 0.0, 1.8 + 3.24])
    # The rest at the end, 9 * 0.1 + 9² * 0.01, the optimizer's step, and once what warming up takes.
    assert one.commit_s() == pytest.approx(5 + 10 + 0.9 + 0.81)
    assert one.take_counts() == (27.0, 324.0 + 81.0)
    assert one.commit_s() == pytest.approx(10.0)


def test_later_minibatches_and_epochs_train_at_commit() -> None:
    one = trainer(minibatches=3, epochs=2)
    # Only the first group is of the first minibatch; it waits in the open microbatch.
    assert [one.accumulate_s(group(10)) for _ in range(3)] == [0.0, 0.0, 0.0]
    # Six steps; 9 tokens in one pass, 18 in one, and all 27 again in two, of 20 and 7.
    assert one.commit_s() == pytest.approx(60 + 5.4 + 0.01 * (81 + 324 + 400 + 49))


def test_whole_batch_advantages_train_at_commit() -> None:
    one = trainer(waits=True)
    assert [one.accumulate_s(group(10)) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert one.commit_s() == pytest.approx(10 + 2.7 + 0.01 * (400 + 49))
