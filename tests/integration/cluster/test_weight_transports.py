"""Runs on Ray learn the same whichever way the weights travel."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.char_task import char_task
from tests.forked import Forked
from tidemill.telemetry.events import read_events
from tidemill.weights.node_folder import PREFIX, SHARED_MEMORY

pytestmark = pytest.mark.xdist_group("ray")

RECIPE = (
    'runtime = "ray"\n'
    + char_task(layers=2)
    + """\
[sampling]
max_new_tokens = 3
[scoring]
rewards = [{ kind = "length", target_tokens = 3 }]
[engine]
slots = 16
batch_invariant = true
[pool]
kind = "static"
workers = 2
[batch]
prompts = 8
group_size = 8
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 60
threads = 1
[eval]
every_steps = 0
"""
)
DEADLINE_S = 240.0


def ran(folder: Path, transport: str, *more: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    arguments = ["--run.dir", str(folder / transport), "--weights.transport", transport, "--json", *more]
    process = Forked("train", f"@{recipe}", *arguments, env=env)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def pulls(run: Path) -> dict[int, list[int]]:
    """Bytes that each worker pulled, by version."""
    found = defaultdict(list)
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "pull":
            found[int(event["version"])].append(int(event["nbytes"]))
    return found


@pytest.mark.slow  # tests/contract/test_weight_transports.py compares the bytes of each
@pytest.mark.timeout(800)
def test_all_transports_give_the_same_weights(tmp_path: Path) -> None:
    digests = {transport: ran(tmp_path, transport)["weights_digest"] for transport in ("object_store", "shm")}
    digests["http"] = ran(tmp_path, "http", "--weights.threads", "2")["weights_digest"]

    assert len(set(digests.values())) == 1, digests
    check_pulled_once(tmp_path / "shm", manifests=4000)


def check_pulled_once(run: Path, *, manifests: int) -> None:
    """Of two workers one pulled manifests only, unless the faster one had the next version already.

    That is most versions on an idle machine, and a quarter of them where one worker falls behind the other.
    """
    both = [sorted(each) for each in pulls(run).values() if len(each) == 2]
    assert sum(few < manifests < many for few, many in both) > 3, both
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}-{os.getuid()}-*"))


@pytest.mark.slow  # tests/unit/weights/test_node_folder.py counts the bytes
@pytest.mark.timeout(800)
def test_workers_share_the_rows_of_every_rank(tmp_path: Path) -> None:
    shards = ("--trainer.shards", "2")
    digests = {transport: ran(tmp_path, transport, *shards)["weights_digest"] for transport in ("object_store", "shm")}

    assert len(set(digests.values())) == 1, digests
    check_pulled_once(tmp_path / "shm", manifests=8000)
