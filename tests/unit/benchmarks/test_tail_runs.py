from __future__ import annotations

from collections import Counter

from benchmarks.tail_runs import groups_apart


def test_groups_that_only_one_run_has_trained_on_are_counted_after_each_step() -> None:
    ours = {1: Counter("ab"), 2: Counter("cd"), 3: Counter("ab")}
    theirs = {1: Counter("ac"), 2: Counter("da"), 3: Counter("bb")}
    # b against c; then ab-cd against aacd: b against a; then the same groups.
    assert groups_apart(ours, theirs) == [1, 1, 0]
