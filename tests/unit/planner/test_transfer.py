from __future__ import annotations

import pytest

from tests.formulas import check_figures
from tidemill.core.errors import UserError
from tidemill.planner.transfer import PathTime, TransferQuestion, plan_transfer

GIGABYTE = 1e9


def paths(question: TransferQuestion) -> dict[str, PathTime]:
    return {path.path: path for path in plan_transfer(question).paths}


def test_times_by_path() -> None:
    # 1e9 parameters in bf16 are 2 GB. Broadcast: over the slower link, 2 / 0.5 = 4 s. Store (1 GB/s in all): up over
    # 1 GB/s in 2 s; down to 4 workers, 8 GB over 1 GB/s, in 8 s. File (0.1 GB/s): 20 s and 80 s.
    # Both are then loaded at 8 GB/s: 0.25 s.
    found = paths(
        TransferQuestion(
            parameters=1e9,
            link=2 * GIGABYTE,
            worker_link=0.5 * GIGABYTE,
            store=GIGABYTE,
            file=0.1 * GIGABYTE,
            workers=4,
            load=8 * GIGABYTE,
        )
    )
    assert found["broadcast"].seconds == pytest.approx(4.0)
    assert found["store"].seconds == pytest.approx(10.25, abs=1e-3)
    assert found["file"].seconds == pytest.approx(100.25, abs=1e-3)


def test_a_delta_moves_less_and_is_coded() -> None:
    # 3 % of 1e9 elements at 2 bytes: 60 MB; up and down at 1 GB/s 0.12 s; coding 2 * 1e9 / (1.1e9 * 2 cores) = 0.909 s;
    # the whole version, 2 GB, is loaded at 4 GB/s in 0.5 s
    found = paths(TransferQuestion(parameters=1e9, link=GIGABYTE, changed=0.03, cores=2, load=4 * GIGABYTE))["delta"]
    assert found.size == pytest.approx(60e6)
    assert found.seconds == pytest.approx(0.12 + 0.90909 + 0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("parameters", "dtype", "published_s"),
    [
        (106.9e9, "bf16", 3.47),  # GLM-4.5-Air, 8 H800
        (235.1e9, "bf16", 6.22),  # Qwen3-235B-A22B, 8 H800
        (671.0e9, "fp8", 10.19),  # DeepSeek-V3.1, 16 H20
        (1026.0e9, "fp8", 14.36),  # Kimi-K2, 16 H20
        (671.0e9, "fp8", 11.33),  # 256 H20
        (1026.0e9, "fp8", 16.04),
    ],
)
def test_fast_networks_are_bound_by_the_receivers_load_time(parameters: float, dtype: str, published_s: float) -> None:
    # Published: MoonshotAI/checkpoint-engine, "Update (Broadcast)". Nothing is fitted: the bound is PCIe 5.0 x16.
    found = paths(TransferQuestion(parameters=parameters, dtype=dtype, link=8 * 50 * GIGABYTE))["broadcast"]
    assert found.seconds == pytest.approx(published_s, rel=0.25)


def test_nothing_hides_without_a_step_and_a_long_one_hides_all() -> None:
    question = TransferQuestion(parameters=1e9, link=GIGABYTE)
    assert {path.hides for path in paths(question).values()} == {None}
    assert {path.hides for path in paths(TransferQuestion(parameters=1e9, link=GIGABYTE, step_s=1e4)).values()} == {
        True
    }
    short = paths(TransferQuestion(parameters=1e9, link=GIGABYTE, step_s=1.5))
    assert short["broadcast"].slack_s == pytest.approx(-0.5)
    assert short["broadcast"].hides is False


def test_two_versions_at_once_and_smaller_numbers() -> None:
    assert plan_transfer(TransferQuestion(parameters=70e9, link=50e9)).double_buffer == 280e9
    assert plan_transfer(TransferQuestion(parameters=70e9, link=50e9, dtype="fp8")).size == 70e9


def test_every_number_equals_its_formula() -> None:
    question = TransferQuestion(parameters=7e9, link=25e9, worker_link=6e9, store=10e9, workers=6, step_s=20.0)
    assert check_figures(plan_transfer(question).figures) == 14


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"link": 0.0}, "--link-gbps"),
        ({"link": 1.0, "worker_link": -1.0}, "--worker-link-gbps"),
        ({"link": 1.0, "store": float("inf")}, "--store-gbps"),
        ({"link": 1.0, "load": 0.0}, "--load-gbps"),
        ({"link": 1.0, "workers": 0}, "--workers"),
        ({"link": 1.0, "changed": 1.5}, "--changed"),
        ({"link": 1.0, "step_s": float("nan")}, "--step-s"),
    ],
)
def test_invalid_questions_are_refused(change: dict[str, float], option: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_transfer(TransferQuestion(parameters=1e9, **change))  # type: ignore[arg-type]
    assert caught.value.where == option
