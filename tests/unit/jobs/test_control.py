from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.control_runs import SMALL, STEPS, session
from tests.killed_lives import killed_until_done
from tidemill.config.schema import RunSpec
from tidemill.core.chunks import ChunkAnswer, ChunkRequest
from tidemill.core.errors import GuardStop, UserError
from tidemill.jobs import control
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.control import episode_values, evaluation_fields, headline
from tidemill.robots.episodes import PlayedEpisodes
from tidemill.robots.policy_arrays import pack
from tidemill.robots.policy_folder import read_policy
from tidemill.runtime.simulators import LocalChunks
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import read_metrics


def history(directory: Path) -> list[tuple[int, str, float]]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [(line.step, line.weights_digest, line.values.get("value_loss", 0.0)) for line in lines]


def files(checkpoint: str) -> dict[str, bytes]:
    """The tensors of a checkpoint. (Random states of the process are not used.)"""
    found = Path(checkpoint).rglob("*.safetensors")
    return {path.name: path.read_bytes() for path in found if path.name != "random.safetensors"}


class StopAt(Callback):
    def __init__(self, step: int, number: signal.Signals | None = None) -> None:
        self.step, self.number = step, number

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step and self.number:
            os.kill(os.getpid(), self.number)
        elif step == self.step:
            self.stop("tested")


def test_a_run_writes_its_policy_evaluations_and_metrics(tmp_path: Path) -> None:
    summary = session(tmp_path / "run", control={"eval_episodes": 64}, trainer={"steps": 2})
    assert summary["finished"]
    assert summary["model"] == "swingup"
    stored = read_policy(Path(summary["policy"]), where="test")
    assert stored.description.joints == ("slide",)
    assert stored.description.inputs("policy") == 2 * 5
    assert stored.description.returns == summary["figures"]["return_mean"]
    assert stored.weights["policy.layers.0.weight"].shape == (16, 10)
    events = [each for each in read_events(tmp_path / "run" / "events.jsonl") if each["event"] == "robot_evaluation"]
    assert [(each["when"], each["step"], each["episodes"]) for each in events] == [("before", 0, 64), ("after", 2, 64)]
    assert set(events[0]["terms"]) == {"upright", "centre", "effort", "spin", "left_rail"}
    assert "(n = 64)" in summary["headline"]
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].values
    names = ("learning_rate", "approx_kl", "entropy", "value_loss", "grad_norm", "robot/action_std", "robot/invalid")
    assert set(names) <= set(last)
    again = session(tmp_path / "run", control={"eval_episodes": 64}, trainer={"steps": 2})
    assert again["already_finished"]
    assert again["headline"] == summary["headline"]


@pytest.mark.parametrize("lag", [0, 1])
def test_interrupted_runs_have_the_bits_of_an_undisturbed_one(tmp_path: Path, lag: int) -> None:
    """Stopped by a callback and by SIGTERM, killed (-9) at random moments, resumed with more steps."""
    settings = {"control": SMALL["control"] | {"max_policy_lag": lag}}
    began = time.monotonic()
    calm = session(tmp_path / "calm", **settings)
    per_step_s = (time.monotonic() - began) / STEPS
    stopped = session(tmp_path / "stopped", StopAt(3), **settings)
    assert stopped["interrupted"]
    assert stopped["policy"].endswith("step_3")
    stopped = session(tmp_path / "stopped", StopAt(5, signal.SIGTERM), **settings)
    assert stopped["interrupted"]
    stopped = session(tmp_path / "stopped", **settings)
    session(tmp_path / "longer", trainer={"steps": 3, "threads": 1}, **settings)
    longer = session(tmp_path / "longer", **settings)

    def newest() -> int:
        found = (tmp_path / "killed" / "checkpoints").glob("step_*")
        return max((int(path.name[5:]) for path in found), default=0)

    def life() -> None:
        session(tmp_path / "killed", **settings)

    kills = killed_until_done(life, newest=newest, pause_s=per_step_s, until_s=began + 60)
    killed = session(tmp_path / "killed", **settings)
    assert kills > 0
    assert killed["already_finished"]
    for name, summary in {"stopped": stopped, "longer": longer, "killed": killed}.items():
        assert history(tmp_path / name) == history(tmp_path / "calm"), name
        episodes = [(tmp_path / each / "training_episodes.jsonl").read_bytes() for each in (name, "calm")]
        assert episodes[0] == episodes[1] != b"", name
        assert files(summary["policy"]) == files(calm["policy"]), name


class Spy(LocalChunks):
    """Records what is requested, and may report worlds whose physics was not finite."""

    def __init__(self, setups: Any, invalid: int = 0) -> None:
        super().__init__(setups)
        self.asked: list[tuple[int, int]] = []  # iteration, version
        self.invalid = invalid

    async def run(self, version: int, requests: Sequence[ChunkRequest]) -> list[ChunkAnswer]:
        self.asked.append((requests[0].key.iteration, version))
        answers = await super().run(version, requests)
        invalid = pack({"invalid": np.array(self.invalid)})
        return [msgspec.structs.replace(each, experience=each.experience | invalid) for each in answers]


def spied(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Spy]:
    made: list[Spy] = []

    @asynccontextmanager
    async def opened(spec: RunSpec, setups: Any, **_: Any) -> AsyncIterator[Spy]:
        made.append(Spy(setups, **settings))
        yield made[-1]

    monkeypatch.setattr(control, "open_chunks", opened)
    return made


@pytest.mark.parametrize(
    ("lag", "first", "second"),
    [
        (0, [(0, 0), (1, 1), (2, 2)], [(2, 2), (3, 3)]),
        (1, [(0, 0), (1, 0), (2, 1)], [(2, 1), (3, 2)]),
    ],
)
def test_the_version_of_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int, first: list[Any], second: list[Any]
) -> None:
    spies = spied(monkeypatch)
    settings = {"control": SMALL["control"] | {"max_policy_lag": lag}, "trainer": {"steps": 4, "threads": 1}}
    session(tmp_path / "run", StopAt(2), **settings)
    session(tmp_path / "run", **settings)
    assert spies[0].asked[:2] == first[:2]
    assert spies[0].asked == first[: len(spies[0].asked)]
    assert spies[1].asked == second


def test_physics_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spied(monkeypatch, invalid=1)
    with pytest.raises(GuardStop, match=r"iteration 1 had to reset 1 of 64 worlds \(1.6 %\)"):
        session(tmp_path / "run")


def test_an_evaluation_whose_physics_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, invalid=1)
    for _ in range(2):  # also when it is started again
        with pytest.raises(GuardStop, match=r"the evaluation before training had to reset 1 of 64 worlds"):
            session(tmp_path / "run", control=SMALL["control"] | {"eval_episodes": 64})
    evaluations = [event for event in read_events(tmp_path / "run" / "events.jsonl") if "when" in event]
    assert [event["invalid"] for event in evaluations] == [1, 1]


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    session(tmp_path / "run", trainer={"steps": 1, "threads": 1})
    with pytest.raises(UserError, match=r"control.gamma = 0.9, the run has 0.99"):
        session(tmp_path / "run", control=SMALL["control"] | {"gamma": 0.9})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"actor": ["polisy"]}, 'no group of observations "polisy"'),
        ({"criticc": ["policy"]}, 'no policy "criticc"'),
    ],
)
def test_unknown_groups_are_refused(tmp_path: Path, groups: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        session(tmp_path / "run", control=SMALL["control"] | {"obs_groups": groups})
    assert "did you mean" in raised.value.hint


def test_figures_of_an_evaluation() -> None:
    figures = {
        "return": np.array([1.0, 2.0, 3.0, 6.0]),
        "success": np.array([True, True, True, False]),
        "fell": np.array([False, False, False, True]),
        "figure/speed": np.array([1.0, 1.0, 2.0, 2.0]),
        "term/upright": np.array([0.0, 0.0, 0.0, 4.0]),
    }
    fields = evaluation_fields(PlayedEpisodes(figures=figures, chunks=()))
    # Wilson of 3 of 4: (0.75 + 0.48 ± 1.96 sqrt(0.1875 / 4 + 0.96 / 16)) / 1.96
    assert fields["success_interval"] == pytest.approx([0.3006, 0.9544], abs=1e-3)
    expected = {
        "return_mean": 3.0,
        "success": 0.75,
        "falls": 0.25,
        "figures": {"speed": 1.5},
        "terms": {"upright": 1.0},
    }
    assert {name: fields[name] for name in expected} == expected
    assert headline(fields, fields, 60) == "success 0.75 -> 0.75 (n = 4), return 3 -> 3 in 60 iterations"
    assert "invalid" not in fields


def test_an_evaluation_may_have_no_success() -> None:
    figures = {"return": np.array([1.0, 5.0]), "fell": np.array([True, False])}
    chunk = {"invalid": np.array(1), "rewards": np.zeros((64, 1))}
    fields = evaluation_fields(PlayedEpisodes(figures=figures, chunks=(chunk, chunk)))
    assert fields == {"episodes": 2, "return_mean": 3.0, "falls": 0.5, "invalid": 2, "figures": {}, "terms": {}}
    assert headline(fields, fields, 60) == "falls 0.50 -> 0.50 (n = 2), return 3 -> 3 in 60 iterations"


def test_figures_of_an_iteration() -> None:
    chunks: list[Any] = [
        {"invalid": np.array(1), "episode/return": np.array([1.0]), "episode/fell": np.array([True])},
        {"invalid": np.array(0)},  # no episode ended
        {"invalid": np.array(2), "episode/return": np.array([2.0, 6.0]), "episode/fell": np.array([False, False])},
    ]
    values = episode_values(chunks)
    assert values == {"robot/episodes": 3, "robot/invalid": 3, "robot/return_mean": 3.0, "robot/falls": 1 / 3}
    # A shard whose environments mention no success has none: 1 of 3.
    assert episode_values([chunks[0] | {"episode/success": np.array([True])}, *chunks[1:]])["robot/success"] == 1 / 3
    assert episode_values(chunks[1:2]) == {"robot/episodes": 0, "robot/invalid": 0}
