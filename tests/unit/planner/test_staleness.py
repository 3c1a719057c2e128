from __future__ import annotations

import pytest

from tests.formulas import check_figures
from tidemill.core.errors import UserError
from tidemill.planner.staleness import Measured, parse_table, plan_staleness


def row(lag: float, reward: float, utilisation: float, uncertainty: float | None = None) -> Measured:
    return Measured(lag=lag, reward_per_step=reward, utilisation=utilisation, uncertainty=uncertainty)


def test_certain_rows_have_no_interval() -> None:
    plan = plan_staleness([row(0, 0.1, 0.5), row(2, 0.09, 1.0)])
    # 0.09 * 1.0 / 0.5
    assert [each.progress for each in plan.lags] == [0.1, pytest.approx(0.18)]
    assert plan.lags[0].low is None
    assert plan.lags[0].chance_best is None
    assert plan.uncertainty.startswith("none given")


def test_standard_errors_say_which_lags_are_not_ruled_out() -> None:
    # 0.20 ± 0.02 against 0.21 ± 0.02: the difference, 0.01 ± 0.028, is above 0 in 64 % of the draws
    plan = plan_staleness([row(0, 0.05, 0.5, 0.001), row(1, 0.20, 0.5, 0.02), row(3, 0.21, 0.5, 0.02)])
    chances = {each.lag: each.chance_best for each in plan.lags}
    assert chances[3] == pytest.approx(0.64, abs=0.04)
    assert chances[0] == 0
    assert plan.best_lag == 3
    assert list(plan.contenders) == [1, 3]
    one = plan.lags[1]
    # mean ± 1.96 standard errors
    assert one.low == pytest.approx(0.161, abs=0.004)
    assert one.high == pytest.approx(0.239, abs=0.004)


def test_repeats_are_resampled() -> None:
    rows = [row(0, reward, 0.5) for reward in (0.1, 0.12, 0.08, 0.11, 0.09)] + [row(2, 0.4, 0.5)]
    plan = plan_staleness(rows)
    zero, two = plan.lags
    assert (zero.repeats, two.repeats) == (5, 1)
    assert zero.progress == pytest.approx(0.1)
    assert zero.low is not None
    assert zero.high is not None
    assert 0.08 <= zero.low < 0.1 < zero.high <= 0.12
    assert plan.best_lag == 2
    assert plan.uncertainty == "bootstrap over repeats; no uncertainty is known for lag 2"


def test_few_repeats_are_called_few() -> None:
    plan = plan_staleness([row(0, 0.1, 0.5), row(0, 0.2, 0.5), row(1, 0.1, 0.9, 0.01)])
    assert "fewer than 5 repeats" in plan.uncertainty


def test_the_same_table_gives_the_same_answer() -> None:
    rows = [row(0, 0.1, 0.5, 0.05), row(1, 0.1, 0.6, 0.05)]
    assert plan_staleness(rows) == plan_staleness(list(reversed(rows)))


def test_every_number_equals_its_formula() -> None:
    assert check_figures(plan_staleness([row(0, 0.1, 0.5), row(4, 0.2, 0.7)]).figures) == 2


@pytest.mark.parametrize(
    "text",
    [
        "lag,reward_per_step,utilisation\n0,.15,35%\n1,.13,55 %\n",
        "Lag; Reward; Utilization; stderr\n0; .15; 35; \n1; .13; 55; 0.01\n",
        "lag reward utilisation\n0  .15  35 %\n1  .13  55 %\n",
        "# measured\n0\t.15\t0.35\n1\t.13\t0.55\n",
        '[{"lag": 0, "reward": 0.15, "utilisation": 0.35}, {"lag": 1, "reward": 0.13, "utilisation": "55%"}]',
        '{"rows": [[0, 0.15, 0.35], [1, 0.13, 0.55]]}',
        "lag,reward_per_step,utilisation\n0,.15,35%\n\n1,.13,55%\n",
    ],
)
def test_tables_in_many_shapes(text: str) -> None:
    rows = parse_table(text, source="t")
    assert [(each.lag, each.reward_per_step, each.utilisation) for each in rows] == [(0, 0.15, 0.35), (1, 0.13, 0.55)]


def test_a_minus_sign_as_printed() -> None:
    assert parse_table("10,\N{MINUS SIGN}.02,92%\n", source="t")[0].reward_per_step == -0.02


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "t", "the table is empty"),
        ("lag,reward_per_step,utilisation\n", "t", "the table is empty"),
        ("0,.15\n", "t:1", "has no utilisation"),
        ("lag,reward_per_step,utilisation\n0,.15,35%\n1,much,55%\n", "t:3", "reward_per_step 'much' is not a number"),
        ("0,.15,0\n", "t:1", "utilisation"),
        ("0,.15,135%\n", "t:1", "at most 100 %"),
        ("-1,.15,35%\n", "t:1", "lag is -1"),
        ("0,.15,35%,-1\n", "t:1", "uncertainty is -1"),
        ("0,.15,35%,.1,5\n", "t:1", "5 fields"),
        ("lag,rewrad,utilisation\n", "t:1", "unknown column 'rewrad'"),
        ('[{"lag": true, "reward": 1, "utilisation": 1}]', "t: [0]", "lag True is not a number"),
        ("[3]", "t: [0]", "3 is not a row"),
        ("{}", "t", "no list of rows"),
        ("[", "t:1", "broken JSON"),
        ("[[0, .1, .5],, 1]", "t:1", "broken JSON"),
    ],
)
def test_errors_name_the_row(text: str, where: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_table(text, source="t")
    assert caught.value.where == where
    assert says in caught.value.what
    assert caught.value.hint
