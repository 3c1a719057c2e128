"""The benchmarks of weights fail if nothing changed, nothing was fetched, or nothing went on meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import weights_threads
from benchmarks.weights import check_deltas
from benchmarks.weights_delta import Publish, check_publishes
from benchmarks.weights_node import NBYTES, Memory, Version, check_versions
from benchmarks.weights_pause import CASES, Pause, check_pause
from benchmarks.weights_threads import measured
from tidemill.weights.delta import apply_delta, encode_delta

PUBLISH = Publish(step=1, changed=0.01, pulled_nbytes=10, full_nbytes=100, encode_s=1.0, apply_s=1.0, identical=True)
PAUSE = Pause(
    case=CASES[1].name, rounds=1, samples=16, step_s=0.1, longest_gap_quiet_s=0.1, longest_gap_pulling_s=0.1,
    pull_s=0.2, swap_s=0.1, longest_gap_swap_s=1.0, pulled_nbytes=10, full=False,
)  # fmt: skip
MEMORY = Memory(private=1.0, files=0.0, pss=1.0)
DELTA = Version(fetched=40, once=10, retries=0, slowest_s=1.0, held=MEMORY, peak=MEMORY, samples=1, identical=True)
WHOLE = replace(DELTA, fetched=NBYTES, once=NBYTES)


@pytest.mark.parametrize(
    ("broken", "why"),
    [({"changed": 0.0}, "step 1: no changed weights"), ({"identical": False}, "step 1: the pulled weights differ")],
)
def test_a_publish_without_a_change_or_with_other_bytes_fails(broken: dict[str, Any], why: str) -> None:
    check_publishes([PUBLISH])
    with pytest.raises(RuntimeError, match=why):
        check_publishes([PUBLISH, replace(PUBLISH, **broken)])


def test_a_whole_snapshot_instead_of_a_delta_fails() -> None:
    check_deltas([PUBLISH])
    with pytest.raises(RuntimeError, match=r"no delta was pulled after the steps \[2\]"):
        check_deltas([PUBLISH, replace(PUBLISH, step=2, pulled_nbytes=100)])


@pytest.mark.parametrize(
    ("broken", "why"),
    [({"full": True}, "pulled a whole snapshot"), ({"longest_gap_pulling_s": 0.0}, "no steps while pulling")],
)
def test_a_pull_without_generation_meanwhile_fails(broken: dict[str, Any], why: str) -> None:
    check_pause(CASES[1], PAUSE)
    with pytest.raises(RuntimeError, match=why):
        check_pause(CASES[1], replace(PAUSE, **broken))


def test_a_pull_that_is_shorter_than_a_step_needs_no_step_meanwhile() -> None:
    check_pause(CASES[1], replace(PAUSE, pull_s=0.05, longest_gap_pulling_s=0.0))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ((WHOLE, replace(DELTA, fetched=0)), "workers fetched 0 of 10 bytes of version 1"),
        ((WHOLE, WHOLE), "version 1 was pulled as a whole snapshot"),
    ],
)
def test_a_version_that_is_not_fetched_or_no_delta_fails(versions: tuple[Version, ...], why: str) -> None:
    check_versions("shm", [WHOLE, DELTA])
    with pytest.raises(RuntimeError, match=f"shm: {why}"):
        check_versions("shm", versions)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_threads, "NBYTES", 1 << 20)
    monkeypatch.setattr(weights_threads, "ROUNDS", 1)


@pytest.mark.usefixtures("small")
def test_threads_that_do_not_work_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_threads, "encode_delta", lambda *arguments: encode_delta(*arguments[:3]))
    monkeypatch.setattr(weights_threads, "apply_delta", lambda *arguments: apply_delta(*arguments[:-1]))
    with pytest.raises(RuntimeError, match="0 and 0 threads worked, expected 1 and 2"):
        measured(0.05)


@pytest.mark.usefixtures("small")
def test_threads_that_change_the_result_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> None:
        apply_delta(*arguments)
        out = arguments[4]
        out[:1] = np.bitwise_xor(out[:1], 1)

    monkeypatch.setattr(weights_threads, "apply_delta", wrong)
    with pytest.raises(RuntimeError, match="threads changed the result"):
        measured(0.05)
