from __future__ import annotations

from typing import Any

import pytest

from tidemill.config.deploy import DeployConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.deploy.sizes import PodSize, Sizes, sizes
from tidemill.hardware.accelerator import accelerator
from tidemill.hardware.model_shape import shape_of_parameters
from tidemill.hardware.process_memory import Models

ON_GPUS = {"runtime": "ray", "ray": {"trainer_gpus": 1, "worker_gpus": 1, "trainer_cpus": 4, "worker_cpus": 2.5}}


def sized(parameters: float, deploy: dict[str, Any] | None = None, **sections: Any) -> Sizes:
    spec = RunSpec.model_validate({"pool": {"kind": "static", "workers": 1}, **sections})
    config = DeployConfig.model_validate({"target": "gke", "image": "i", **(deploy or {})})
    models = Models(policy=shape_of_parameters(parameters))
    return sizes([("rl", spec)], config, lambda _: models)


def test_gpus_and_cpus_follow_from_ray() -> None:
    found = sized(1e9, {"accelerator": "nvidia-h100-80gb"}, **ON_GPUS)
    assert (found.reserved.cpus, found.reserved.gpus) == (4 + 1, 1)  # and the driver
    assert (found.spot.cpus, found.spot.gpus) == (3, 1)
    assert found.reserved_machines == 1 and not found.notes


def test_the_gpu_of_the_documented_cluster() -> None:
    gpu = accelerator(DeployConfig(target="gke", image="i", accelerator="nvidia-l4"))
    assert gpu is not None and gpu.memory_bytes == 24e9


def test_shards_span_machines() -> None:
    sections = {**ON_GPUS, "trainer": {"shards": 15}}  # and the reserved engine: 16 GPUs, 8 a machine
    found = sized(8e9, {"accelerator": "nvidia-h100-80gb"}, **sections)
    assert (found.reserved_machines, found.reserved.gpus) == (2, 8)
    assert found.reserved.cpus == 1 + 32  # (15 * 4 + 2.5) / 2, rounded up
    assert "ReadWriteMany" in found.notes[0]
    # Offloaded states, 16 bytes a parameter: 8 of 8 ranks, and 8 of 15, are on one machine; the rest is small.
    offloaded = {**ON_GPUS, "trainer": {"shards": 15, "offload": "optimizer"}}
    assert (
        sized(30e9, {"accelerator": "nvidia-h100-80gb"}, **offloaded).reserved.memory_gib * 2**30 > 16 * 30e9 * 8 / 15
    )
    actors = {"reference": "actor", "actor_gpus": 1, "scoring_engine": "vllm", "actor_tensor_parallel": 7}
    apart = {**offloaded, "trainer": {"shards": 8, "offload": "optimizer"}, "placement": actors}
    apart |= {"algorithm": {"kl_beta": 0.1}}
    found = sized(30e9, {"accelerator": "nvidia-h100-80gb"}, **apart)
    assert found.reserved_machines == 2 and found.reserved.memory_gib * 2**30 > 16 * 30e9
    slurm = {"target": "slurm", "slurm": {"runs": "/s"}, "accelerator": "h100-80gb"}
    assert not sized(8e9, slurm, **sections).notes  # it has no claim


@pytest.mark.parametrize(
    ("parameters", "accelerator", "role", "hint"),
    [
        # 16 bytes a parameter in fp32 with Adam: 112 GB of an 80 GB GPU
        (7e9, "nvidia-h100-80gb", "trainer", "nvidia-h200-141gb"),
        (70e9, "nvidia-b200", "trainer", "trainer.shards of about"),
    ],
)
def test_a_model_that_does_not_fit(parameters: float, accelerator: str, role: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        sized(parameters, {"accelerator": accelerator}, **ON_GPUS)
    assert raised.value.where.startswith("model.source")
    assert f"the {role} holds" in raised.value.what and hint in raised.value.hint


def test_an_engine_that_does_not_fit() -> None:
    # 180 GB of bf16 weights; the 64 shards hold 16 / 64 bytes a parameter each.
    with pytest.raises(UserError, match="the engine holds"):
        sized(90e9, {"accelerator": "nvidia-h100-80gb"}, **{**ON_GPUS, "trainer": {"shards": 64}})


def test_memory_grows_with_the_model_and_can_be_given() -> None:
    small, large = (sized(parameters).reserved.memory_gib for parameters in (1e8, 1e9))
    # At least 12 bytes a parameter more: fp32 weights, gradients and moments are 16.
    assert large - small > 0.9e9 * 12 / 2**30
    given = sized(1e8, {"head_memory_gb": 64.0, "worker_memory_gb": 8.0})
    assert (given.reserved.memory_gib, given.spot) == (60, PodSize(cpus=1, memory_gib=8, gpus=0))
