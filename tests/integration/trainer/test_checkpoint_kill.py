"""A checkpoint store whose writer is killed (-9) at random times, and a training run on top of it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.forked import Forked
from tidemill.models.checkpoint_manifest import damage
from tidemill.trainer.checkpoint_store import CheckpointStore

DEADLINE_S = 60.0
KILLS = 8


def test_a_killed_writer_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    store_folder, told = tmp_path / "store", tmp_path / "told"
    moments = random.Random(0)
    torn = acknowledged = 0
    for _ in range(KILLS):
        told.write_text("")
        with Forked(str(store_folder), str(told), target="tests.integration.trainer.endless_writer:main") as writer:
            until = time.monotonic() + DEADLINE_S
            while told.read_text().count("\n") < 2:  # one replaced and one new checkpoint
                assert writer.poll() is None and time.monotonic() < until
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.1))
            writer.kill()
        acknowledged = max(int(line) for line in told.read_text().splitlines(keepends=True) if line.endswith("\n"))
        torn += any(path.name.startswith(".") for path in store_folder.iterdir())
        visible = [path for path in store_folder.iterdir() if not path.name.startswith(".")]
        assert [damage(path) for path in visible] == [""] * len(visible)
        store = CheckpointStore(store_folder, keep_last=1)
        store.recover()
        assert not any(path.name.startswith(".") for path in store_folder.iterdir())
        latest = store.latest()
        assert latest.skipped == {}
        assert latest.checkpoint is not None
        assert latest.checkpoint.step >= acknowledged
        best = store.best()
        assert best is not None
        if acknowledged >= 2:
            assert best.score == 0.8  # step 2, 7, 12 ... (14 % 5 = 4): the first of them is kept
            assert best.step == 2
    assert acknowledged >= KILLS  # progress between the kills
    assert torn > 0  # some kills fell inside a write


@pytest.mark.timeout(240)
def test_training_killed_at_random_times_gives_the_same_weights(tmp_path: Path) -> None:
    with Forked(str(tmp_path), target="tests.integration.trainer.killed_training:main") as lives:
        out, err = lives.communicate(timeout=220)
    assert lives.returncode == 0, out + err
    uninterrupted, resumed, kills, _torn = out.split()[-4:]
    assert resumed == uninterrupted
    assert int(kills) >= 3  # a process writes at most 7 of 24 checkpoints
