"""A sharded trainer on Ray: a rank that is killed in any phase, late, or unable to start."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.load import RECIPES
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TrainerLost
from tidemill.extensions.registry import Extension
from tidemill.jobs.train import train
from tidemill.jobs.train_supervised import train_supervised
from tidemill.runtime.cluster.ray_trainer import Started, TrainerActor, TrainerPlan
from tidemill.runtime.cluster.wire import served
from tidemill.telemetry.metrics import read_metrics
from tidemill.trainer import checkpoint
from tidemill.trainer.policy import PolicyTrainer

pytestmark = pytest.mark.xdist_group("ray")

FAULT = "fault.json"
PHASES = ("accumulate", "backward", "step", "save", "publish")


def spec_of(directory: Path, *, steps: int = 4) -> RunSpec:
    tree: dict[str, Any] = tomllib.loads((RECIPES / "shards-local.toml").read_text())
    tree["run"] = {"dir": str(directory)}
    tree["batch"] |= {"prompts": 8, "group_size": 4, "microbatch_tokens": 64}
    tree["trainer"] |= {"steps": steps}
    tree["eval"] = {"every_steps": 0, "prompts": 4}
    tree["checkpoint"] = {"every_steps": 1}
    tree["telemetry"] = {"live": False}
    return RunSpec.model_validate(tree)


class DyingRank(TrainerActor):
    """Its second rank is killed (SIGKILL) in the phase and step of a file beside the checkpoints, once."""

    @served
    async def start(
        self,
        plan: TrainerPlan,
        index: int = 0,
        meeting: str = "",
        functions: Sequence[Extension] = (),
        critic: Any = None,
    ) -> Started:
        started: Started = await TrainerActor.start.served(self, plan, index, meeting, functions)  # type: ignore[attr-defined]
        fault = Path(plan.checkpoints).parent / FAULT
        if index == 1 and fault.exists():
            self._arm(fault, **json.loads(fault.read_text()))
        return started

    def _arm(self, fault: Path, phase: str, step: int) -> None:
        trainer, publisher = self.trainer, self.publisher
        assert isinstance(trainer, PolicyTrainer)
        before = step if phase in ("save", "publish") else step - 1  # the version at that moment

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if trainer.version.number == before:
                    fault.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return called

        match phase:
            case "accumulate":
                trainer.add_group = dying(trainer.add_group)  # type: ignore[method-assign]
            case "backward":
                trainer.model.get_submodule("model.layers.0").register_full_backward_hook(dying(lambda *_: None))
            case "step":
                trainer.optimizer.step = dying(trainer.optimizer.step)  # type: ignore[method-assign]
            case "save":
                checkpoint.save_file = dying(checkpoint.save_file)  # type: ignore[attr-defined]
            case "publish":
                publisher._probe = dying(publisher._probe)  # type: ignore[union-attr]


def figures(directory: Path) -> list[tuple[int, str, float, float]]:
    lines = read_metrics(directory / "metrics.jsonl")
    return [
        (line.step, line.weights_digest, line.values.get("reward_mean", 0.0), line.values.get("grad_norm", 0.0))
        for line in lines
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, float, float]]:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    train(spec_of(directory))
    return figures(directory)


@pytest.mark.slow  # tests/unit/runtime/cluster/test_rank_group.py loses ranks; trainer/test_ranks.py restores them
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase_gives_the_same_run(
    phase: str, undisturbed: list[tuple[int, str, float, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.runtime.cluster.ray_backend.TrainerActor", DyingRank)
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / FAULT).write_text(json.dumps({"phase": phase, "step": 2}))
    with pytest.raises(TrainerLost, match=r"the trainer's rank 1 died: its process was killed"):
        train(spec_of(directory))
    assert not (directory / FAULT).exists()
    train(spec_of(directory))
    assert figures(directory) == undisturbed


def sft(folder: Path, *, shards: int) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of a stage of supervised fine-tuning."""
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}\n"} for a in range(8) for b in range(8)]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = RunSpec.model_validate(
        {
            "runtime": "ray" if shards > 1 else "inprocess",
            "run": {"dir": str(folder / "run")},
            "model": {"source": "char", "char": {"alphabet": "0123456789+=\n"}},
            "data": {"path": str(folder / "rows.jsonl"), "held_out_fraction": 0.1},
            "supervised": {"epochs": 0, "minibatch_tokens": 120, "microbatch_tokens": 30},
            "trainer": {"steps": 4, "threads": 1, "shards": shards},
            "telemetry": {"live": False},
        }
    )
    summary = train_supervised(spec, "sft")
    assert (Path(summary["model"]) / "model.safetensors").is_file()
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return [(line.step, line.values.get("loss", 0.0), line.values.get("grad_norm", 0.0)) for line in lines]


def test_a_supervised_stage_trains_on_two_ranks(tmp_path: Path) -> None:
    alone, sharded = sft(tmp_path / "one", shards=1), sft(tmp_path / "two", shards=2)
    assert len(sharded) == 5
    for expected, found in zip(alone, sharded, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
