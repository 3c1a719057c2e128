"""A critic's process that is silent, dies, sees no run directory or writes elsewhere: in words, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, TrainerLost, UserError
from tidemill.runtime.cluster.ray_calls import encode, read_answer
from tidemill.runtime.cluster.ray_critic import CriticActor, CriticPlan, RayCritic

PPO = {"model": {"source": "char", "char": {"hidden_size": 16, "layers": 1, "heads": 2}}, "algorithm": {"name": "ppo"}}


class LocalHandle:
    """Calls an actor's methods at once, in this process, as Ray would through a handle."""

    def __init__(self, actor: CriticActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


@pytest.fixture
def critic(monkeypatch: pytest.MonkeyPatch) -> RayCritic:
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return RayCritic(LocalHandle(CriticActor()))


def _started(critic: RayCritic, folder: Path) -> RayCritic:
    spec = RunSpec.model_validate(PPO).model_dump_json()
    assert critic.start(spec, threads=1, checkpoints=folder / "checkpoints") == "cpu"
    return critic


def test_a_critic_that_was_never_started_says_so(critic: RayCritic) -> None:
    with pytest.raises(TidemillError, match="has not been started"):
        critic.step(1.0)()


def test_what_it_wrote_is_read_back_and_leaves_no_trace_of_the_start(critic: RayCritic, tmp_path: Path) -> None:
    _started(critic, tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())
    (tmp_path / "state").mkdir()
    critic.write_state(tmp_path / "state")
    critic.read_state(tmp_path / "state")
    assert critic.state_bytes() > 0
    assert critic.step(1.0)().keys() == {"value_grad_norm"}  # it learned from nothing


def test_a_machine_that_sees_no_run_directory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    plan = CriticPlan(spec="", threads=1, probe_file=str(tmp_path / "nowhere" / "seen"))
    with pytest.raises(UserError, match="does not see the run directory") as caught:
        read_answer(CriticActor().start(encode(plan)), str)
    assert caught.value.where == "placement.critic"


def test_a_checkpoint_that_was_written_elsewhere_is_not_taken_for_one(
    critic: RayCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere: Callable[..., Any] = lambda *_, **__: lambda: ["model.safetensors"]  # noqa: E731
    monkeypatch.setattr(critic, "_call", elsewhere)
    with pytest.raises(TidemillError, match=r"wrote model\.safetensors, but the trainer does not see it"):
        critic.write_state(tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GetTimeoutError("late"), r"the critic died: no answer to `step` within 7200 s\n  check its machine"),
        (ActorDiedError(), r"the critic died: its process was killed"),
    ],
)
def test_an_end_in_words_when_what_it_learned_is_awaited(
    critic: RayCritic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    _started(critic, tmp_path)
    promise = critic.step(1.0)

    def gone(answer: object, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", gone)
    with pytest.raises(TrainerLost, match=said) as caught:
        promise()
    assert "run the same command again" in str(caught.value)
