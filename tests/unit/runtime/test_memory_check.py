"""Runs that do not fit into memory are refused before anything is loaded or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tests.planted import spec_of
from tests.pretend_stages import pipeline
from tidemill.config.issues import ConfigError
from tidemill.core.errors import UserError
from tidemill.hardware.free_memory import FreeMemory
from tidemill.hardware.model_config import CONFIG
from tidemill.hardware.process_memory import LIBRARIES, TRAINS, Work
from tidemill.jobs.model_evaluation import evaluate, generate
from tidemill.jobs.train import train
from tidemill.jobs.train_supervised import train_supervised
from tidemill.pipeline.execution import plan_pipeline
from tidemill.runtime import memory_check
from tidemill.runtime.memory_check import check_memory, known_models, memory_remarks

HUGE: dict[str, Any] = {"source": "char", "char": {"hidden_size": 16_384, "layers": 80, "heads": 128}}
LORA = {"lora": {"rank": 8}}
KL = {"kl_beta": 0.01}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`free(1e9)` leaves a gigabyte to a process that has loaded no library."""

    def leave(count: float) -> None:
        found = FreeMemory(bytes=count, limit="/sys/fs/cgroup/a/memory.max")
        monkeypatch.setattr(memory_check, "free_host_memory", lambda: found)
        monkeypatch.setattr(memory_check, "resident_bytes", lambda: 0.0)

    return leave


def parameters(**model: Any) -> float:
    models = known_models(spec_of(model=model), None, fetch=False)
    assert models is not None
    return models.policy.parameters


@pytest.mark.parametrize(
    ("work", "sections", "more"),  # bytes per parameter
    [
        ("rl", {}, 16),
        ("rl", {"algorithm": KL}, 20),
        ("rl", {"schedule": {"max_policy_lag": 1}}, 20),
        ("rl", {"algorithm": {"name": "ppo", "kl_beta": 0.0}, "critic": {"kind": "own"}}, 32),
        ("supervised", {}, 16),
        ("generate", {}, 4),
        ("eval", {}, 4),
        ("serve", {}, 4),
        ("load", {}, 4),
        ("rl", {"runtime": "ray", "trainer": {"shards": 2}}, 20),  # both ranks, and an engine apart
        ("rl", {"runtime": "ray", "trainer": {"shards": 8}}, 20),  # no rank ever holds the whole model
    ],
)
def test_a_run_is_refused_above_1_2_times_what_is_free(
    free: Callable[[float], None], work: Work, sections: dict[str, Any], more: int
) -> None:
    spec, remarks = spec_of(model=HUGE, **sections), list[str]()
    need = more * parameters(**HUGE) + LIBRARIES
    free(need / 1.19)
    check_memory(spec, work, note=remarks.append)
    assert [line.split(":")[0] for line in remarks] == ["warning"]
    free(need / 1.21)
    with pytest.raises(UserError, match="TB of memory"):
        check_memory(spec, work, note=remarks.append)
    allowed = spec.model_copy(update={"run": spec.run.model_copy(update={"check_memory": False})})
    check_memory(allowed, work, note=remarks.append)
    free(100 * need)
    check_memory(spec, work, note=remarks.append)
    assert len(remarks) == 1


@pytest.mark.parametrize(
    ("sections", "room", "hint"),  # room: bytes per parameter
    [
        ({}, 10, "set model.lora.rank = 16, which trains an adapter"),
        ({}, 2, "give a smaller model: about 32.2G parameters fit"),
        ({"algorithm": KL}, 16.5, "set algorithm.kl_beta = 0"),
        ({"schedule": {"max_policy_lag": 1}}, 16.5, "set schedule.max_policy_lag = 0"),
        ({"algorithm": {"name": "ppo", "kl_beta": 0.0}, "critic": {"kind": "own"}}, 16.5, 'set critic.kind = "shared"'),
    ],
)
def test_the_error_names_the_parts_and_what_would_fit(
    free: Callable[[float], None], sections: dict[str, Any], room: float, hint: str
) -> None:
    free(room * parameters(**HUGE) + LIBRARIES)
    with pytest.raises(UserError) as caught:
        check_memory(spec_of(model=HUGE, **sections), "rl", note=print)
    error = caught.value
    for part in ("weights ", "gradients ", "optimizer state ", "of activations", "of the engine's cache"):
        assert part in error.what
    assert "are free under /sys/fs/cgroup/a/memory.max" in error.what
    assert error.hint == f"{hint}; or set run.check_memory = false to start anyway"
    assert error.where == "model.source = char"


def huge_folder(folder: Path) -> Path:
    """A model whose configuration is that of a much larger one."""
    save_folder(llama(), folder)
    config = json.loads((folder / CONFIG).read_text())
    sizes = {"hidden_size": 16_384, "num_hidden_layers": 80, "num_attention_heads": 128, "num_key_value_heads": 128}
    (folder / CONFIG).write_text(json.dumps(config | sizes | {"head_dim": 128, "intermediate_size": 65_536}))
    return folder


STARTS: dict[str, Callable[[Any], object]] = {
    "train": train,
    "sft": lambda spec: train_supervised(spec, "sft"),
    "reward_model": lambda spec: train_supervised(spec, "reward_model"),
    "dpo": lambda spec: train_supervised(spec, "dpo"),
    "eval": evaluate,
    "generate": lambda spec: generate(spec, prompts=["1+1="]),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("local", [False, True])
def test_nothing_is_loaded_or_written(tmp_path: Path, start: str, local: bool) -> None:
    model = {"source": str(huge_folder(tmp_path / "model"))} if local else HUGE
    spec = spec_of(model=model, run={"dir": tmp_path / "run"}, data={"path": "rows.jsonl"})
    with pytest.raises(UserError, match="TB of memory"):
        STARTS[start](spec)
    assert not (tmp_path / "run").exists()


def test_every_stage_of_a_pipeline_is_checked_before_the_first(tmp_path: Path) -> None:
    recipe = f"""
[model]
source = "{huge_folder(tmp_path / "model")}"
[[stage]]
name = "shown"
kind = "demonstrations"
[[stage]]
name = "sft"
kind = "sft"
data.path = "stage:shown"
[[stage]]
name = "rl"
kind = "rl"
model.source = "stage:sft"
[[stage]]
name = "judged"
kind = "eval"
model.source = "stage:rl"
"""
    with pytest.raises(ConfigError) as caught:
        plan_pipeline(pipeline(tmp_path, recipe))
    refused = [issue.source for issue in caught.value.issues if "TB of memory" in issue.what]
    assert refused == ["stage shown", "stage sft", "stage rl", "stage judged"]


@pytest.mark.parametrize("work", TRAINS)
def test_the_shape_of_a_folder_is_that_of_its_weights(tmp_path: Path, work: Work) -> None:
    model = llama()
    config = {"source": str(save_folder(model, tmp_path / "model"))}
    assert parameters(**config) == sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "model" / "model.safetensors").unlink()  # as for a hub model whose weights are not downloaded
    assert parameters(**config) == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=0.05)
    assert memory_remarks(spec_of(model=config), work)[0].startswith("memory: needs ")


def test_a_model_that_cannot_be_read_is_reported_where_it_is_loaded(tmp_path: Path) -> None:
    check_memory(spec_of(model={"source": str(tmp_path / "missing")}), "rl", note=print)


@pytest.mark.parametrize(
    ("work", "sections", "alone", "refused"),
    [
        ("rl", {"runtime": "ray", "ray": {"address": "auto"}}, True, False),  # other machines hold the models
        ("rl", {"runtime": "ray", "ray": {"address": "auto"}}, False, True),  # in an actor on one of them
        ("worker", {"runtime": "ray", "ray": {"address": "auto"}}, False, True),
        ("rl", {"runtime": "ray"}, True, True),
        ("worker", {"runtime": "ray"}, False, False),  # was counted with the processes of its machine
        ("eval", {"runtime": "ray", "ray": {"address": "auto"}}, True, True),  # in this process
    ],
)
def test_each_machine_checks_what_it_holds(
    free: Callable[[float], None], work: Work, sections: dict[str, Any], alone: bool, refused: bool
) -> None:
    free(1e9)
    spec = spec_of(model=HUGE, **sections)
    if refused:
        with pytest.raises(UserError, match="TB of memory"):
            check_memory(spec, work, note=print, alone=alone)
    else:
        check_memory(spec, work, note=print, alone=alone)


@pytest.mark.parametrize(("sections", "of_gpu"), [({}, 18), ({"trainer": {"precision": "fp32"}}, 16)])
def test_a_gpu_holds_the_states_and_the_host_loads_the_weights(
    free: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], of_gpu: int
) -> None:
    # bf16: the engine has a copy of 2 bytes per parameter
    monkeypatch.setattr(memory_check, "computes_on_gpu", lambda *_, **__: True)
    need = of_gpu * parameters(**HUGE)
    monkeypatch.setattr(memory_check, "_free_on_gpu", lambda: (need / 1.21, 3e9))
    spec = spec_of(model=HUGE, **sections)
    free(4 * parameters(**HUGE) + LIBRARIES)
    with pytest.raises(UserError, match=r"of GPU memory .* are free; other processes use 3 GB"):
        check_memory(spec, "rl", note=print)
    monkeypatch.setattr(memory_check, "_free_on_gpu", lambda: (need / 1.19, 3e9))
    check_memory(spec, "rl", note=print)
    free(3 * parameters(**HUGE))
    with pytest.raises(UserError, match="TB of memory"):
        check_memory(spec, "rl", note=print)
