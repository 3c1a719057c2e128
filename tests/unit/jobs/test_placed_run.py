"""The ranks of an engine are chosen once, and kept by the run."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.commands import run_here
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.core.errors import UserError
from tidemill.jobs.placed_run import placed_run, with_chosen_ranks
from tidemill.jobs.serving import serving_spec
from tidemill.jobs.train import train
from tidemill.runtime.backend import Runtime
from tidemill.runtime.memory_check import known_models
from tidemill.telemetry.run_dir import RunDirectory

LLAMA = {"source": "meta-llama/Llama-3.1-70B-Instruct"}
SMALL = {"source": "smollm2-135m"}


def spec_of(folder: Path, *, model: dict[str, Any] = LLAMA, **sections: Any) -> RunSpec:
    tree = {
        "runtime": "ray",
        "run": {"dir": str(folder / "run")},
        "model": model,
        "ray": {"address": "HEAD:6379", "trainer_gpus": 1, "worker_gpus": 1},
        "engine": {"kind": "vllm", "tensor_parallel": 0, "context_tokens": 4096},
        "trainer": {"shards": 16, "offload": "optimizer"},
        "deploy": {"accelerator": "h100-80gb"},
    }
    return RunSpec.model_validate({**tree, **sections})


def chosen(spec: RunSpec) -> tuple[int, str]:
    found, remarks = placed_run(spec, known_models(spec, None, fetch=False))
    return found.engine.tensor_parallel, remarks[0]


def test_the_fewest_ranks_on_the_gpus_of_a_cluster(tmp_path: Path) -> None:
    ranks, why = chosen(spec_of(tmp_path))
    assert ranks == 4
    assert why.startswith("engine.tensor_parallel = 4: the fewest that fit: weights 35.3 GB + cache 21.5 GB")
    assert chosen(spec_of(tmp_path, deploy={"accelerator": "b200-180gb"}))[0] == 2
    cpus = spec_of(tmp_path, ray={"address": "a"}, trainer={"shards": 16}, deploy={})
    assert chosen(cpus) == (1, "engine.tensor_parallel = 1: workers have no GPU (ray.worker_gpus = 0)")


def test_a_number_that_is_given_or_stored_is_kept(tmp_path: Path) -> None:
    engine = {"kind": "vllm", "tensor_parallel": 8, "context_tokens": 4096}
    fixed = spec_of(tmp_path, engine=engine)
    assert placed_run(fixed, None)[0] is fixed
    with RunDirectory.open(fixed.directory) as run:
        run.write_config(to_toml(fixed))
    assert chosen(spec_of(tmp_path)) == (8, "engine.tensor_parallel = 8: as the run has stored it")


def test_the_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = spec_of(tmp_path, ray={"trainer_gpus": 1, "worker_gpus": 1}, deploy={})
    names = ["NVIDIA H100 80GB HBM3"] * 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=names[index], total_memory=85e9)
    )
    assert chosen(here)[0] == 4
    names[3] = "NVIDIA A100"
    with pytest.raises(UserError, match="GPUs of several kinds"):
        chosen(here)
    names.clear()
    with pytest.raises(UserError, match="this machine has none"):
        chosen(here)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"deploy": {}}, "whose kind is unknown"),
        ({"model": {"source": "nobody/nothing"}}, "nobody/nothing is not on this machine"),
        ({"engine": {"kind": "vllm", "tensor_parallel": 0, "slots": 8192}}, "no number of ranks up to 8"),
    ],
)
def test_a_number_that_cannot_be_chosen(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        chosen(spec_of(tmp_path, **changes))
    assert caught.value.where == "engine.tensor_parallel"
    assert caught.value.hint


def test_the_chosen_number_is_stored_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that fails: the next session has the same ranks."""
    opened = list[int]()

    def open_backend(spec: RunSpec, *_: Any) -> Any:
        opened.append(spec.engine.tensor_parallel)
        raise UserError("enough", where="here")

    runtime = Runtime(check_machine=lambda _: None, check_models=lambda _: None, open=open_backend)
    monkeypatch.setattr("tidemill.jobs.train.runtime_of", lambda _: runtime)
    spec = spec_of(tmp_path)
    with pytest.raises(UserError, match="enough"):
        train(spec, telemetry_stream=io.StringIO())
    assert opened == [4]
    assert RunDirectory(spec.directory).read_settings()["engine"]["tensor_parallel"] == 4


def test_a_dry_run_shows_what_a_large_recipe_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    large = ("train", "@llama-70b", "--dry-run", f"--run.dir={tmp_path}/run")
    out = run_here(*large, "--engine.tensor_parallel=0").out
    assert "engine.tensor_parallel = 4: the fewest that fit" in out
    assert "gathered layers 7.63 GB" in out
    assert "70.6 GB of host memory" in out
    assert "new weights: 141 GB to each machine, once; 2.8 s at 400 Gbit/s" in out
    assert "warning" not in out
    refused = run_here(*large, "--trainer.shards=8", "--trainer.offload=none")
    assert refused.code == 2
    assert "16 B × 70.6e9 / 8 = 141 GB, and NVIDIA H100 SXM5 has 80 GB" in refused.err


def test_a_served_model_has_the_ranks_of_a_run(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model=SMALL, run={})
    assert serving_spec(spec, None).deploy == spec.deploy  # AutoTP needs the accelerator
    three = spec_of(tmp_path, model=SMALL, engine={"kind": "vllm", "tensor_parallel": 2})
    with pytest.raises(UserError, match="2 does not divide its 9 attention heads"):
        with_chosen_ranks(serving_spec(three, None), known_models(three, None, fetch=False))


PIPELINE = """\
run.dir = "{folder}"
runtime = "ray"
model.source = "smollm2-135m"
engine = {{ kind = "vllm", tensor_parallel = 2 }}
pool.workers = 1
[[stage]]
name = "sft"
kind = "sft"
data = {{ path = "rows.jsonl" }}
[[stage]]
name = "rl"
kind = "rl"
model.source = "stage:sft"
"""


def test_a_later_stage_with_ranks_that_do_not_divide_its_model_is_refused_first(tmp_path: Path) -> None:
    recipe = tmp_path / "two.toml"
    recipe.write_text(PIPELINE.format(folder=tmp_path / "run"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    refused = run_here("train", f"@{recipe}", "--dry-run")
    assert refused.code == 2
    assert "2 does not divide its 9 attention heads" in refused.err
