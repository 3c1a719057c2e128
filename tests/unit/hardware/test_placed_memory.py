from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.hardware.test_engine_ranks import listed
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.placed_memory import check_division, check_gpus, memory_lines, rank_needs
from tidemill.hardware.process_memory import Models

H100, A100_40 = load_catalog().gpu("h100"), load_catalog().gpu("a100-40gb")
LLAMA = listed("meta-llama/Llama-3.1-70B-Instruct")
MODELS = Models(policy=LLAMA, rewards=(LLAMA,))
DEPLOYMENT: dict[str, Any] = {
    "runtime": "ray",
    "ray": {"trainer_gpus": 1, "worker_gpus": 1},
    "engine": {"kind": "vllm", "tensor_parallel": 4, "context_tokens": 3072},
    "placement": {
        "reference": "actor",
        "reward_model": "actor",
        "scoring_engine": "vllm",
        "actor_tensor_parallel": 2,
        "actor_gpus": 1,
    },
    "algorithm": {"kl_beta": 0.01},
    "scoring": {"rewards": [{"kind": "model", "model": "/shared/reward"}]},
    "trainer": {"shards": 16, "activation_checkpointing": True},
    "batch": {"microbatch_tokens": 4096},
    "sampling": {"max_new_tokens": 2048},
}


def spec_of(**sections: dict[str, Any]) -> RunSpec:
    """The deployment with other values of some keys."""
    merged = {name: {**DEPLOYMENT.get(name, {}), **keys} for name, keys in sections.items()}
    return RunSpec.model_validate({**DEPLOYMENT, **merged})


def test_the_needs_of_a_large_deployment_by_hand() -> None:
    trainer, engine, reference, reward = rank_needs(spec_of(), MODELS)
    assert trainer.arithmetic == "16 B × 70.6e9 / 16 = 70.6 GB"
    assert trainer.held == 16 * 70_553_706_496 / 16
    # two layers of 855.7e6 parameters, embedding and output head of 2 * 128,256 * 8,192, in bf16
    assert trainer.growing["gathered layers"] == pytest.approx(2 * (2 * 855.65e6 + 2 * 128_256 * 8192), rel=1e-3)
    # 64 slots of 3,072 tokens, 2 * 80 layers * 2 heads * 128 * 2 bytes each
    assert engine.growing["cache"] == 64 * 3072 * 2 * 80 * 2 * 128 * 2
    assert engine.held == pytest.approx(141.1e9 / 4, rel=1e-3)
    assert reference.held == reward.held == pytest.approx(141.1e9 / 2, rel=1e-3)
    assert [each.role for each in (trainer, engine, reference, reward)] == [
        "trainer",
        "engine",
        "reference",
        "reward model",
    ]


def test_offloaded_states_are_in_host_memory() -> None:
    trainer = next(rank_needs(spec_of(trainer={"offload": "optimizer"}), MODELS))
    assert (trainer.held, trainer.host) == (0.0, 70_553_706_496)
    check_gpus(spec_of(trainer={"offload": "optimizer", "shards": 8}), MODELS, H100)  # 1.13 TB, and machines have 2.2
    # 16 B × 70.6e9 of an A100 machine with 1.24 TB: 8 ranks fit, and with a critic of the same size they do not
    settings: dict[str, Any] = {
        "trainer": {"offload": "optimizer", "shards": 8},
        "placement": {"actor_tensor_parallel": 4},
    }
    check_gpus(spec_of(**settings), MODELS, A100_40)
    with pytest.raises(UserError, match=r"offloaded states of 2\.26 TB on a machine, and those .* have 1\.24 TB"):
        check_gpus(spec_of(**settings, algorithm={"advantage": "gae"}), MODELS, A100_40)


def test_the_rows_of_a_reference_are_not_offloaded() -> None:
    spec = spec_of(trainer={"offload": "optimizer", "shards": 8}, placement={"reference": "trainer"})
    trainer = next(rank_needs(spec, MODELS))
    assert trainer.held == pytest.approx(2 * 70.553706496e9 / 8)
    assert trainer.host == pytest.approx(16 * 70.553706496e9 / 8)


def test_eight_ranks_without_offload_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"the trainer holds 16 B × 70\.6e9 / 8 = 141 GB, and NVIDIA H100") as caught:
        check_gpus(spec_of(trainer={"shards": 8}), MODELS, H100)
    assert 'trainer.offload = "optimizer" (1.13 TB of host memory' in caught.value.hint
    assert "trainer.shards of about 19" in caught.value.hint
    check_gpus(spec_of(), MODELS, H100)


def test_layers_of_a_rank_keep_numbers_in_its_precision() -> None:
    bf16 = next(rank_needs(spec_of(), MODELS)).growing["activations"]
    fp32 = next(rank_needs(spec_of(trainer={"precision": "fp32"}), MODELS)).growing["activations"]
    logits = 4 * 4096 * 128_256  # in fp32 with both; below 2 GB
    assert fp32 - logits == pytest.approx(2 * (bf16 - logits))


def test_a_worker_that_no_machine_can_hold() -> None:
    with pytest.raises(UserError, match="the reserved engine needs 16 GPUs of one machine") as caught:
        check_gpus(spec_of(engine={"tensor_parallel": 16}, placement={"engine": "own"}), MODELS, H100)
    assert caught.value.where == "ray.worker_gpus"
    with pytest.raises(UserError, match="the reward model needs 16 GPUs of one machine"):
        check_gpus(spec_of(placement={"actor_tensor_parallel": 16, "reference": "trainer"}), MODELS, H100)


def test_ranks_that_do_not_divide_a_model() -> None:
    check_division(spec_of(), MODELS)
    with pytest.raises(UserError, match="3 does not divide its 64 attention heads") as caught:
        check_division(spec_of(engine={"tensor_parallel": 3}), MODELS)
    assert caught.value.where == "engine.tensor_parallel = 3"
    assert caught.value.hint == "set one of 1, 2, 4, 8, 16"
    odd = msgspec.structs.replace(MODELS, rewards=(msgspec.structs.replace(LLAMA, heads=63, kv_heads=7),))
    with pytest.raises(UserError, match="2 does not divide its 63 attention heads"):
        check_division(spec_of(), odd)


def test_lines_for_a_person() -> None:
    lines = list(memory_lines(spec_of(), MODELS, H100))
    assert "engine: 2 B × 70.6e9 / 4 = 35.3 GB + cache 16.1 GB + runtime 2 GB; together 53.4 GB of 72 GB" in lines[2]
    assert lines[-1] == "new weights: 141 GB to each machine, once; 2.8 s at 400 Gbit/s"  # 141.1e9 * 8 / 400e9
    # 70.6 GB of states, 7.6 GB of gathered layers and activations exceed 80 GB
    assert lines[1] == "warning: the trainer may run out of GPU memory with every sequence at its full length"
    offloaded = next(rank_needs(spec_of(trainer={"offload": "optimizer"}), MODELS)).text(H100)
    assert offloaded.endswith("70.6 GB of host memory, 564 GB on a machine")  # of eight ranks
    assert "name their kind as deploy.accelerator" in "".join(memory_lines(spec_of(), MODELS, None))
