"""A run with a judge as gold and verdicts of people: what was paid and judged outlives the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.scoring.test_http_rewards import Server
from tests.unit.scoring.test_judge import says, stored
from tidemill.config.load import load_spec
from tidemill.guard.checks import read_pairs
from tidemill.guard.verdicts import append_verdict
from tidemill.jobs.train import train
from tidemill.telemetry.events import GOLD, read_events
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import read_samples

MODEL = [
    "--model.source",
    "char",
    "--model.char.layers",
    "1",
    "--model.char.hidden_size",
    "16",
    "--task.kind=arithmetic",
]
SMALL = ["--batch.prompts", "2", "--batch.group_size", "2", "--sampling.max_new_tokens", "4", "--trainer.threads", "1"]
GUARD = ["--guard.probes", "false", "--guard.canary_every", "0", "--guard.gold_share", "1", "--eval.every_steps", "0"]


def session(folder: Path, server: Server, *, steps: int, calls: int) -> tuple[list[int], list[str]]:
    """Number of pairs of each step, and the sources of all."""
    base = server.url.removesuffix("/score")
    judge = f'kind = "judge", url = "{base}", judge_model = "j", most_calls = {calls}, role = "gold", weight = 0'
    rewards = f'[{{ kind = "exact" }}, {{ {judge} }}]'
    options = ["--run.dir", str(folder), "--trainer.steps", str(steps), "--scoring.rewards", rewards]
    train(load_spec([*MODEL, *SMALL, *GUARD, *options]))
    events = [event for event in read_events(RunDirectory(folder).events) if event["event"] == GOLD]
    return [event["pairs"] for event in events], [pair.source for pair in read_pairs(RunDirectory(folder).ledger)]


def test_a_budget_and_verdicts_outlive_a_session(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    server.reply = lambda _: says("SCORE: 5")
    try:
        folder = tmp_path / "run"
        assert session(folder, server, steps=1, calls=3) == ([3], ["batch"] * 3)
        assert capfd.readouterr().err.count("its 3 calls are used up") == 1
        run = RunDirectory(folder)
        seen = next(iter(read_samples(run.samples / samples_name(1))))
        append_verdict(run.checks, run.read_manifest()["run_id"], seen, 1.0)
        # One more call is allowed: it is made for the first sample of the next step.
        assert session(folder, server, steps=2, calls=4) == ([3, 2], [*["batch"] * 3, "person", "batch"])
        assert session(folder, server, steps=3, calls=4)[0] == [3, 2, 0]  # the verdict counts once
        assert len(server.requests) == 4
        assert stored(run.judges).count('"calls":1') == 4
    finally:
        server.close()
