from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_forecast import make_forecast
from tidemill.telemetry.manifest import write_forecast
from tidemill.telemetry.metrics import CHARTS, METRICS
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory


def charts_of(tmp_path: Path, metrics: str, events: str = "") -> dict[str, Any]:
    run = RunDirectory(tmp_path)
    run.metrics.write_text(metrics)
    run.events.write_text(events)
    return chart_data(RunData.load(run))


def test_only_measured_metrics_are_drawn(tmp_path: Path) -> None:
    data = charts_of(tmp_path, '{"step":1,"entropy":0.5}\n{"step":2,"entropy":0.25,"kl_ref":1e-4}\n')
    assert data["steps"] == [1, 2]
    assert [chart["title"] for chart in data["charts"]] == ["Entropy", "KL"]
    assert data["charts"][0]["series"] == [{"label": "entropy", "values": [0.5, 0.25]}]
    assert data["charts"][1]["series"] == [{"label": "to reference", "values": [None, 1e-4]}]


def test_evaluations_have_their_steps_even_without_a_metrics_line(tmp_path: Path) -> None:
    figures = '"reward_mean":0.75,"reward_stderr":0.1,"greedy_accuracy":0.25,"n":8'
    event = f'{{"event":"evaluation","step":0,{figures}}}\n{{"event":"resume","step":1}}\n'
    data = charts_of(tmp_path, '{"step":1,"eval/reward_mean":1.5,"eval/greedy_accuracy":0.5}\n', event)
    assert data["steps"] == [0, 1] and data["resumed"] == [1]
    assert [chart["title"] for chart in data["charts"]] == ["Held-out accuracy", "Held-out reward"]
    assert data["charts"][0]["series"] == [{"label": "accuracy", "values": [0.25, 0.5]}]
    assert data["charts"][1]["series"] == [{"label": "mean", "values": [0.75, 1.5]}]


def test_graded_rewards_have_no_accuracy_chart(tmp_path: Path) -> None:
    (chart,) = charts_of(tmp_path, '{"step":1,"eval/reward_mean":1.5}\n')["charts"]
    assert (chart["title"], chart["series"]) == ("Held-out reward", [{"label": "mean", "values": [1.5]}])


def test_sets_share_the_charts_of_held_out_prompts_and_have_their_own_pass_at_k(tmp_path: Path) -> None:
    event = '{"event":"evaluation","step":1,"set":"math","reward_mean":0.5,"n":8}\n'
    values = '"eval/reward_mean":0.25,"eval/drawn_reward_mean":0.125,"eval/pass_at_2":0.5,"eval/pass_at_16":0.75'
    of_set = '"eval/math/reward_mean":0.5,"eval/math/reward_stderr":0.1,"eval/math/pass_at_1":1.0,"eval/math/n":8'
    data = charts_of(tmp_path, f'{{"step":1,{values},{of_set}}}\n', event)
    drawn = {chart["title"]: {one["label"]: one["values"] for one in chart["series"]} for chart in data["charts"]}
    assert drawn == {
        "Held-out reward": {"mean": [0.25], "drawn samples": [0.125], "math": [0.5]},
        "pass@k": {"pass@2": [0.5], "pass@16": [0.75]},
        "pass@k, math": {"pass@1": [1.0]},
    }


def test_the_band_is_the_standard_deviation(tmp_path: Path) -> None:
    (chart,) = charts_of(tmp_path, '{"step":1,"reward_mean":0.5,"reward_std":0.25}\n')["charts"]
    assert (chart["title"], chart["band"]) == ("Reward", [0.25])


def test_shares_are_drawn_in_per_cent_and_with_few_figures(tmp_path: Path) -> None:
    (chart,) = charts_of(tmp_path, '{"step":1,"clip_fraction":0.0123456789}\n')["charts"]
    assert chart["series"][0]["values"] == [1.2346]


def test_several_rewards_share_a_chart_and_unknown_metrics_get_their_own(tmp_path: Path) -> None:
    data = charts_of(tmp_path, '{"step":1,"reward/exact":1,"reward/length":0.5,"my_metric":3}\n')
    titles = {chart["title"]: [one["label"] for one in chart["series"]] for chart in data["charts"]}
    assert titles == {"Single rewards": ["exact", "length"], "my_metric": ["my_metric"]}


def test_every_registered_metric_is_drawn_in_a_group_and_under_a_title(tmp_path: Path) -> None:
    values = {name: float(number) for number, name in enumerate(METRICS, 1)}
    charts = charts_of(tmp_path, json.dumps({"step": 1, **values, "mine": 0.5}) + "\n")["charts"]
    assert {chart["title"] for chart in charts} & set(METRICS) == set()
    assert [chart["title"] for chart in charts if chart["group"] == "Other"] == ["mine"]
    drawn = {name for chart in CHARTS for name in (*chart.series, chart.band)}
    assert METRICS.keys() <= drawn


def test_constant_charts_are_listed_instead(tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "learning_rate": 1e-5,
            "kl_ref": 1.4e-17 * step,
            "entropy": 0.1 + step,
            "my_metric": 0.3 + 1e-8 * step,
        }
        for step in (1, 2, 3)
    ]
    data = charts_of(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    assert [chart["title"] for chart in data["charts"]] == ["Entropy"]
    assert data["constant"] == [("KL", 0.0), ("Learning rate", 1e-5), ("my_metric", 0.3)]


def long_run(tmp_path: Path, steps: int) -> RunData:
    run = RunDirectory(tmp_path)
    lines = [{"step": step, "entropy": 5.0 if step == 4321 else step % 7 / 7} for step in range(1, steps + 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.events.write_text("")
    return RunData.load(run)


def test_a_long_run_is_drawn_with_few_points_and_all_its_spikes(tmp_path: Path) -> None:
    data = chart_data(long_run(tmp_path, 9000))
    (values,) = (one["values"] for one in data["charts"][0]["series"])
    assert len(data["steps"]) == len(values) <= 2000 and data["steps"] == sorted(set(data["steps"]))
    assert (data["steps"][0], data["steps"][-1], max(values), min(values)) == (1, 9000, 5.0, 0.0)


@pytest.mark.parametrize(("before", "now"), [(10, 13), (2000, 2000), (5000, 5003), (5000, 7000)])
def test_a_continuation_joins_what_the_reader_has(tmp_path: Path, before: int, now: int) -> None:
    first = chart_data(long_run(tmp_path, before))
    data, whole = long_run(tmp_path, now), chart_data(long_run(tmp_path, now))
    rest = chart_data(data, after=first["steps"][-1], cursor=first["cursor"])
    assert "reset" not in rest and rest["start"] > 0 and len(rest["steps"]) < len(whole["steps"])
    assert first["steps"][: rest["start"]] + rest["steps"] == whole["steps"]
    both = [one["charts"][0]["series"][0]["values"] for one in (first, rest, whole)]
    assert both[0][: rest["start"]] + both[1] == both[2]


def test_a_gold_score_that_is_logged_after_its_step_replaces_nothing(tmp_path: Path) -> None:
    def charts(steps: int, gold: int, **asked: Any) -> dict[str, Any]:
        metrics = "".join(f'{{"step":{at},"entropy":{at}}}\n' for at in range(1, steps + 1))
        scores = (f'{{"event":"gold","step":{at},"proxy_mean":{at},"gold_mean":0.5}}\n' for at in range(1, gold + 1))
        charts_of(tmp_path, metrics, "".join(scores))
        return chart_data(RunData.load(RunDirectory(tmp_path)), **asked)

    first = charts(12, 11)
    rest, whole = charts(13, 12, after=12, cursor=first["cursor"]), charts(13, 12)
    assert "reset" not in rest and first["steps"][: rest["start"]] + rest["steps"] == whole["steps"]
    for old, new, both in zip(*(one["charts"] for one in (first, rest, whole)), strict=True):
        joined = [a["values"][: rest["start"]] + b["values"] for a, b in zip(old["series"], new["series"], strict=True)]
        assert joined == [one["values"] for one in both["series"]]


@pytest.mark.parametrize(
    "events",
    [
        '{"event":"evaluation","step":3,"reward_mean":0.5,"n":8}\n',  # late
        '{"event":"gold","step":3,"proxy_mean":0.5,"gold_mean":0.25}\n',
    ],
)
def test_a_reader_of_a_replaced_history_gets_all(tmp_path: Path, events: str) -> None:
    def lines(session: int) -> str:
        return "".join(f'{{"step":{at},"session":{session},"entropy":{at}}}\n' for at in range(1, 6))

    first = charts_of(tmp_path, lines(1))
    rewound = charts_of(tmp_path, lines(2))
    for data in (rewound, charts_of(tmp_path, lines(1), events), charts_of(tmp_path, lines(1).replace("entropy", "x"))):
        assert data["cursor"] != first["cursor"]
    answer = chart_data(RunData.load(RunDirectory(tmp_path)), after=5, cursor=first["cursor"])
    assert answer["reset"] and answer["steps"] == [1, 2, 3, 4, 5]


def test_held_out_metrics_share_the_chart_of_training_metrics(tmp_path: Path) -> None:
    (chart,) = charts_of(tmp_path, '{"step":1,"score_margin":2,"eval/score_margin":1.5,"eval/score_mean":-1}\n')[
        "charts"
    ]
    assert chart["title"] == "Reward model scores"
    assert [(one["label"], one["values"]) for one in chart["series"]] == [
        ("margin", [2]),
        ("margin, held-out", [1.5]),
        ("mean, held-out", [-1]),
    ]
    assert ["points" in one for one in chart["series"]] == [False, True, True]  # joined over steps without evaluation


def test_a_chart_of_possibly_negative_values_has_no_lower_limit(tmp_path: Path) -> None:
    (chart,) = charts_of(tmp_path, '{"step":1,"kl_ref_k1":-0.05}\n')["charts"]
    assert chart["low"] is None


def test_charts_that_stay_at_zero_are_omitted(tmp_path: Path) -> None:
    assert charts_of(tmp_path, '{"step":1,"tokens_recovered":0,"tokens_other_weights":0}\n')["charts"] == []
    assert len(charts_of(tmp_path, '{"step":1,"tokens_recovered":5,"tokens_other_weights":0}\n')["charts"]) == 1


def test_an_empty_run_has_no_charts(tmp_path: Path) -> None:
    data = charts_of(tmp_path, "")
    assert (data["steps"], data["charts"], data["constant"]) == ([], [], [])


def test_tokens_are_stacked_by_lag(tmp_path: Path) -> None:
    lines = '{"step":1,"lag/0":1.0}\n{"step":2,"lag/0":0.5,"lag/2":0.3,"lag/10":0.2}\n'
    (chart,) = charts_of(tmp_path, lines)["charts"]
    assert (chart["title"], chart["kind"]) == ("Tokens by lag", "stacked")
    assert [(one["label"], one["values"][1]) for one in chart["series"]] == [("0", 50.0), ("2", 30.0), ("10", 20.0)]


def test_mismatch_by_engine_is_one_chart_and_workers_have_none(tmp_path: Path) -> None:
    lines = (
        '{"step":1,"mismatch_kl/vllm":0.1,"mismatch_kl/vllm/spot-0":0.1,"mismatch_tokens/vllm":5,'
        '"mismatch_kl/embedded":0}\n'
    )
    (chart,) = charts_of(tmp_path, lines)["charts"]
    assert chart["title"] == "Mismatch by engine"
    assert [(one["label"], one["values"]) for one in chart["series"]] == [("embedded", [0.0]), ("vllm", [0.1])]


def test_lag_charts_are_omitted_on_policy(tmp_path: Path) -> None:
    assert charts_of(tmp_path, '{"step":1,"lag/0":1.0,"policy_lag_mean":0,"policy_lag_max":0}\n')["charts"] == []


def test_a_correction_that_changes_nothing_is_not_drawn(tmp_path: Path) -> None:
    nothing = '{"step":1,"correction_masked":0.0,"correction_truncated":0.0}\n'
    assert charts_of(tmp_path, nothing)["charts"] == []
    (chart,) = charts_of(tmp_path, '{"step":1,"correction_masked":0.25,"correction_truncated":0.0}\n')["charts"]
    assert chart["series"][0] == {"label": "masked", "values": [25.0]}


def test_the_forecast_is_drawn_with_the_step_times(tmp_path: Path) -> None:
    write_forecast(tmp_path, make_forecast(3.0))
    data = charts_of(tmp_path, '{"step":0}\n{"step":1,"time_step_s":3.5}\n{"step":2,"time_step_s":1.5}\n')
    (chart,) = [chart for chart in data["charts"] if chart["title"] == "Step time"]
    assert chart["series"] == [
        {"label": "forecast", "values": [None, 3.0, 2.0]},
        {"label": "actual", "values": [None, 3.5, 1.5]},
    ]
    assert chart["band"] == [None, 0.3, 0.2] and "forecast" in chart["note"]
    assert len(data["charts"]) == 1


def test_a_supervised_run_shows_its_loss_before_its_step_times(tmp_path: Path) -> None:
    data = charts_of(tmp_path, '{"step":1,"time_step_s":3.5,"loss":2.5,"token_accuracy":0.5}\n')
    assert data["overview"] == ["Loss", "Token accuracy", "Step time"]
    assert "forecast" not in {chart["title"]: chart for chart in data["charts"]}["Step time"]["note"]
