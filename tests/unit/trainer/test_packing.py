from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.trajectories import Part, agent_trajectory, trajectory
from tidemill.core.records import PolicyVersion, SourceRun, Trajectory, VersionRun, pack_logprobs
from tidemill.trainer.packing import (
    FloatArray,
    Microbatch,
    WeightedSample,
    kept_cache_of,
    pack,
    rows_of,
    split_by_sample,
    split_by_tokens,
)

CPU = torch.device("cpu")


def weighted(t: Trajectory, advantage: float | FloatArray = 0.0) -> WeightedSample:
    return WeightedSample(trajectory=t, advantage=advantage, token_weight=1.0)


def branched(index: int = 0) -> Trajectory:
    """Prompt 1 2; turn 9 8, observation 5, turn 7; then the context 1 2 3, turn 6 4, observation 5."""
    parts: list[Part] = [("action", [9, 8]), ("observation", [5]), ("action", [7]), ("context", [1, 2, 3])]
    return agent_trajectory([1, 2], [*parts, ("action", [6, 4]), ("observation", [5])], [0.0, 0.0, 1.0], index=index)


def test_a_context_starts_a_row() -> None:
    first, second = rows_of(branched())
    assert first.token_ids.tolist() == [1, 2, 9, 8, 5, 7]
    assert first.trained.tolist() == [2, 3, 5]
    assert second.token_ids.tolist() == [1, 2, 3, 6, 4]  # nothing is predicted from the last observation
    assert second.trained.tolist() == [3, 4]


def test_a_context_without_a_turn_is_not_computed() -> None:
    t = agent_trajectory([1, 2], [("action", [3]), ("context", [4, 5, 6])], [0.0])
    assert [row.token_ids.tolist() for row in rows_of(t)] == [[1, 2, 3]]


def test_a_single_completion_is_one_row() -> None:
    (row,) = rows_of(trajectory([1, 2, 3], [4, 5], 1.0))
    assert (row.token_ids.tolist(), row.trained.tolist()) == ([1, 2, 3, 4, 5], [3, 4])
    assert rows_of(trajectory([1, 2, 3], [], 1.0)) == []


def test_rows_share_prefixes_and_each_token_is_predicted_in_its_row() -> None:
    t = branched()
    # rows without their last tokens: 1 2 9 8 5 and 1 2 3 6; the tree is 1 2 (3 6 | 9 8 5), 7 nodes instead of 9
    microbatch = pack([weighted(t)], CPU)
    assert (microbatch.tree.size, microbatch.unpacked_tokens) == (7, 9)
    assert microbatch.tree.token_ids.tolist() == [1, 2, 3, 6, 9, 8, 5]
    # 9 is predicted at node 1 (2), 6 at node 2 (3), 4 at node 3 (6), 8 at node 4 (9), 7 at node 6 (5)
    assert microbatch.head_nodes.tolist() == [1, 2, 3, 4, 6]
    assert microbatch.targets.tolist() == [9, 6, 4, 8, 7]


def test_results_return_in_buffer_order() -> None:
    """Node order is another order than that of the buffer, and the rows of samples interleave."""
    samples = [weighted(branched()), weighted(trajectory([1, 2], [3, 6], 0.0)), weighted(branched(1))]
    microbatch = pack(samples, CPU)
    assert [part.tolist() for part in split_by_sample(microbatch.targets, microbatch.samples)] == [
        [9, 8, 7, 6, 4], [3, 6], [9, 8, 7, 6, 4],
    ]  # fmt: skip


def ordered(microbatch: Microbatch, values_T: torch.Tensor) -> list[float]:
    (part,) = split_by_sample(values_T, microbatch.samples)
    return [round(float(each), 3) for each in part]


def test_the_columns_of_a_branched_trajectory() -> None:
    """Versions and sources are ranges of completion positions: 9 8 | 5 | 7 | 1 2 3 | 6 4 | 5 are 0 to 9."""
    number = [VersionRun(version=PolicyVersion(number=n, digest=""), start=s, end=e) for n, s, e in
              [(3, 0, 1), (4, 1, 4), (5, 7, 9)]]  # fmt: skip
    t = agent_trajectory(
        [1, 2], [("action", [9, 8]), ("observation", [5]), ("action", [7]), ("context", [1, 2, 3]),
                 ("action", [6, 4]), ("observation", [5])], [0.0, 0.0, 1.0],
        versions=tuple(number),
        sources=(SourceRun(source="a/1", start=0, end=4), SourceRun(source="b/2", start=7, end=9)),
        rollout_logprobs=pack_logprobs([-0.1, -0.2, -0.3, -0.4, -0.5]),
        publish_logprobs=(pack_logprobs([-1.1, -1.2, -1.3, -1.4, -1.5]),),
    )  # fmt: skip
    sample = WeightedSample(
        trajectory=t,
        advantage=np.array([1.0, 1.0, 2.0, 3.0, 3.0], np.float32),
        token_weight=0.2,
        values=np.array([0.1, 0.2, 0.3, 0.4, 0.5], np.float32),
    )
    microbatch = pack([sample], CPU, version=5)
    assert ordered(microbatch, microbatch.lags) == [2, 1, 1, 0, 0]
    assert microbatch.tokens_by_lag == {2: 1, 1: 2, 0: 2}
    assert [microbatch.sources[int(row)][0] for row in ordered(microbatch, microbatch.source_rows)] == [
        "a/1", "a/1", "a/1", "b/2", "b/2",
    ]  # fmt: skip
    assert ordered(microbatch, microbatch.rollout_logprobs) == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert microbatch.publish_logprobs.shape == (1, 5)
    assert ordered(microbatch, microbatch.publish_logprobs[0]) == [-1.1, -1.2, -1.3, -1.4, -1.5]
    assert ordered(microbatch, microbatch.advantages) == [1, 1, 2, 3, 3]
    assert microbatch.values is not None
    assert ordered(microbatch, microbatch.values) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_tokens_from_kept_caches_are_of_a_newer_version_than_the_first_of_their_lease_and_turn() -> None:
    """Places 0 to 9 as above: the first turn changes its version on lease 1, the third turn its lease and version."""
    runs = [(3, 0, 1), (4, 1, 7), (4, 7, 8), (5, 8, 9)]
    t = agent_trajectory(
        [1, 2], [("action", [9, 8]), ("observation", [5]), ("action", [7]), ("context", [1, 2, 3]),
                 ("action", [6, 4, 3]), ("observation", [5])], [0.0, 0.0, 1.0],
        versions=tuple(
            VersionRun(version=PolicyVersion(number=n, digest=""), start=s, end=e) for n, s, e in [*runs, (6, 9, 10)]
        ),
        sources=(
            SourceRun(source="a/1", lease="1", start=0, end=8),
            SourceRun(source="b/2", lease="2", start=8, end=10),
        ),
    )  # fmt: skip
    # 9 of version 3, 8 of 4 | 7 of 4, in another turn | 6 of 4, 4 of 5 on another lease, 3 of 6 on the same
    assert kept_cache_of(t).tolist() == [False, True, False, False, False, True]
    microbatch = pack([weighted(t)], CPU, version=6, keep_cache=True)
    assert microbatch.kept_cache is not None
    kept, fresh = microbatch.kept_cache
    kept_T = torch.zeros(microbatch.tokens).index_fill(0, kept, 1.0)
    assert ordered(microbatch, kept_T) == [0, 1, 0, 0, 0, 1]
    assert sorted(torch.cat([kept, fresh]).tolist()) == list(range(6))
    assert pack([weighted(t)], CPU, version=6).kept_cache is None
    assert kept_cache_of(trajectory([1, 2, 3], [], 1.0)).tolist() == []


def test_the_rows_of_a_sample_stay_in_one_microbatch() -> None:
    samples = [weighted(branched(0)), weighted(branched(1)), weighted(trajectory([50] * 4, [51], 0.0))]
    # both agents together are 7 nodes, the last sample is 4 more
    runs = split_by_tokens(samples, lambda sample: sample.input_ids, 10)
    assert [len(run) for run in runs] == [2, 1]


def step_wise(turns: int, *, prompt: int, action: int, observation: int, thinking: int) -> Trajectory:
    """An agent whose every turn has a context of its own: the history, with or without its thinking."""
    token, context, parts = iter(range(1, 100_000)), list[int](), list[Part]()

    def words(count: int) -> list[int]:
        return [next(token) for _ in range(count)]

    start = words(prompt)
    context += start
    for number in range(turns):
        if number:
            parts.append(("context", list(context)))
        said, answer = words(action), words(observation)
        parts += [("action", said), ("observation", answer)]
        context += [*said[thinking:], *answer]
    return agent_trajectory(start, parts, [0.0] * turns)


def computed(t: Trajectory) -> tuple[int, int]:
    microbatch = pack([weighted(t)], CPU)
    return microbatch.tree.size, microbatch.unpacked_tokens


def test_tokens_computed_for_eight_turns_as_step_wise_rows() -> None:
    """Prompt 128, turns of 48 tokens, observations of 16.

    Separate rows: row k has the prompt, k turns with observations and 47 tokens that predict:
    8 * (128 + 47) + 64 * (0 + 1 + ... + 7) = 1400 + 64 * 28 = 3192. The tree: the last row alone, 128 + 7 * 64 + 47 =
    623. That is 5.12 times fewer.
    """
    tree, rows = computed(step_wise(8, prompt=128, action=48, observation=16, thinking=0))
    assert (tree, rows) == (623, 3192)
    assert rows / tree >= 5


def test_tokens_computed_for_eight_turns_without_their_thinking() -> None:
    """As above with a prompt of 512, and contexts without the first 24 tokens of each earlier turn.

    Separate rows: 8 * (512 + 47) + 40 * 28 = 5592. The tree shares the histories, not the thinking: the prompt, 7
    histories of 24 + 16, and in each of the 8 rows 47 tokens: 512 + 280 + 376 = 1168. That is 4.8 times fewer.
    """
    assert computed(step_wise(8, prompt=512, action=48, observation=16, thinking=24)) == (1168, 5592)


def test_a_group_shares_more_than_a_sample() -> None:
    """Four agents share the prompt: 4 * 3192 tokens in rows, 128 + 4 * (623 - 128) = 2108 in the tree, 6.06 times."""

    def shifted(index: int, parts: Sequence[Part]) -> list[Part]:
        return [(role, [token + 100_000 * index if token > 128 else token for token in ids]) for role, ids in parts]

    one = step_wise(8, prompt=128, action=48, observation=16, thinking=0)
    ids = np.frombuffer(one.token_ids, np.int32).tolist()
    parts: list[Part] = [(s.role, ids[s.start : s.end]) for s in one.segments if s.role != "prompt"]
    samples = [agent_trajectory(ids[:128], shifted(index, parts), [0.0] * 8, index=index) for index in range(4)]
    microbatch = pack([weighted(t) for t in samples], CPU)
    assert (microbatch.tree.size, microbatch.unpacked_tokens) == (2108, 12768)
