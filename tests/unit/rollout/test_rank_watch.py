"""Tests of `rollout.engines.vllm.rank_watch`, with processes that only sleep."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from tidemill.core.errors import WorkerLost
from tidemill.rollout.engines.vllm import rank_watch
from tidemill.rollout.engines.vllm.rank_watch import RankWatch


@pytest.fixture
def ranks() -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = [
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)) for _ in range(2)
    ]
    for each in processes:
        each.start()
    yield processes
    for each in processes:
        each.kill()
        each.join()


def test_a_rank_that_ends_is_a_lost_worker_and_no_crash(ranks: list[BaseProcess]) -> None:
    watch = RankWatch(ranks)
    ranks[1].kill()
    for _ in range(2):
        with pytest.raises(WorkerLost, match=r"rank 1 of 2 of vLLM ended \(exit code -9\)"), watch.calls():
            raise RuntimeError("cancelled")
    ranks[0].join(5.0)
    assert ranks[0].exitcode == -9


def test_an_error_that_a_rank_reports_is_a_crash_which_ends_all(
    ranks: list[BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "REAP_S", 0.1)
    watch = RankWatch(ranks)
    with pytest.raises(RuntimeError, match="a rank of vLLM failed: no kernel"), watch.calls():
        raise RuntimeError("no kernel")
    for each in ranks:
        each.join(5.0)
    assert [each.exitcode for each in ranks] == [-9, -9]


def test_an_error_of_the_only_rank_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="no kernel"), RankWatch([]).calls():
        raise ValueError("no kernel")
