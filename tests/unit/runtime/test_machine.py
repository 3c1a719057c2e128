"""The GPUs and the token that a run needs are checked before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tidemill.config.schema import RunSpec
from tidemill.config.weights import WeightsConfig
from tidemill.core.errors import UserError
from tidemill.runtime.cluster.ray_calls import require_reserved_gpus
from tidemill.runtime.cluster.weight_transports import ServedTransport
from tidemill.runtime.runtimes import runtime_of


def _spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate({"runtime": "ray", **sections})


def check_machine(spec: RunSpec) -> None:
    runtime_of(spec).check_machine(spec)


def _present(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)


WORKERS = {"pool": {"kind": "static", "workers": 2}}


@pytest.mark.parametrize(
    ("sections", "asked", "key"),
    [
        ({"ray": {"trainer_gpus": 1}}, 1, "ray.trainer_gpus"),
        ({"ray": {"trainer_gpus": 0.5}}, 1, "ray.trainer_gpus"),  # Ray takes whole numbers only
        (WORKERS | {"ray": {"worker_gpus": 1}}, 2, "ray.worker_gpus"),
        (WORKERS | {"ray": {"worker_gpus": 1, "trainer_gpus": 2}}, 4, "ray.trainer_gpus, ray.worker_gpus"),
        (
            WORKERS | {"engine": {"kind": "vllm", "tensor_parallel": 4}, "ray": {"worker_gpus": 1}},
            8,
            "ray.worker_gpus",
        ),
        (
            {"placement": {"reference": "actor", "actor_gpus": 1}, "algorithm": {"kl_beta": 0.1}},
            1,
            "placement.actor_gpus",
        ),
    ],
)
def test_more_gpus_than_the_machine_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], asked: int, key: str
) -> None:
    _present(monkeypatch, asked - 1)
    with pytest.raises(UserError, match=f"needs {asked} GPUs?, and this machine has {asked - 1}") as caught:
        check_machine(_spec(**sections))
    assert caught.value.where == key
    _present(monkeypatch, asked)
    check_machine(_spec(**sections))


def test_the_gpus_of_an_existing_cluster_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    _present(monkeypatch, 0)
    check_machine(_spec(ray={"trainer_gpus": 8, "address": "10.0.0.1:6379"}))


def test_cuda_in_one_process_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _present(monkeypatch, 0)
    with pytest.raises(UserError, match="torch finds no GPU"):
        check_machine(RunSpec.model_validate({"trainer": {"device": "cuda"}}))


def test_a_process_with_reserved_gpus_does_not_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _present(monkeypatch, 0)
    require_reserved_gpus(0.0, "ray.trainer_gpus")
    with pytest.raises(UserError, match="torch cannot use the GPU"):
        require_reserved_gpus(1.0, "ray.trainer_gpus")
    _present(monkeypatch, 1)
    require_reserved_gpus(1.0, "ray.trainer_gpus")


@pytest.mark.parametrize("names", [["H200"], ["H200", "H100"]])
def test_a_worker_of_two_gpus_needs_two_of_one_kind(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    _present(monkeypatch, len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    with pytest.raises(UserError, match=f"2 GPUs of one kind, and its node gives it {', '.join(names)}"):
        require_reserved_gpus(2.0, "ray.worker_gpus")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    require_reserved_gpus(float(len(names)), "ray.worker_gpus")


def test_weights_are_not_served_beyond_the_machine_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_WEIGHTS_TOKEN", raising=False)
    served = {"transport": "http", "host": "0.0.0.0", "url": "http://127.0.0.1:1"}
    with pytest.raises(UserError, match="without a token") as caught:
        check_machine(_spec(weights=served))
    assert caught.value.where == "weights.token_env"
    with pytest.raises(UserError, match="without a token"):  # in the trainer's process, on a cluster that exists
        ServedTransport(WeightsConfig.model_validate(served))
    check_machine(_spec(weights=served, ray={"address": "10.0.0.1:6379"}))
    monkeypatch.setenv("TIDEMILL_WEIGHTS_TOKEN", "secret")
    check_machine(_spec(weights=served))
