"""The tables of the interactive explanations equal what commands and algorithms give."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.site.explorations import TABLES, eviction, gae, policy_lag, reward_hacking, write_tables
from tests.commands import run_here
from tidemill.algos.kl import mismatch
from tidemill.algos.losses import ppo_clip as loss_of
from tidemill.guard.detectors import Thresholds

MOST_BYTES = 80_000
NOMINAL = pytest.approx
pytestmark = pytest.mark.xdist_group("explorations")  # the tables take seconds


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As a page reads them."""
    folder = tmp_path_factory.mktemp("new") / "site" / "tables"  # does not exist
    write_tables(folder)
    assert {path.stem for path in folder.iterdir()} == set(TABLES)
    found = {}
    for name in TABLES:
        script = (folder / f"{name}.js").read_text(encoding="utf-8")
        assert len(script.encode()) <= MOST_BYTES, name
        match = re.fullmatch(r'window\.TABLES=window\.TABLES\|\|\{\};\nwindow\.TABLES\["(.*?)"\]=(.*);\n', script)
        assert match and match[1] == name
        found[name] = json.loads(match[2])
    return found


def plan(*argv: str) -> Any:
    ran = run_here("plan", *argv, "--json")
    assert ran.code == 0, ran.err
    return ran.data


@pytest.mark.parametrize(
    ("parameters", "algorithm", "gpu"),
    [(70e9, "ppo", "h100-80gb"), (70e9, "grpo", "h100-80gb"), (8e9, "dapo", "a100-80gb"), (0.5e9, "sft", "b200-180gb")],
)
def test_memory_is_that_of_the_command(tables: dict[str, Any], parameters: float, algorithm: str, gpu: str) -> None:
    table = tables["memory"]
    gpus = [each["name"] for each in table["gpus"]]
    by_gpu = table["plans"][table["parameters"].index(parameters)][table["algorithms"].index(algorithm)]
    cell, data = by_gpu[gpus.index(gpu)], {}
    for count, (used, _, _, per_gpu, missing) in zip(table["counts"], cell["each"], strict=True):
        data = plan("memory", "--params", str(parameters), "--algorithm", algorithm, "--gpu", gpu, "--gpus", str(count))
        (fit,) = (each for each in data["fits"] if each["gpus"] == used)
        assert fit["bytes_per_gpu"] / 1e9 == NOMINAL(per_gpu, rel=1e-3)
        assert fit["missing_bytes"] / 1e9 == NOMINAL(missing, rel=1e-3)
        assert fit["usable_bytes"] / 1e9 == NOMINAL(cell["usable"])
    assert data["total_bytes"] / 1e9 == cell["total"]
    assert data["min_gpus"] == cell["least"]
    assert data["min_gpus_with_activations"] == cell["least_all"]
    assert {role: sum(parts) * 1e9 for role, parts in cell["roles"].items()} == NOMINAL(data["by_role"])


def test_memory_of_the_worked_example(tables: dict[str, Any]) -> None:
    table = tables["memory"]
    ppo, grpo = (table["plans"][table["parameters"].index(70e9)][one][1] for one in (0, 1))
    assert (ppo["total"], ppo["least"]) == (2520, 32)
    assert (grpo["total"], grpo["least"]) == (1260, 16)


@pytest.mark.parametrize(
    ("parameters", "link", "workers", "step"), [(70e9, 400, 1, 10), (8e9, 10, 64, 20), (671e9, 800, 4, 160)]
)
def test_transfers_are_those_of_the_command(
    tables: dict[str, Any], parameters: float, link: int, workers: int, step: int
) -> None:
    table = tables["weight-transfer"]
    model, place = table["parameters"].index(parameters), table["links"].index(link)
    among = table["workers"].index(workers)
    options = {"--params": parameters, "--link-gbps": link, "--workers": workers, "--step-s": step}
    data = plan("weights", *(str(word) for pair in options.items() for word in pair))
    for at, path in enumerate(table["paths"]):
        assert table["seconds"][model][place][among][at] == NOMINAL(data["paths"][path]["seconds"], rel=1e-4)
        slack = table["slack"][model][place][among][at][table["steps"].index(step)]
        assert slack == NOMINAL(data["paths"][path]["slack_s"], rel=1e-3)
        assert table["sizes"][model][at] == NOMINAL(data["paths"][path]["bytes"], rel=1e-4)


def test_a_transfer_of_the_worked_example_takes_2_8_seconds(tables: dict[str, Any]) -> None:
    table = tables["weight-transfer"]
    model, link = table["parameters"].index(70e9), table["links"].index(400)
    assert table["seconds"][model][link][0][0] == 2.8
    assert table["slack"][model][link][0][0][table["steps"].index(10)] == 7.2


@pytest.mark.parametrize(("rollout", "training", "gpus"), [(60, 40, 8), (120, 10, 32), (30, 90, 4)])
def test_overlap_is_that_of_the_command(tables: dict[str, Any], rollout: int, training: int, gpus: int) -> None:
    table = tables["overlap"]
    row, column = table["rollouts"].index(rollout), table["trainings"].index(training)
    data = plan("overlap", "--rollout", str(rollout), "--training", str(training), "--gpus", str(gpus))
    names = ("utilisation_in_sequence", "utilisation_overlapped", "rollout_share")
    assert table["plans"][row][column] == NOMINAL([data[name] for name in names], rel=1e-4)
    names = ("rollout_gpus", "training_gpus", "utilisation_resized")
    resized = table["resized"][row][column][table["gpus"].index(gpus)]
    assert resized == NOMINAL([data[name] for name in names], rel=1e-4)


def summed(table: dict[str, Any], inputs: list[float], *, gamma: float, lam: float, end: str) -> list[float]:
    """The advantages as the page computes them."""
    shares = table["shares"][table["ends"].index(end)][table["gammas"].index(gamma)][table["lambdas"].index(lam)]
    return [sum(value * share[t] for value, share in zip(inputs, shares, strict=True)) for t in range(gae.STEPS)]


def test_advantages_of_the_worked_example(tables: dict[str, Any]) -> None:
    example = tables["gae"]["example"]
    inputs = [*example["rewards"], *example["values"], example["next"]]
    found = summed(tables["gae"], inputs, gamma=example["gamma"], lam=example["lambda"], end=example["end"])
    assert found == NOMINAL([0.4292, 0.3564, 0.2801, 0.2], abs=5e-5)


@settings(max_examples=30, deadline=None)
@given(
    inputs=st.lists(st.floats(-2, 2), min_size=9, max_size=9),
    gamma=st.sampled_from(gae.GAMMAS),
    lam=st.sampled_from(gae.LAMBDAS),
    end=st.sampled_from(gae.ENDS),
)
def test_advantages_are_sums_of_shares(
    tables: dict[str, Any], inputs: list[float], gamma: float, lam: float, end: str
) -> None:
    whole = gae.advantages(inputs[:4], inputs[4:8], inputs[8], gamma=gamma, lam=lam, end=end).tolist()
    assert summed(tables["gae"], inputs, gamma=gamma, lam=lam, end=end) == NOMINAL(whole, abs=1e-9)


def test_the_loss_of_the_worked_example_is_minus_0_96(tables: dict[str, Any]) -> None:
    table = tables["ppo-clip"]
    objective, gradient, ratio = point(table, -1.5, 0.8, low=0.2, high=0.2, dual=0)
    assert (objective, gradient) == (0.96, 0)
    assert ratio == NOMINAL(1.6487, abs=5e-5)


def cell(table: dict[str, Any], kind: str, advantage: float, *, low: float, high: float, dual: float) -> list[Any]:
    """Objectives and gradients, with the index of the page's script."""
    at = table["advantages"].index(advantage) * len(table["lows"]) + table["lows"].index(low)
    at = (at * len(table["highs"]) + table["highs"].index(high)) * len(table["duals"]) + table["duals"].index(dual)
    return [table["unique"][one] for one in table[kind][at]]


def point(table: dict[str, Any], logprob: float, advantage: float, **limits: float) -> tuple[float, float, float]:
    objective, gradient = cell(table, "points", advantage, **limits)
    at = table["logprobs"].index(logprob)
    return objective[at], gradient[at], table["point_ratios"][at]


@pytest.mark.parametrize("dual", [0, 3.0])
@pytest.mark.parametrize("advantage", [-2.0, -0.8, 0.0, 1.2])
def test_points_are_on_the_curve_and_those_of_the_loss(tables: dict[str, Any], advantage: float, dual: float) -> None:
    table, limits = tables["ppo-clip"], {"low": 0.3, "high": 0.28, "dual": dual}
    curve, _ = cell(table, "curves", advantage, **limits)
    for logprob in table["logprobs"]:
        objective, gradient, ratio = point(table, logprob, advantage, **limits)
        now_T = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
        before_T, advantages_T = torch.full_like(now_T, -2.0), torch.full_like(now_T, advantage)
        loss_T = loss_of(
            now_T, before_T, advantages_T, clip_low=0.3, clip_high=0.28, dual_clip=dual or None
        ).loss_T.sum()
        (slope_T,) = torch.autograd.grad(-loss_T, now_T)
        assert objective == NOMINAL(-loss_T.item(), rel=1e-3, abs=1e-9)
        assert gradient == NOMINAL(slope_T.item(), rel=1e-3, abs=1e-9)
        after = next(at for at, value in enumerate(table["ratios"]) if value >= ratio)
        low, high = table["ratios"][after - 1], table["ratios"][after]
        between = curve[after - 1] + (ratio - low) / (high - low) * (curve[after] - curve[after - 1])
        assert objective == NOMINAL(between, rel=2e-3, abs=1e-9)


def test_ratios_and_weights_by_lag(tables: dict[str, Any]) -> None:
    table = tables["policy-lag"]
    for change, ratios, weights in zip(table["changes"], table["ratios"], table["weights"], strict=True):
        logprobs_KT = policy_lag.logprobs_of_versions(change)
        assert ratios[0]["effective"] == 1
        assert all(before["effective"] > after["effective"] for before, after in pairwise(ratios))
        for lag in table["lags"]:
            logged = mismatch(logprobs_KT[0], logprobs_KT[lag]).reduce()
            assert ratios[lag]["effective"] == NOMINAL(logged["effective_sample_size"], rel=1e-4)
            assert sum(ratios[lag]["histogram"]) == table["tokens"]
            for setting, found in zip(table["settings"], weights[lag], strict=True):
                if setting["kind"] == "none":
                    assert (found["effective"], found["mean"], found["changed"]) == (1, 1, [0, 0])
                elif setting["kind"] in ("tis", "mu_step"):
                    assert found["mean"] <= 1.05
                    assert found["effective"] >= ratios[lag]["effective"] - 1e-6


def test_the_weights_of_a_token_by_hand() -> None:
    # Two versions later a token is e times as probable: tis bounds the ratio at 2, which neither of two steps reaches.
    logprobs_KT = torch.zeros(3, policy_lag.SAMPLES * policy_lag.LENGTH, dtype=torch.float64)
    logprobs_KT[1, 0], logprobs_KT[2, 0] = 0.5, 1.0
    assert policy_lag.corrected(logprobs_KT, 2, "tis", 2.0).weights_T[0].item() == 2.0
    assert policy_lag.corrected(logprobs_KT, 2, "mu_step", None).weights_T[0].item() == NOMINAL(2.71828, abs=1e-5)
    # (2 + 2)^2 / (3 (4 + 4)), with one weight of 0
    assert policy_lag.effective(torch.tensor([2.0, 2.0, 0.0], dtype=torch.float64)) == NOMINAL(16 / 24)


def test_an_eviction_loses_no_sample(tables: dict[str, Any]) -> None:
    table = tables["eviction"]
    unnoticed, *noticed = table["runs"]
    assert table["notices"][0] == 0
    assert unnoticed["evicted"]["lost"] > 0
    assert all(run["evicted"]["lost"] == 0 for run in noticed)
    final = [{each["name"]: each["pieces"][-1]["tokens"][-1] for each in run["samples"]} for run in table["runs"]]
    assert final[0] == final[1] == final[2]
    assert {run["trained"] for run in table["runs"]} == {sum(final[0].values())}


def test_the_table_of_an_eviction_is_that_of_the_runs_events(tables: dict[str, Any]) -> None:
    for notice_s, found in zip(eviction.NOTICES_S, tables["eviction"]["runs"], strict=True):
        run, _ = eviction.simulated(notice_s)
        (event,) = (event for event in run.events if event["event"] == "eviction")
        assert found["machines"][event["worker"]]["eviction"] == event["elapsed_s"] == eviction.TAKEN_S
        assert found["evicted"]["lost"] == event["tokens_lost"] == int(run.total("tokens_lost"))
        for sample in found["samples"]:
            for piece, following in pairwise(sample["pieces"]):
                assert following["tokens"][0] == piece["tokens"][-1]  # it continues from its last known token
                assert following["at"][0] >= piece["at"][-1]
            for piece in sample["pieces"]:
                assert piece["at"] == sorted(piece["at"])
                assert piece["tokens"] == sorted(piece["tokens"])


@pytest.mark.parametrize("name", ["flawed", "honest"])
def test_the_guards_own_limits_decide_as_in_the_recorded_run(tables: dict[str, Any], name: str) -> None:
    table, (run, evidence) = tables["reward-hacking"], reward_hacking.recorded(name)
    limits = Thresholds()
    assert table["default"] == [limits.gain_limit, limits.gap_limit]
    alarm = table[name]["alarms"][table["gains"].index(3)][table["gaps"].index(14)]
    recorded = [(each["step"], each["onset"], each["test"]) for each in run["decisions"]][:1]
    assert ([] if alarm is None else [(alarm["step"], alarm["onset"], alarm["test"])]) == recorded
    assert len(table[name]["sums"]) == len(evidence)


def test_a_higher_limit_decides_later(tables: dict[str, Any]) -> None:
    steps = [[each["step"] if each else 99 for each in row] for row in tables["reward-hacking"]["flawed"]["alarms"]]
    for row in (*steps, *zip(*steps, strict=True)):
        assert list(row) == sorted(row)
