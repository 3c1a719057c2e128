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
    found = paths(
        TransferQuestion(
            parameters=1e9,
            link=2 * GIGABYTE,
            worker_link=0.5 * GIGABYTE,
            store=GIGABYTE,
            file=0.1 * GIGABYTE,
            workers=4,
        )
    )
    assert found["broadcast"].seconds == pytest.approx(4.0)
    assert found["store"].seconds == pytest.approx(10.0, abs=1e-3)
    assert found["file"].seconds == pytest.approx(100.0, abs=1e-3)


def test_a_delta_moves_less_and_is_coded() -> None:
    # 3 % of 1e9 elements at 2 bytes: 60 MB; up and down at 1 GB/s 0.12 s; coding 2 * 1e9 / (1.1e9 * 2 cores) = 0.909 s
    found = paths(TransferQuestion(parameters=1e9, link=GIGABYTE, changed=0.03, cores=2))["delta"]
    assert found.size == pytest.approx(60e6)
    assert found.seconds == pytest.approx(0.12 + 0.90909, abs=1e-3)


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


def test_every_number_is_what_its_formula_says() -> None:
    question = TransferQuestion(parameters=7e9, link=25e9, worker_link=6e9, store=10e9, workers=6, step_s=20.0)
    assert check_figures(plan_transfer(question).figures) == 12


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"link": 0.0}, "--link-gbps"),
        ({"link": 1.0, "worker_link": -1.0}, "--worker-link-gbps"),
        ({"link": 1.0, "store": float("inf")}, "--store-gbps"),
        ({"link": 1.0, "workers": 0}, "--workers"),
        ({"link": 1.0, "changed": 1.5}, "--changed"),
        ({"link": 1.0, "step_s": float("nan")}, "--step-s"),
    ],
)
def test_what_cannot_be_asked(change: dict[str, float], option: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_transfer(TransferQuestion(parameters=1e9, **change))  # type: ignore[arg-type]
    assert caught.value.where == option
