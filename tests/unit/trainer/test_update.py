from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.fake_gpu import Operations
from tests.model_shapes import llama
from tidemill.algos.kl import MismatchSums
from tidemill.config.learning import OptimizerConfig
from tidemill.models.ranks import OneRank
from tidemill.trainer.update import (
    UpdateSums,
    build_optimizer,
    clip_and_step,
    learning_rate,
    own_gradient_norm,
    set_learning_rate,
)


def parameters(*values: list[float]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.tensor(value)) for value in values)


def with_gradients(*gradients: list[float]) -> tuple[nn.ParameterList, torch.optim.AdamW]:
    """Vectors of ones with these gradients, under AdamW with learning rate 0.1 and no weight decay."""
    module = parameters(*([1.0] * len(gradient) for gradient in gradients))
    for parameter, gradient in zip(module, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return module, build_optimizer(module, OptimizerConfig(learning_rate=0.1))


def rates(total: int, **fields: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **fields)
    return [learning_rate(step, total, config) for step in range(1, total + 1)]


def test_constant_schedule_with_warmup() -> None:
    # 1/4, 2/4, 3/4, 4/4, then the peak
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_schedule() -> None:
    # peak at step 1, 0 at step 5: 1, 3/4, 2/4, 1/4, 0
    assert rates(5, schedule="linear", min_learning_rate_ratio=0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_linear_schedule_after_warmup_to_a_floor() -> None:
    # peak at step 2, floor 0.2 at step 6, a quarter of the remaining 0.8 each: 1, 0.8, 0.6, 0.4, 0.2
    expected = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(6, schedule="linear", warmup_steps=2, min_learning_rate_ratio=0.2) == pytest.approx(expected)


def test_cosine_schedule() -> None:
    # progress 0, 1/4, 1/2, 3/4, 1: (1 + cos(π p)) / 2 = 1, 0.8535534, 0.5, 0.1464466, 0; floor 0.1: 0.1 + 0.9 of it
    expected = [1.0, 0.8681981, 0.55, 0.2318019, 0.1]
    assert rates(5, schedule="cosine", min_learning_rate_ratio=0.1) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_of_a_single_step_and_of_warmup_longer_than_the_run(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(2, schedule=schedule, warmup_steps=4) == [0.25, 0.5]
    assert rates(2, schedule=schedule, warmup_steps=2) == [0.5, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(4, 0), (4, 2), (4, 4), (1, 0), (1, 4)])
def test_steps_beyond_the_last_stay_at_the_minimum(total: int, warmup: int, schedule: str) -> None:
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=warmup, min_learning_rate_ratio=0.25)
    assert [learning_rate(step, total, config) for step in (total + 1, 99)] == [0.5, 0.5]
    constant = config.model_copy(update={"schedule": "constant"})
    assert learning_rate(99, total, constant) == 2.0


@pytest.mark.parametrize(
    ("schedule", "length", "remark"),
    [
        ("cosine", 6, "has 6 optimizer steps (optimizer.schedule_steps): steps 7 to 12 of the run stay at the minimum"),
        ("linear", 20, "ends after 12 of the 20 optimizer steps"),
        ("linear", 12, None),
        ("linear", 0, None),
        ("constant", 6, None),
    ],
)
def test_the_remark_on_a_schedule_that_is_not_as_long_as_the_run(
    schedule: str, length: int, remark: str | None
) -> None:
    found = OptimizerConfig(schedule=schedule, schedule_steps=length).schedule_remark(12)
    assert found is None if remark is None else remark in str(found)


def test_set_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(llama(), OptimizerConfig())
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_weight_decay_is_on_matrices_only_and_frozen_parameters_are_left_out() -> None:
    model = llama()
    frozen = model.get_input_embeddings().weight
    frozen.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.parameters()} - {id(frozen)}
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in optimizer.param_groups)
    assert decayed["fused"] is True


def test_parameters_without_a_fused_kernel_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.optim.AdamW

    def unfused(*args: Any, fused: bool, **rest: Any) -> torch.optim.AdamW:
        if fused:
            raise RuntimeError("no fused kernel")
        return real(*args, fused=False, **rest)

    monkeypatch.setattr(torch.optim, "AdamW", unfused)
    assert build_optimizer(llama(), OptimizerConfig()).param_groups[0]["fused"] is False


def test_the_configuration_refuses_a_beta_of_one() -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig(betas=(0.9, 1.0))


def test_gradients_are_scaled_then_clipped_by_global_norm() -> None:
    # sums (6, 0) and (8): scaled by 1/2 to (3, 0), (4): norm 5; clipped to 1: (0.6, 0), (0.8)
    module, optimizer = with_gradients([6.0, 0.0], [8.0])
    used: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: used.extend(p.grad.tolist() for p in module if p.grad is not None))
    assert clip_and_step(optimizer, scale=0.5, max_grad_norm=1.0) == pytest.approx(5.0)
    assert used == [pytest.approx([0.6, 0.0]), pytest.approx([0.8])]


def test_a_norm_below_the_limit_is_only_scaled() -> None:
    module, optimizer = with_gradients([6.0, 0.0], [8.0])
    used: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: used.extend(p.grad.tolist() for p in module if p.grad is not None))
    assert clip_and_step(optimizer, scale=0.5, max_grad_norm=100.0) == pytest.approx(5.0)
    assert used == [[3.0, 0.0], [4.0]]


def test_one_step_of_adamw_by_hand() -> None:
    # gradient 2 (norm 2, not clipped): m = 0.1 * 2, v = 0.001 * 4; corrected 2 and 4; 1 - 0.1 * 2 / (2 + 1e-8) = 0.9
    module, optimizer = with_gradients([2.0])
    clip_and_step(optimizer, scale=1.0, max_grad_norm=10.0)
    assert module[0].tolist() == pytest.approx([0.9])


def test_gradients_are_consumed_and_changed_in_place() -> None:
    module, optimizer = with_gradients([6.0, 0.0], [8.0])
    gradient = module[0].grad
    assert gradient is not None
    clip_and_step(optimizer, scale=0.5, max_grad_norm=100.0)
    assert gradient.tolist() == [3.0, 0.0]
    assert all(p.grad is None for p in module)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(poison: float) -> None:
    module, optimizer = with_gradients([1.0], [1.0])
    clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0)
    before = [p.tolist() for p in module]
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in module]
    module[0].grad, module[1].grad = torch.tensor([poison]), torch.tensor([1.0])
    assert not math.isfinite(clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0))
    assert [p.tolist() for p in module] == before
    assert all(
        torch.equal(optimizer.state[p][k], v) for p, m in zip(module, moments, strict=True) for k, v in m.items()
    )
    assert all(p.grad is None for p in module)


def test_zero_gradients_take_a_step() -> None:
    module, optimizer = with_gradients([0.0])
    assert clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0) == 0.0
    assert optimizer.state[module[0]]["step"].item() == 1


def test_without_gradients_there_is_no_step() -> None:
    module = parameters([1.0])
    optimizer = build_optimizer(module, OptimizerConfig())
    assert clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0) == 0.0
    assert not optimizer.state


def test_scalars_and_empty_tensors_have_norms() -> None:
    # sqrt(3² + 4²) = 5
    module = nn.ParameterList(
        [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(0))]
    )
    optimizer = build_optimizer(module, OptimizerConfig())
    for parameter, value in zip(module, (3.0, 4.0, 0.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    assert clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0) == pytest.approx(5.0)


def test_the_norm_of_a_large_matrix_is_accurate() -> None:
    # 4M elements of 0.001: norm 0.001 * 2048 = 2.048; a single float32 sum of squares is off by 1e-3
    module = nn.ParameterList([nn.Parameter(torch.zeros(4096, 1024))])
    optimizer = build_optimizer(module, OptimizerConfig())
    module[0].grad = torch.full((4096, 1024), 1e-3)
    assert clip_and_step(optimizer, scale=1.0, max_grad_norm=1.0) == pytest.approx(2.048, rel=1e-6)


def test_a_gpu_clips_all_gradients_with_a_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def clipped() -> tuple[dict[str, int], float, list[torch.Tensor]]:
        model = llama(layers=4)
        draw = torch.Generator().manual_seed(0)
        optimizer = build_optimizer(model, OptimizerConfig())
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        monkeypatch.setattr(optimizer, "step", lambda: None)
        with Operations() as operations:
            norm = clip_and_step(optimizer, scale=0.1, max_grad_norm=1.0)
        return operations.counts, norm, gradients

    counts, norm, gradients = clipped()
    assert sum(counts.values()) == 5 * len(gradients) + 3  # norm, double, square, sum and product of each
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    counts, norm_on_gpu, gradients_on_gpu = clipped()
    once = ("_foreach_norm", "stack", "pow", "sum", "_local_scalar_dense", "_foreach_mul_")
    assert counts == dict.fromkeys(once, 1)
    assert norm_on_gpu == pytest.approx(norm, rel=1e-7)
    for ours, plain in zip(gradients_on_gpu, gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)


def test_steps_are_deterministic() -> None:
    def trained() -> list[torch.Tensor]:
        model = llama(seed=1)
        optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-2, weight_decay=0.01))
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            clip_and_step(optimizer, scale=0.1, max_grad_norm=1.0)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(trained(), trained(), strict=True))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory can be reset on Linux only")
def test_no_copy_of_the_gradients_is_made() -> None:
    tensor_bytes, count = 16 << 20, 4
    module = nn.ParameterList([nn.Parameter(torch.ones(tensor_bytes // 4096, 1024)) for _ in range(count)])
    optimizer = build_optimizer(module, OptimizerConfig())
    for _ in range(2):  # the first step allocates the moments
        for parameter in module:
            parameter.grad = torch.ones_like(parameter)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
        before = status_bytes("VmRSS")
        clip_and_step(optimizer, scale=0.5, max_grad_norm=1.0)
    assert status_bytes("VmHWM") - before < tensor_bytes // 2


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Recorded(OneRank):
    """Rank 0 of two; gathers what the other one sent."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def gather(self, value: bytes) -> list[bytes]:
        self.sent.append(value)
        return self.sent[::-1]


def of_leases(*figures: tuple[str, str, float, float], **sums: Any) -> UpdateSums:
    mismatch_of = {(source, lease): torch.tensor([kl, n], dtype=torch.float64) for source, lease, kl, n in figures}
    total = MismatchSums.from_list([sum(each[3] for each in figures), 0.0, 0.0, sum(each[2] for each in figures), 1.0])
    return UpdateSums(mismatch_of=mismatch_of, mismatch=total, **sums)


def test_mismatch_by_lease_of_a_place_that_was_reused_on_two_ranks() -> None:
    ranks = Recorded()
    of_leases(("vllm/spot-0", "lease-2", 3.0, 30.0), cpu_s=7.0, own_grad_norm=2.0).add_ranks(ranks)
    own = of_leases(
        ("vllm/spot-0", "lease-1", 1.0, 10.0), ("vllm/spot-0", "lease-2", 2.0, 10.0), cpu_s=5.0, own_grad_norm=1.0
    )
    own.add_ranks(ranks)
    assert own.mismatch_by_lease() == {"lease-1": (1.0, 10.0), "lease-2": (5.0, 40.0)}
    assert own.of_ranks == {
        "rank 0": {"cpu_s": 5.0, "grad_norm": 1.0, "mismatch_kl": 3.0 / 20},
        "rank 1": {"cpu_s": 7.0, "grad_norm": 2.0, "mismatch_kl": 3.0 / 30},
    }
    assert "mismatch_kl/vllm/spot-0" not in own.values()  # one worker, with two leases


def test_the_gradient_norm_of_this_process() -> None:
    _, optimizer = with_gradients([3.0], [0.0, 4.0])
    assert own_gradient_norm(optimizer) == 5.0
