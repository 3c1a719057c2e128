from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model_shapes import MODEL_SHAPES, VOCABULARY
from tidemill.models.attention import hidden_states, use_packed_attention, vocabulary_logits
from tidemill.models.token_tree import Tokens, build_tree, common_prefix
from tidemill.models.tree_attention import TreePlan


def tokens(*ids: int) -> Tokens:
    return np.array(ids, np.int32)


def test_common_prefix() -> None:
    assert common_prefix(tokens(1, 2, 3), tokens(1, 2, 4)) == 2
    assert common_prefix(tokens(1, 2), tokens(1, 2, 4)) == 2
    assert common_prefix(tokens(), tokens(1)) == 0


def test_shared_prefixes_become_one_node() -> None:
    # "ab" is shared by all three, "abc" by two: a b d | c e | c f  ->  a b c e f d in lexicographic order
    tree = build_tree([tokens(1, 2, 4), tokens(1, 2, 3, 5), tokens(1, 2, 3, 6)])
    assert tree.token_ids.tolist() == [1, 2, 3, 5, 6, 4]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 2]
    assert tree.ends.tolist() == [6, 6, 5, 4, 5, 6]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 5], [0, 1, 2, 3], [0, 1, 2, 4]]


def test_equal_and_contained_sequences_add_no_node() -> None:
    tree = build_tree([tokens(7, 8), tokens(7), tokens(7, 8), tokens()])
    assert tree.size == 2
    assert [path.tolist() for path in tree.paths] == [[0, 1], [0], [0, 1], []]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_every_path_spells_its_sequence_and_masks_are_its_ancestors(sequences: list[list[int]]) -> None:
    arrays = [np.array(sequence, np.int32) for sequence in sequences]
    tree = build_tree(arrays)
    assert tree.size == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    mask = tree.ancestor_mask(torch.device("cpu"))
    for array, path in zip(arrays, tree.paths, strict=True):
        assert tree.token_ids[path].tolist() == array.tolist()
        for depth, node in enumerate(path):
            assert torch.nonzero(mask[node])[:, 0].tolist() == path[: depth + 1].tolist()


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_packed_logits_equal_those_of_each_sequence_alone(shape: str) -> None:
    """Against transformers' own attention, longer than the sliding window, prefixes shared and not."""
    rng = np.random.default_rng(0)
    header = rng.integers(2, VOCABULARY, 9)
    tails = [(cut, rng.integers(2, VOCABULARY, 14)) for cut in (9, 9, 4, 0)]
    sequences = [np.concatenate([header[:cut], tail]).astype(np.int32) for cut, tail in tails]
    model = MODEL_SHAPES[shape]()
    with torch.no_grad():
        expected = [model(input_ids=torch.from_numpy(s).long()[None], use_cache=False).logits[0] for s in sequences]
        use_packed_attention(model)
        tree = build_tree(sequences)
        hidden = hidden_states(
            model, torch.from_numpy(tree.token_ids), torch.from_numpy(tree.depths), TreePlan(tree, torch.device("cpu"))
        )
        logits = vocabulary_logits(model, hidden)
    assert tree.size < sum(len(s) for s in sequences)
    for path, one in zip(tree.paths, expected, strict=True):
        torch.testing.assert_close(logits[torch.from_numpy(path)], one, rtol=1e-4, atol=1e-4)
