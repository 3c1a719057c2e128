"""Errors of a critic process that is silent, dies, or does not see the run directory, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from tests.actors_here import ActorHere
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, TrainerLost, UserError
from tidemill.runtime.cluster.ray_critic import CriticActor, RayCritic

PPO = {"model": {"source": "char", "char": {"hidden_size": 16, "layers": 1, "heads": 2}}, "algorithm": {"name": "ppo"}}


@pytest.fixture
def critic(monkeypatch: pytest.MonkeyPatch) -> RayCritic:
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return RayCritic(ActorHere(CriticActor()))


def _started(critic: RayCritic, folder: Path) -> RayCritic:
    spec = RunSpec.model_validate(PPO).model_dump_json()
    assert critic.start(spec, threads=1, checkpoints=folder / "checkpoints") == "cpu"
    return critic


def test_a_critic_that_was_not_started_raises(critic: RayCritic) -> None:
    with pytest.raises(TidemillError, match="has not been started"):
        critic.step(1.0)()


def test_the_written_state_is_read_back_and_the_probe_file_is_removed(critic: RayCritic, tmp_path: Path) -> None:
    _started(critic, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())
    (tmp_path / "state").mkdir()
    critic.write_state(tmp_path / "state")
    critic.read_state(tmp_path / "state")
    assert critic.state_bytes() > 0
    assert critic.step(1.0)().keys() == {"value_grad_norm"}  # without any update


def test_a_machine_that_does_not_see_the_run_directory_is_refused_before_loading(
    critic: RayCritic, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="does not see the run directory") as caught:
        critic._call(CriticActor.start, "", 1, str(tmp_path / "nowhere" / "seen"))()
    assert caught.value.where == "placement.critic"


def test_a_checkpoint_written_to_another_folder_is_refused(
    critic: RayCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere: Callable[..., Any] = lambda *_, **__: lambda: ["model.safetensors"]  # noqa: E731
    monkeypatch.setattr(critic, "_call", elsewhere)
    with pytest.raises(TidemillError, match=r"wrote model\.safetensors, but the trainer does not see it"):
        critic.write_state(tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GetTimeoutError("late"), r"the critic died: no answer to `step` within 7200 s\n  check its machine"),
        (ActorDiedError(), r"the critic died: its process was killed"),
    ],
)
def test_the_metrics_of_a_step_raise_when_the_critic_died(
    critic: RayCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    _started(critic, tmp_path)
    promise = critic.step(1.0)

    def gone(answer: object, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", gone)
    with pytest.raises(TrainerLost, match=message) as caught:
        promise()
    assert "run the same command again" in str(caught.value)
