"""Trains a tiny model twice: without interruption, and in processes killed (-9) at random times.

Prints the digest of both final weights, the number of kills, and how many were inside a checkpoint write.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch

from tests.killed_lives import killed_until_done
from tests.model_shapes import VOCABULARY, llama
from tidemill.config.learning import OptimizerConfig
from tidemill.models.weights_digest import weights_digest
from tidemill.trainer.checkpoint import restore_state, save_state
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.update import build_optimizer, clip_and_step

STEPS = 24
DEADLINE_S = 180.0


def run(root: Path, source: Path) -> None:
    """Train to the end from the newest checkpoint in `root`, with a checkpoint after every step."""
    model = llama()
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-2))
    torch.manual_seed(0)
    store = CheckpointStore(root, keep_last=1)
    store.recover()
    step = 0
    if latest := store.latest().checkpoint:
        step = restore_state(latest.path, model=model, optimizer=optimizer)["step"]
    while step < STEPS:
        step += 1
        ids = torch.randint(2, VOCABULARY, (2, 9))  # from the random state, which is saved as well
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0)
        counters = {"step": step, "digest": weights_digest(model)}
        save = partial(save_state, model=model, optimizer=optimizer, source=source, counters=counters)
        store.write(step, save)


def final_digest(root: Path) -> str:
    model = llama(seed=5)
    latest = CheckpointStore(root, keep_last=1).latest().checkpoint
    assert latest is not None
    counters = restore_state(latest.path, model=model, optimizer=build_optimizer(model, OptimizerConfig()))
    assert counters["step"] == STEPS
    assert counters["digest"] == weights_digest(model)
    return weights_digest(model)


def newest(root: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in root.glob("step_*")), default=0)


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    source, uninterrupted, killed = folder / "source", folder / "uninterrupted", folder / "killed"
    source.mkdir()
    started = time.monotonic()
    run(uninterrupted, source)
    per_step_s = (time.monotonic() - started) / STEPS
    torn = 0

    def count_torn() -> None:
        nonlocal torn
        torn += any(path.name.startswith(".writing") for path in killed.iterdir()) if killed.exists() else 0

    kills = killed_until_done(
        lambda: run(killed, source),
        newest=lambda: newest(killed),
        pause_s=per_step_s,
        until_s=started + DEADLINE_S,
        after_kill=count_torn,
    )
    sys.stdout.write(f"{final_digest(uninterrupted)} {final_digest(killed)} {kills} {torn}\n")
    return 0
