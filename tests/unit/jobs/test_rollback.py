"""A rollback on disk: repeated after a kill it gives the same; what it leaves behind is kept."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_run import make_prompt, make_trajectory
from tidemill.config.guard import AmendConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.evidence import GoldPair
from tidemill.jobs import rollback
from tidemill.jobs.rollback import _copy_later, _is_ahead, amended, amendments, roll_back, write_disputed
from tidemill.telemetry.jsonl import encode, write_atomically
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import CURRICULUM, RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore

STEPS, TARGET = 6, 4
AMEND = AmendConfig(kl_beta=0.2)
GOLD = {"rewards": [{"kind": "exact"}, {"kind": "numeric", "role": "gold", "weight": 0.0}]}


def write_weights(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w")


class Killed(BaseException):
    pass


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Six steps with metrics, samples, a curriculum, and checkpoints of every second step."""
    with RunDirectory.open(tmp_path / "run") as run:
        run.metrics.write_bytes(b"".join(encode({"step": step, "loss": step}) + b"\n" for step in range(STEPS + 1)))
        (run.path / CURRICULUM).write_bytes(
            b"".join(
                encode(line) + b"\n"
                for step in range(1, STEPS + 1)
                for line in ({"step": step + 1, "prompts": ["a"]}, {"step": step, "rewards": {"a": 1.0}})
            )
        )
        for step in range(1, STEPS + 1):
            (run.samples / f"step_{step:06d}.jsonl").write_bytes(encode({"step": step}) + b"\n")
        store = CheckpointStore(run.checkpoints, keep_last=9)
        for step in (2, 4, 6):
            store.write(step, write_weights)
        yield run


def contents(run: RunDirectory) -> dict[str, bytes]:
    """Files that a rollback changes."""
    ignored = ("manifest.json", "events.jsonl", "summary.json", "live.json", ".lock")
    files = (path for path in run.path.rglob("*") if path.is_file() and path.name not in ignored)
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files if "checkpoints" not in path.parts}


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def return_to(run: RunDirectory, target: int = TARGET) -> None:
    spec = RunSpec.model_validate({"run": {"dir": str(run.path)}})
    with Recorder(run, spec, stream=None) as recorder:
        roll_back(run, recorder, target=target, amend=AMEND)


def test_later_steps_move_aside_and_the_amendment_is_stored(run: RunDirectory) -> None:
    return_to(run)

    assert [each.step for each in CheckpointStore(run.checkpoints, keep_last=1).checkpoints()] == [2, 4]
    assert steps_of(run.metrics) == [0, 1, 2, 3, 4]
    assert [step for step, _, _ in run.sample_files()] == [1, 2, 3, 4]
    assert set(steps_of(run.path / CURRICULUM)) == {1, 2, 3, 4}
    aside = run.path / "abandoned" / "1"
    assert steps_of(aside / "metrics.jsonl") == [5, 6]
    assert sorted(path.name for path in (aside / "samples").iterdir()) == ["step_000005.jsonl", "step_000006.jsonl"]
    assert amendments(run) == [AMEND]


def test_a_second_rollback_has_a_folder_of_its_own(run: RunDirectory) -> None:
    return_to(run)
    return_to(run, 0)

    assert steps_of(run.path / "abandoned" / "2" / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert run.metrics.read_bytes() == b""
    assert len(amendments(run)) == 2


def test_killed_between_any_two_changes_and_repeated_it_gives_the_same(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = None
    for kill_at in range(100):
        changes = itertools.count(1)

        def killing(function: Callable[..., Any], at: int = kill_at, changes: Iterator[int] = changes) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if "live.json" not in str(args[0]) and next(changes) == at:
                    raise Killed
                return function(*args, **kwargs)

            return call

        copy = tmp_path / f"copy-{kill_at}"
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns(".lock"))
        with RunDirectory.open(copy) as other, monkeypatch.context() as patch:
            patch.setattr(rollback, "write_atomically", killing(write_atomically))
            patch.setattr(os, "truncate", killing(os.truncate))
            patch.setattr(Path, "rename", killing(Path.rename))
            patch.setattr(Path, "replace", killing(Path.replace))
            try:
                return_to(other)
                killed = False
            except Killed:
                killed = True
        with RunDirectory.open(copy) as other:
            if killed:
                return_to(other)
            found = contents(other)
        expected = expected or found
        assert found == expected, kill_at
        if kill_at and not killed:
            assert kill_at > 6
            return
    raise AssertionError("always killed")


@pytest.mark.parametrize(
    ("amend", "said"),
    [
        ({"reward_weights": {"exakt": 0.0}}, "no reward is named exakt"),
        ({"reward_weights": {"exact": 0.0}}, "no reward has a weight"),
        ({"reward_weights": {"numeric": 1.0}}, "only measured"),
    ],
)
def test_an_amendment_that_cannot_be_made_is_refused(amend: dict[str, Any], said: str) -> None:
    spec = RunSpec.model_validate({"scoring": GOLD, "guard": {"action": "rollback", "amend": amend}})

    with pytest.raises(UserError, match=said) as raised:
        amended(spec, spec.guard.amend)
    assert "guard.amend" in raised.value.where


def test_an_amended_run_differs_in_what_the_amendment_names_only() -> None:
    spec = RunSpec.model_validate({"scoring": GOLD})
    changed = amended(spec, AmendConfig(kl_beta=0.2, entropy_bonus=0.01, reward_weights={"exact": 2.0}))

    assert changed.algorithm.kl_beta == 0.2
    assert changed.algorithm.entropy_bonus == 0.01
    assert [reward.weight for reward in changed.scoring.rewards] == [2.0, 0.0]
    assert changed.batch == spec.batch


def test_disputed_samples_are_those_that_the_reward_likes_more_than_gold(run: RunDirectory) -> None:
    golds, proxies = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]
    lines, pairs = [], []
    for index, (proxy, gold) in enumerate(zip(proxies, golds, strict=True)):
        sample = make_trajectory(make_prompt(f"{index}+1="), "1")
        of = sample.sample_id
        key = {"prompt_id": of.prompt_id, "index": of.index, "step": 3}
        lines.append({**key, "prompt": f"{index}+1=", "completion": "1", "answer": str(index + 1)})
        pairs.append(GoldPair(prompt_id=of.prompt_id, index=of.index, step=3, proxy=proxy, gold=gold))
    (run.samples / "step_000003.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in lines))

    assert write_disputed(run, pairs) == 1
    (row,) = [json.loads(line) for line in (run.path / "disputed.jsonl").read_text().splitlines()]
    assert row == {"prompt": "0+1=", "completion": "1", "answer": "1", "reward": 1.0, "gold": 0.0, "step": 3}


def test_choices_of_prompts_that_rounds_started_before_the_checkpoint_are_kept(tmp_path: Path) -> None:
    lines = [{"step": step, "prompts": [f"p{step}"]} for step in range(1, 8)] + [{"step": 5, "rewards": {"p5": 1.0}}]
    choices, into = tmp_path / "curriculum.jsonl", tmp_path / "later.jsonl"
    choices.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    kept = _copy_later(choices, 3, into, kept=lambda line: _is_ahead(line, 5))
    assert [json.loads(line) for line in kept.splitlines()] == lines[:5]
    assert [json.loads(line) for line in into.read_bytes().splitlines()] == lines[3:]
    choices.write_bytes(kept)
    assert _copy_later(choices, 3, into, kept=lambda line: _is_ahead(line, 5)) == kept  # after a kill
    assert [json.loads(line) for line in into.read_bytes().splitlines()] == lines[3:]
